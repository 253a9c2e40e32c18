"""Building blocks that methods share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero: what is added to a residual stream through it changes nothing at first.

    A class of its own, since transformers applies `_init_weights` only to modules that hold parameters themselves.
    """

    def reset_parameters(self) -> None:
        """Fill weight and bias with zeros."""
        for parameter in self.parameters(recurse=False):
            nn.init.zeros_(parameter)


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at the start: W and b are zero until trained (Medusa, arXiv 2401.10774, 2.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = ZeroLinear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., D] to [..., D]."""
        return x + F.silu(self.linear(x))


class DraftVocabulary(nn.Module):
    """The target tokens a drafter can guess: the whole vocabulary, or Vd of its ids.

    ids [Vd] long, sorted; a persistent buffer, so that a checkpoint carries its map.
    """

    ids: Tensor

    def __init__(self, draft_vocab_size: int | None, target_vocab_size: int) -> None:
        super().__init__()
        self.size = draft_vocab_size if draft_vocab_size is not None else target_vocab_size
        self.whole = draft_vocab_size is None or draft_vocab_size == target_vocab_size
        if not 0 < self.size <= target_vocab_size:
            raise ValueError(f"draft_vocab_size must be between 1 and V={target_vocab_size}, but is {draft_vocab_size}")
        self.register_buffer("ids", torch.arange(self.size), persistent=not self.whole)

    def choose(self, token_ids: Tensor) -> None:
        """Fix the ids [Vd] long. Raises ValueError when they are not Vd distinct, sorted ids."""
        if token_ids.shape != self.ids.shape or bool((token_ids.diff() <= 0).any()):
            raise ValueError(
                f"a draft vocabulary must be {self.size} distinct ids in ascending order, found {len(token_ids)} ids"
            )
        self.ids.copy_(token_ids)

    @property
    def chosen(self) -> Tensor | None:
        """The ids [Vd] long, or None for the whole vocabulary."""
        return None if self.whole else self.ids

    def to_target(self, index: Tensor) -> Tensor:
        """Turn indices into Vd [...] into target token ids [...]."""
        return index if self.whole else self.ids[index]

    def from_target(self, tokens: Tensor) -> Tensor:
        """Turn target token ids [...] into indices into Vd [...], -1 for tokens outside."""
        if self.whole:
            return tokens
        index = torch.searchsorted(self.ids, tokens).clamp(max=self.size - 1)
        return torch.where(self.ids[index] == tokens, index, -1)


def normalise(x: Tensor) -> Tensor:
    """Scale each vector [..., D] to root mean square 1, computed in fp32, so that any target trains alike."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)
