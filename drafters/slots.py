"""Drafters that read one slot for each committed token with one decoder layer: the EAGLE family.

Slot t pairs a state at position t (the target's, or the drafter's own guess of it) with the token that follows. What
the layer makes of it both gives the law of the token after that and is the state of the next slot where the target's is
not known yet. All of a method's own is in one function, `Feed`, so training and serving cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import masks
from ..core.decoder_layer import DecoderLayer
from ..core.kv_cache import RaggedCache
from ..core.shapes import rounded_up
from .base import DraftBatch, DraftRequest, DraftState, Observed
from .growth import Laws, Level
from .modules import BLOCKS, AlignedSteps, following
from .states import at_end

Feed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From states [B, Q, D] and the tokens [B, Q] that follow them to the layer's residual stream [B, Q, D], and to what
attention reads if that is something else (see `DecoderLayer`)."""


@dataclass
class SlotState(DraftState):
    """What was read of each row.

    cache: keys and values of committed slots. newest [B, D]: what the layer made of the last one. root [B] long.
    """

    cache: RaggedCache
    newest: Tensor
    root: Tensor

    @classmethod
    def empty(cls, batch_size: int, like: Tensor) -> SlotState:
        """Return the state of rows without slots; like [..., D]: has the width, the type and the device."""
        newest = like.new_zeros(batch_size, like.shape[-1])
        root = torch.zeros(batch_size, dtype=torch.long, device=like.device)
        return cls(RaggedCache(batch_size, like.device), newest, root)


@torch.no_grad()
def read_slots(state: SlotState, observed: Observed, states: Tensor, layer: DecoderLayer, feed: Feed) -> None:
    """Run committed slots behind those before, with the target's true states [B, A, D], and keep them."""
    lengths, width = observed.lengths, observed.read_tokens.shape[1]
    inside = torch.arange(width, device=lengths.device)[None] < lengths[:, None]
    visible = masks.block_mask(state.cache.valid, masks.causal(inside))
    x, attended = feed(states, observed.next_tokens)
    out = layer(x, observed.positions, visible, state.cache.kv, attended)
    state.cache.commit_first(width, lengths)
    fresh = lengths > 0
    state.newest = torch.where(fresh[:, None], at_end(out, lengths), state.newest)
    state.root = torch.where(fresh, at_end(observed.next_tokens, lengths), state.root)


def slot_laws(
    state: SlotState, request: DraftRequest, layer: DecoderLayer, feed: Feed, scores: Callable[[Tensor], Tensor]
) -> Laws:
    """Return the laws for `grow`: nodes of a level run at once, each on what the layer made of its parent.

    scores: from the layer's output [B, P, D] to [B, P, Vd]. The root's own slot is committed, so its law costs the
    scores alone. The nodes stay behind the cache as a block: `drop_block` when the tree has grown.
    """
    rows = torch.arange(len(state.root), device=state.root.device)[:, None]
    outputs = [state.newest[:, None]]  # of the level before

    def laws(level: Level) -> Tensor:
        if level.depth:
            x, attended = feed(outputs[0][rows, level.parents], level.tokens)
            positions = (request.root_positions[:, None] + level.depth - 1).expand_as(level.tokens)
            visible = masks.block_mask(state.cache.valid, level.ancestors[:, :, 1:])  # the root's slot is in the cache
            outputs[0] = layer(x, positions, visible, state.cache.kv, attended)
        return scores(outputs[0])

    return laws


def unrolled(batch: DraftBatch, states: Tensor, layer: DecoderLayer, feed: Feed, steps: int) -> list[Tensor]:
    """Return what the layer makes of every slot at every step [B, T, D], as serving would on the true tokens.

    states [B, T, D]: the target's. Entry k at slot t, which has read tokens up to t + 1 + k, guesses token t + 2 + k;
    it is zero in entries after the first where no later guess of the slot is trained.
    """
    slots = batch.tokens.shape[1]
    if slots < BLOCKS:  # another process may have more, and all must make as many module calls
        more = (0, BLOCKS - slots)
        tokens, mask = F.pad(batch.tokens, more), F.pad(batch.token_mask, more)
        positions, segments = F.pad(batch.positions, more), F.pad(batch.segments, more)
        loss_mask = F.pad(batch.loss_mask, more)
        batch = replace(
            batch, tokens=tokens, token_mask=mask, loss_mask=loss_mask, positions=positions, segments=segments
        )
        states = F.pad(states, (0, 0, *more))
    going_on = guessing_slots(batch, steps) if steps > 1 else None
    run = AlignedSteps(layer, batch.positions, masks.causal(batch.token_mask, batch.segments), going_on)
    outputs = [run(*feed(states, following(batch.tokens, 1)))]
    if going_on is not None:
        places = going_on[..., None].expand(-1, -1, outputs[0].shape[2])
        states = outputs[0].gather(1, places)
        for step in range(1, steps):
            states = run(*feed(states, following(batch.tokens, 1 + step).gather(1, going_on)))
            outputs.append(states.new_zeros(outputs[0].shape).scatter(1, places, states))
    return [output[:, :slots] for output in outputs]


def guessing_slots(batch: DraftBatch, steps: int) -> Tensor:
    """Return the slots [B, Q] long, ascending, that guess a trained label at a step after the first; others fill up.

    Slot t at step i guesses the token at t + 2 + i. Prompts and padding are half of many rows, and need no later steps.
    """
    wanted = torch.stack([following(batch.loss_mask, 2 + step) for step in range(1, steps)]).any(0)
    count = min(max(rounded_up(int(wanted.sum(1).max())), BLOCKS), wanted.shape[1])
    first = (~wanted).to(torch.int8).argsort(dim=1, stable=True)[:, :count]  # the wanted ones, then others
    return first.sort(dim=1).values
