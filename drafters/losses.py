"""The loss of all depths over the trained labels, chunked over positions; and the one place with the shift.

Chunks bound memory: logits of a whole batch over a large vocabulary would take gigabytes. Each chunk is recomputed in
the backward pass, so only its inputs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.shapes import rounded_up
from .base import DraftBatch, LossOutput, TargetView
from .divergences import LAW_LOSSES, hard_cross_entropy, lk_blend
from .modules import DraftVocabulary

CHUNK_BYTES = 128 * 2**20
"""Size of the fp32 logits of all depths that a chunk may take; its backward pass holds a few times as much."""


@dataclass(frozen=True, slots=True)
class DepthTargets:
    """Which position a drafter guesses from, for every trained label of a batch, at one depth.

    rows, labels_at, anchors [M] long: label `tokens[row, label_at]` is guessed from `features[row, anchor]`; the
    target's own law of it is `final[row, label_at - 1]`. present [M] bool: False where there is no such anchor (before
    the start of the row or in another document); such entries point at position 0 and weigh nothing.
    """

    rows: Tensor
    labels_at: Tensor
    anchors: Tensor
    present: Tensor


def depth_targets(loss_mask: Tensor, segments: Tensor, depth: int) -> DepthTargets:
    """Pair every trained label with the position it is guessed from at this depth.

    loss_mask [B, T] bool: `loss_mask[t]` says to learn to predict `tokens[t]`. segments [B, T] long.
    depth: k. A drafter that has read position t and is told the next token guesses `tokens[t + 1 + k]`; depth 0 is for
        drafters that read the root themselves, whose first guess is `tokens[t + 1]`.

    Example, depth 1, trained labels at 3 and 4 of a row: anchors 1 and 2. Head 1 of Medusa at position 1 guesses
    tokens[3], since the language-model head owns tokens[2].
    """
    rows, labels_at = loss_mask.nonzero(as_tuple=True)
    anchors = labels_at - 1 - depth
    present = (anchors >= 0) & (segments[rows, anchors.clamp(min=0)] == segments[rows, labels_at])
    return DepthTargets(rows, labels_at, anchors.clamp(min=0), present)


def in_chunks(function: Callable[..., tuple[Tensor, ...]], size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply a function to slices of at most `size` leading entries and add up what it returns.

    With gradients on and more than one chunk, each chunk is checkpointed: its insides are recomputed in the backward
    pass. An empty input still makes one call, so that every rank makes the same module calls.
    """
    total: tuple[Tensor, ...] | None = None
    count = tensors[0].shape[0]
    for begin in range(0, max(count, 1), size):
        parts = [t[begin : begin + size] for t in tensors]
        if torch.is_grad_enabled() and count > size:
            result = checkpoint(function, *parts, use_reentrant=False)
        else:
            result = function(*parts)
        total = result if total is None else tuple(a + b for a, b in zip(total, result, strict=True))
    assert total is not None
    return total


def filled_up(*tensors: Tensor) -> list[Tensor]:
    """Fill tensors [M, ...] up with zeros to a size that comes again, and to the largest M of all processes.

    A collective call where there are several: every process then cuts its labels into as many chunks. Under ZeRO-3,
    which gathers weights in module calls, one that made fewer would leave the others waiting for good. Entries that are
    not `present` weigh nothing.
    """
    count = tensors[0].shape[0]
    most = rounded_up(count)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        largest = torch.tensor(most, device=tensors[0].device)
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
        most = int(largest)
    missing = most - count
    return [torch.cat([t, t.new_zeros(missing, *t.shape[1:])]) for t in tensors]


Guess = Callable[[int, Tensor, Tensor], Tensor]
"""What a drafter guesses k + 1 tokens ahead of positions (rows [M], anchors [M]): scores [M, Vd]."""


@dataclass(frozen=True, slots=True)
class Guessed:
    """A chunk of guesses at one depth, for losses that are a method's own.

    depth: k, from 0. rows, labels_at, anchors [M] long: as in `DepthTargets`; the drafter's own state belongs to the
    anchor, the target's to compare it with is `final[row, label_at - 1]`. scores [M, Vd] of the drafter; law [M, Vd]
    fp32 of the target. labels [M] long: indices into Vd, -1 outside.
    """

    depth: int
    rows: Tensor
    labels_at: Tensor
    anchors: Tensor
    scores: Tensor
    law: Tensor
    labels: Tensor


LabelLoss = Callable[[Guessed], Tensor]
"""A loss [M] for each label of a chunk."""


