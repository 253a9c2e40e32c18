"""What joint training has made of the target: how far its law has moved, measured on held-out text.

Teacher-forced, in the type in which the target is served, over the trained positions of held-out rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from ..drafters.losses import chunk_size, depth_targets, filled_up, in_chunks
from .adapters import TrainedTarget
from .processes import sum_over_processes

REPORT = "target_change.json"


@dataclass(frozen=True, slots=True)
class TargetChange:
    """The target before and after, over `tokens` positions.

    kl: mean KL divergence of the law now from the original one, in nats. agreement: share of positions at which both
    have the same likeliest token. perplexity_before, perplexity_after: of the text.
    """

    tokens: int
    kl: float
    agreement: float
    perplexity_before: float
    perplexity_after: float

    def metrics(self) -> dict[str, float]:
        """Return what the log shows at every evaluation."""
        return {
            "target_kl": self.kl,
            "target_agreement": self.agreement,
            "target_perplexity": self.perplexity_after,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the figures for a file, rounded."""
        return {name: round(value, 5) for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return (
            f"the target has changed: on {self.tokens:,} held-out tokens its law is {self.kl:.4f} nats from the "
            f"original, the likeliest token is the same at {self.agreement:.1%} of the positions, and the perplexity "
            f"is {self.perplexity_after:.3f} (before: {self.perplexity_before:.3f})"
        )


@torch.no_grad()
def target_change(
    changes: TrainedTarget, batches: Iterable[tuple[dict[str, Tensor], bool]], args: TrainingArguments
) -> TargetChange:
    """Compare a target, in eval mode, with what it was; batches that do not count only keep the processes in step."""
    target, sums = changes.target, torch.zeros(5, dtype=torch.float64)
    for inputs, counts in batches:
        tokens, mask, segments = inputs["tokens"], inputs["token_mask"], inputs.get("segments")
        now = target.encode(tokens, mask, (), inputs["positions"], segments).final
        with changes.original(target.model):
            before = target.encode(tokens, mask, (), inputs["positions"], segments).final

        def chunk(
            rows: Tensor,
            labels_at: Tensor,
            anchors: Tensor,
            present: Tensor,
            tokens: Tensor = tokens,
            now: Tensor = now,
            before: Tensor = before,
        ) -> tuple[Tensor, ...]:
            said = target.logits(now[rows, anchors]).double().log_softmax(-1)
            with changes.original(changes.head()):
                law = target.logits(before[rows, anchors]).double().log_softmax(-1)
            label = tokens[rows, labels_at][:, None]
            kl = (law.exp() * (law - said)).sum(-1)
            same = law.argmax(-1) == said.argmax(-1)
            parts = (kl, same, -law.gather(1, label)[:, 0], -said.gather(1, label)[:, 0], torch.ones_like(kl))
            return tuple((part * present).sum() for part in parts)

        at = depth_targets(inputs["loss_mask"], torch.zeros_like(tokens) if segments is None else segments, 0)
        size = chunk_size(4 * target.vocab_size)
        found = torch.stack(in_chunks(chunk, size, *filled_up(at.rows, at.labels_at, at.anchors, at.present)))
        sums = sums + (found.cpu().double() if counts else 0.0)
    kl, same, lost_before, lost_now, count = sum_over_processes(sums.to(args.device), args).tolist()
    count = max(count, 1.0)
    return TargetChange(int(count), kl / count, same / count, math.exp(lost_before / count), math.exp(lost_now / count))


def write_change(change: TargetChange, changes: TrainedTarget, folder: Path) -> None:
    """Write the report beside the drafter."""
    report = {**(changes.identity() or {}), **change.to_dict()}
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
