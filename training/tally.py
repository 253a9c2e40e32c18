"""Sums of training batches between two lines of the log."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from transformers import TrainingArguments

from ..drafters.base import LossOutput
from .joint import JointOutput
from .processes import sum_over_processes


class Tally:
    """Sums of training batches since the last log line: hits by depth, trained tokens, the target's own loss.

    labels [K]: those of this process in the step in progress, by depth.
    """

    def __init__(self) -> None:
        self.hits: Tensor | None = None
        self.counts: Tensor | None = None
        self.target: Tensor | None = None
        self.tokens: list[Tensor] = []
        self.labels: Tensor | None = None
        self.since: float | None = None

    def begin_step(self, tokens: Tensor) -> None:
        """Count a step's trained tokens over all processes; the clock starts with the first step."""
        self.since = time.perf_counter() if self.since is None else self.since
        self.tokens.append(tokens)
        self.labels = None

    def pause(self, seconds: float) -> None:
        """Leave out time that went into something else."""
        self.since = None if self.since is None else self.since + seconds

    def add(self, output: LossOutput) -> None:
        """Count one batch of this process."""
        assert output.hits is not None and output.counts is not None
        hits, counts = output.hits.detach(), output.counts.detach()
        self.hits = hits if self.hits is None else self.hits + hits
        self.counts = counts if self.counts is None else self.counts + counts
        self.labels = counts if self.labels is None else self.labels + counts
        if isinstance(output, JointOutput) and output.target_sum is not None:
            assert output.target_tokens is not None
            # With the tokens that it belongs to: the target may have joined since the last line.
            sums = torch.stack([output.target_sum, output.target_tokens.to(output.target_sum)])
            self.target = sums if self.target is None else self.target + sums

    def take(self, args: TrainingArguments) -> dict[str, float]:
        """Return the figures over all processes and start again."""
        figures: dict[str, float] = {}
        if self.hits is not None and self.counts is not None:
            hits, counts = sum_over_processes(torch.stack([self.hits, self.counts]), args).tolist()
            shares = [hit / max(count, 1) for hit, count in zip(hits, counts, strict=True)]
            figures = {f"accuracy_depth_{k + 1}": round(share, 4) for k, share in enumerate(shares)}
        if self.target is not None:
            lost, labels = sum_over_processes(self.target, args).tolist()
            figures["target_loss"] = round(lost / max(labels, 1), 5)
        now = time.perf_counter()
        if self.tokens and self.since is not None:
            tokens = float(torch.stack(self.tokens).sum())
            figures["trained_tokens_per_step"] = round(tokens / len(self.tokens), 1)
            figures["trained_tokens_per_second"] = round(tokens / max(now - self.since, 1e-9), 1)
        self.hits, self.counts, self.target, self.tokens, self.since = None, None, None, [], now
        return figures
