"""What drafters remember of a row that need only its newest state: all heads on one position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv_cache import RaggedCache
from .base import DraftState, Observed


@dataclass
class NewestState(DraftState):
    """feature [B, D]: what the drafter reads of the position before the root; root [B] long.

    cache: of a layer over committed positions, for drafters that have one.
    """

    feature: Tensor
    root: Tensor
    cache: RaggedCache | None = None

    @classmethod
    def empty(cls, batch_size: int, width: int, like: Tensor, with_cache: bool = False) -> NewestState:
        """Return the state of rows of which nothing was observed; like: has the type and the device."""
        root = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return cls(
            like.new_zeros(batch_size, width), root, RaggedCache(batch_size, like.device) if with_cache else None
        )

    def keep(self, observed: Observed, newest: Tensor) -> None:
        """Take the newest states [B, D] and roots; rows of length 0 keep what they have."""
        fresh = observed.lengths > 0
        self.feature = torch.where(fresh[:, None], newest.to(self.feature.dtype), self.feature)
        self.root = torch.where(fresh, at_end(observed.next_tokens, observed.lengths), self.root)


def at_end(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the last valid entry [B, ...] of values [B, A, ...], right-padded; the first where lengths [B] is 0."""
    return values[torch.arange(len(lengths), device=lengths.device), (lengths - 1).clamp(min=0)]
