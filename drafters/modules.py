"""Building blocks that methods share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..core.decoder_layer import DecoderLayer

if TYPE_CHECKING:
    from .base import TargetView


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


class LogitScale(nn.Module):
    """Factors [N] by which states are multiplied before heads read them, one for each head: how sure guesses are.

    They are learned as logarithms and faster than weights (`RATE`, see `Drafter.learning_rate_scales`): Adam moves any
    number by about the learning rate in a step, and a factor near 2 that moves by 1e-3 would be wrong for most of a
    run. Heads that are sure and wrong have large, useless gradients.
    """

    RATE = 20.0

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(count))

    def reset_parameters(self) -> None:
        """Start at 1."""
        nn.init.zeros_(self.log)

    @torch.no_grad()
    def start_at(self, value: float) -> None:
        """Set all factors to a value above 0."""
        self.log.fill_(math.log(value))

    def forward(self) -> Tensor:
        """Return the factors [N]."""
        return self.log.exp()


def normalise(x: Tensor) -> Tensor:
    """Scale each vector [..., D] to root mean square 1, computed in fp32, so that any target trains alike."""
    return F.rms_norm(x.float(), x.shape[-1:]).to(x.dtype)


def frozen_embedding(target: TargetView, tokens: Tensor, like: Tensor) -> Tensor:
    """Return the target's embeddings [..., D] of tokens [...] at root mean square 1, in the type of `like`."""
    with torch.no_grad():
        return normalise(target.embed(tokens)).to(like.dtype)


def typical_size(target: TargetView) -> float:
    """Return the usual root mean square of the target's final states: what a trained logit scale starts as."""
    return float(target.typical_state().pow(2).mean(-1).sqrt().mean())


def unsure_scale(rows: Tensor) -> float:
    """Return the logit scale at which states of root mean square 1 get scores from a head [Vd, D] about 1 apart.

    For drafters whose first states are not yet what the head reads: at the scale of true ones the first guesses would
    be sure, and wrong.
    """
    return float(rows.pow(2).sum(-1).mean().rsqrt())


def head_scores(
    states: Tensor, scale: Tensor, projection: nn.Linear | None, target: TargetView, vocabulary: DraftVocabulary
) -> Tensor:
    """Return scores [..., Vd] of states [..., D] under a head of the drafter's own, or the target's if it is None."""
    states = states * scale  # and not the scores, of which there are many more
    if projection is not None:
        return projection(states)
    return target.logits(states.to(target.dtype), vocabulary.chosen)


def following(x: Tensor, by: int) -> Tensor:
    """Move entries of a sequence [B, T, ...] to the front: entry t becomes what stood at t + by; zeros past the end."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, : min(by, x.shape[1])])], dim=1)


def aligned_mask(visible: Tensor, step: int) -> Tensor:
    """Say what slots see at one of several aligned steps, when every step's keys are kept (see `AlignedSteps`).

    visible [B, Q, C] bool: what a block of slots sees of step 0, from `core.masks.causal`. step: i, from 0.

    Returns [B, Q, C + i * Q] bool: step 0 as told, and of each later step the slot itself alone.

    Example, two slots at step 1: slot 0 sees columns 0 (its step 0) and 2 (its step 1), slot 1 sees 0, 1 and 3.
    """
    batch, slots, _ = visible.shape
    itself = torch.eye(slots, dtype=torch.bool, device=visible.device).expand(batch, slots, slots)
    return torch.cat([visible, *[itself] * step], dim=2)


BLOCKS = 4
"""Blocks of slots that later steps run in: a number, not a size, so that every process makes as many module calls."""


@dataclass(frozen=True, slots=True)
class AlignedBlock:
    """Slots that run together after step 0.

    part: which of those that go on. positions [B, Q] long; visible [B, Q, C] bool of step 0; cache: steps so far.
    """

    part: slice
    positions: Tensor
    visible: Tensor
    cache: DynamicCache


class AlignedSteps:
    """Runs a decoder layer several times over whole sequences, each time on what it made of them: serving, in parallel.

    Slot t at step i stands for a drafter that has read slots 0 .. t and has gone on for i steps on its own. As in
    service it stands at position t + i and sees the true features of slots up to t (their step 0) and its own later
    steps, of no other slot (training-time test, EAGLE-3, arXiv 2503.01840; also HASS, arXiv 2408.15766). Gradients flow
    through all steps; a method that wants none detaches what it feeds.

    Of later steps a slot sees its own keys alone, so they run for those slots only that are asked for, in blocks that
    stand apart: each against the slots up to its end and its own later steps. It is exact, and over 5 steps it saves
    two thirds of the keys.

    layer: the layer to run. positions [B, T] long. visible [B, T, T] bool: who sees whom at step 0.
    slots [B, Q] long: the slots that go on after step 0, in ascending order; all of them if it is None.
    """

    def __init__(self, layer: DecoderLayer, positions: Tensor, visible: Tensor, slots: Tensor | None = None) -> None:
        self.layer = layer
        self.positions = positions
        self.visible = visible
        self.slots = slots
        self.steps = 0
        self._first = DynamicCache()  # concatenates, so that gradients survive; a RaggedCache writes in place
        self._blocks: list[AlignedBlock] = []

    def __call__(self, x: Tensor, attended: Tensor | None = None) -> Tensor:
        """Run the next step on a residual stream x [B, T, D], or [B, Q, D] of the slots that go on after step 0.

        attended: what attention reads, see `DecoderLayer`. Returns [B, T, D] or [B, Q, D].
        """
        if self.steps == 0:
            out = self.layer(x, self.positions, self.visible, self._first, attended)
        else:
            self._blocks = self._blocks or self._cut(x.shape[1])
            out = torch.cat([self._later(block, x, attended) for block in self._blocks], dim=1)
        self.steps += 1
        return out

    def _cut(self, slots: int) -> list[AlignedBlock]:
        """Give every block a cache that begins with what step 0 left of the slots up to its end."""
        first, blocks, count = self._first.layers[0], [], min(BLOCKS, slots)
        assert isinstance(first, DynamicLayer) and first.keys is not None and first.values is not None
        parts = [slice(slots * i // count, slots * (i + 1) // count) for i in range(count)]
        if self.slots is None:
            ends = [part.stop for part in parts]
        else:
            ends = (torch.stack([self.slots[:, part].max() for part in parts]) + 1).tolist()
        for part, end in zip(parts, ends, strict=True):
            cache = DynamicCache()
            if self.slots is None:
                visible, positions = self.visible[:, part], self.positions[:, part]
            else:
                mine = self.slots[:, part]
                positions = self.positions.gather(1, mine)
                visible = self.visible.gather(1, mine[..., None].expand(-1, -1, self.visible.shape[2]))
            cache.update(first.keys[:, :, :end], first.values[:, :, :end], 0)
            blocks.append(AlignedBlock(part, positions, visible[:, :, :end], cache))
        return blocks

    def _later(self, block: AlignedBlock, x: Tensor, attended: Tensor | None) -> Tensor:
        visible = aligned_mask(block.visible, self.steps)
        read = None if attended is None else attended[:, block.part]
        return self.layer(x[:, block.part], block.positions + self.steps, visible, block.cache, read)
