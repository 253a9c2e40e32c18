"""What a drafter is worth on held-out rows: loss and accuracy by depth, the best tree, and true tokens per step.

Teacher-forced accuracy is cheap and says where training stands; tokens per step from generation is what a user gets.
All processes take part in lockstep, and sums are divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from ..distill.dataset import TokenRow
from ..drafters.base import DraftBatch, Drafter
from ..drafters.losses import depth_targets
from ..inference.engine import SpeculativeEngine
from ..inference.state import DecodingRules
from ..inference.stats import GenerationStats
from ..inference.target import Target
from ..inference.tree_search import count_ranks, rank_table
from .processes import cuts_up_weights, sum_over_processes


@dataclass(slots=True)
class HeldOutFigures:
    """Teacher-forced figures of held-out rows.

    loss: as in training. accuracy, labels: by depth. table [K, R]: see `rank_table`; None for drafters without ranks.
    """

    loss: float
    tokens: int
    accuracy: list[float]
    labels: list[int]
    table: Tensor | None = None


@dataclass(slots=True)
class _Sums:
    parts: list[Tensor] = field(default_factory=list)

    def add(self, values: Sequence[Tensor]) -> None:
        values = [value.detach().double() for value in values]
        self.parts = [a + b for a, b in zip(self.parts, values, strict=True)] if self.parts else values


@torch.no_grad()
def teacher_forced(
    drafter: Callable[..., Any], target: Target, batches: Iterable[tuple[DraftBatch, bool]], args: TrainingArguments
) -> HeldOutFigures:
    """Measure a drafter (in eval mode) on batches; those that do not count only keep the processes in step."""
    sums = _Sums()
    for batch, counts in batches:
        out = drafter(batch, target, torch.ones((), device=batch.tokens.device))
        assert out.loss is not None and out.hits is not None and out.counts is not None
        values = [out.loss, batch.loss_mask.sum(), out.hits, out.counts]
        if out.ranks is not None:
            values += count_ranks(out.ranks.flatten(0, 1), labelled(batch, out.ranks.shape[-1]).flatten(0, 1))
        sums.add([value if counts else torch.zeros_like(value) for value in values])
    loss, tokens, hits, counts, *rank_sums = (sum_over_processes(part, args) for part in sums.parts)
    return HeldOutFigures(
        loss=float(loss / tokens.clamp(min=1)),
        tokens=int(tokens),
        accuracy=(hits / counts.clamp(min=1)).tolist(),
        labels=[int(count) for count in counts.tolist()],
        table=rank_table(*rank_sums).cpu() if rank_sums else None,
    )


def labelled(batch: DraftBatch, depths: int) -> Tensor:
    """Say where a drafter has a trained label [B, T, K] bool: entry [b, t, k] is that of depth k + 1 at anchor t."""
    marks = torch.zeros(*batch.tokens.shape, depths, dtype=torch.bool, device=batch.tokens.device)
    for k in range(depths):
        at = depth_targets(batch.loss_mask, batch.segments, k + 1)
        marks[at.rows[at.present], at.anchors[at.present], k] = True
    return marks


def generated(
    drafter: Drafter,
    target: Target,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    eos_token_ids: Sequence[int],
    batch_size: int,
    args: TrainingArguments,
) -> GenerationStats:
    """Generate greedily from prompts, dealt out to the processes; return the statistics of all of them.

    Where the target is cut up, each process generates from all prompts, in step with the others.
    """
    stats = GenerationStats()
    engine = SpeculativeEngine(target, drafter)
    rules = DecodingRules(new_tokens, eos_token_ids)
    together = cuts_up_weights(args)
    ordered = sorted(prompts, key=len)
    mine = ordered if together else ordered[args.process_index :: args.world_size]
    with as_served(drafter, target.dtype):
        for begin in range(0, len(mine), batch_size):
            stats.merge(engine.generate(mine[begin : begin + batch_size], rules).stats)
    return stats if together else _over_processes(stats, args)


@contextmanager
def as_served(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a drafter, or what is trained of its target, the type in which it is served; then its own tensors back.

    The very tensors come back, not copies: optimizers and DeepSpeed hold on to them.
    """
    tensors = [t for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()]
    own = [t.data for t in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to(dtype)
    try:
        yield
    finally:
        for tensor, data in zip(tensors, own, strict=True):
            tensor.data = data


def evaluation_prompts(rows: Sequence[TokenRow], count: int, longest: int) -> list[list[int]]:
    """Return up to `count` prompts, spread evenly over the rows that have one of at most `longest` tokens."""
    fitting = [i for i, row in enumerate(rows) if 0 < row.prompt_length <= longest]
    step = max(1.0, len(fitting) / max(1, count))
    chosen = [rows[fitting[int(i * step)]] for i in range(min(count, len(fitting)))]
    return [row.input_ids[: row.prompt_length].tolist() for row in chosen]


def _over_processes(stats: GenerationStats, args: TrainingArguments) -> GenerationStats:
    if args.world_size == 1:
        return stats
    depth = torch.tensor(len(stats.reached), device=args.device)
    torch.distributed.all_reduce(depth, op=torch.distributed.ReduceOp.MAX)
    padding = [0] * (int(depth) - len(stats.reached))
    counts = [stats.tokens, stats.row_steps, *stats.reached, *padding, *stats.accepted, *padding]
    tokens, steps, *by_depth = sum_over_processes(torch.tensor(counts, device=args.device), args).tolist()
    half = len(by_depth) // 2
    return GenerationStats(tokens=tokens, row_steps=steps, reached=by_depth[:half], accepted=by_depth[half:])