def depth_losses(
    batch: DraftBatch,
    target: TargetView,
    vocabulary: DraftVocabulary,
    depths: int,
    guess: Guess,
    loss: str | LabelLoss = "kl",
    depth_weight: float | Sequence[float] = 1.0,
    num_items: Tensor | None = None,
    ranked: bool = False,
) -> LossOutput:
    """Compute the loss of all depths over the trained labels, a chunk of positions at a time.

    depths: K. guess: called as `guess(k, rows, anchors)` for k = 0 .. K - 1, inside a chunk that is recomputed in the
    backward pass. loss: one of `LOSSES`, against the target's law over the draft vocabulary (renormalised) or, "ce",
    the data's token; or a method's own. depth_weight: depth k (from 1) weighs depth_weight^k; or one weight for each
    depth. num_items: see `Drafter.forward`. ranked: also say where the labels stand among the candidates.
    """
    shape = (*batch.tokens.shape, depths)
    ranks = torch.full(shape, -1, dtype=torch.long, device=batch.tokens.device) if ranked else None
    per_depth = [depth_targets(batch.loss_mask, batch.segments, k + 1) for k in range(depths)]
    rows, labels_at = per_depth[0].rows, per_depth[0].labels_at
    anchors = torch.stack([t.anchors for t in per_depth], dim=1)
    present = torch.stack([t.present for t in per_depth], dim=1)

    rows, labels_at, anchors, present = filled_up(rows, labels_at, anchors, present)

    def chunk(rows: Tensor, labels_at: Tensor, anchors: Tensor, present: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        labels = vocabulary.from_target(batch.tokens[rows, labels_at])
        law = target_law(batch.final[rows, (labels_at - 1).clamp(min=0)], target, vocabulary) if loss != "ce" else None
        sums, hits = [], []
        for k in range(depths):
            logits = guess(k, rows, anchors[:, k])
            if law is None:
                lost = hard_cross_entropy(logits, labels)
            elif isinstance(loss, str):
                lost = LAW_LOSSES[loss](logits, law)
            else:
                lost = loss(Guessed(k, rows, labels_at, anchors[:, k], logits, law, labels))
            sums.append((lost * present[:, k]).sum(-1))
            with torch.no_grad():
                hits.append((is_best(logits, labels) & present[:, k]).sum())
                if ranks is not None:
                    here = present[:, k]
                    ranks[rows[here], anchors[here, k], k] = ranks_of(logits, labels)[here]
        return torch.stack(sums), torch.stack(hits), present.sum(0)

    sums, hits, counts = in_chunks(chunk, chunk_size(vocabulary.size * depths), rows, labels_at, anchors, present)
    if loss == "lk":
        sums = lk_blend(sums, counts)
    if not isinstance(depth_weight, Sequence):
        depth_weight = [depth_weight**k for k in range(1, depths + 1)]
    weights = sums.new_tensor(depth_weight)
    items = batch.loss_mask.sum().clamp(min=1) if num_items is None else num_items
    total = (weights * sums).sum() / items
    return LossOutput(loss=total, sums=sums.detach(), counts=counts.float(), hits=hits.float(), ranks=ranks)


@torch.no_grad()
def target_law(final: Tensor, target: TargetView, vocabulary: DraftVocabulary) -> Tensor:
    """Return the target's law over the draft vocabulary [M, Vd] fp32 at final states [M, D], a few rows at a time."""
    parts = final.split(chunk_size(target.vocab_size))
    return torch.cat([target.logits(part, vocabulary.chosen).float().softmax(-1) for part in parts])


def chunk_size(scores: int) -> int:
    """Return how many positions fit into `CHUNK_BYTES`. scores: fp32 numbers at each, over all depths."""
    return max(1, CHUNK_BYTES // (4 * scores))


def is_best(logits: Tensor, labels: Tensor) -> Tensor:
    """Say whether no candidate stands above the label [M] bool; False for labels outside the vocabulary.

    logits [M, Vd]; labels [M] long. The same as rank 0. (argmax over bfloat16 takes a CPU ten times as long.)
    """
    own = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return (labels >= 0) & (own >= logits.amax(-1))


def ranks_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return how many candidates the drafter ranks above the label [M] long; -1 for labels outside the vocabulary.

    logits [M, Vd]; labels [M] long: indices into Vd, negative where outside.
    """
    own = logits.gather(1, labels.clamp(min=0)[:, None])
    return torch.where(labels < 0, -1, (logits > own).sum(-1))
