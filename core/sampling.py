"""How the target draws a token: transformers' own logits processors, keyed noise, argmax.

A draw is an exponential race (Gumbel-max): argmax of log p + g. The noise g depends only on (request, position, token
id), so the emitted text depends on the target and the seed alone: it is the same with and without a drafter, for any
tree, in any batch. The idea of sharing such noise between drafter and target: drafter-invariant speculative decoding by
Gumbel coupling (arXiv 2408.07978), exponential races (arXiv 2504.15475).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .noise import KeyedNoise

POINTWISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that read the scores alone; every other one may read the prefix and gets each node's own."""

NUCLEUS_CANDIDATES = 1024
"""Tokens looked at first for a nucleus; the whole vocabulary is sorted only where these do not cover p."""

Prefix = Callable[[int], Tensor]
"""Gives the true tokens [1, P] long up to and including the node in question, by its place among the scores."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rows draw: greedily, or from their processed law with keyed noise.

    processors: transformers' processors in transformers' order (temperature, top-k, top-p, min-p, penalties, ...).
    noise: None for greedy decoding.
    by_row: one list of processors a row in place of `processors`, where a setting differs between rows (a length that
        counts from the end of a row's own prompt); same kinds in the same order.
    """

    processors: LogitsProcessorList
    noise: KeyedNoise | None
    by_row: tuple[LogitsProcessorList, ...] | None = None

    @property
    def temperature(self) -> float:
        """Temperature of the target's law; 1.0 where none is set."""
        return next((p.temperature for p in self.processors if isinstance(p, TemperatureLogitsWarper)), 1.0)

    @property
    def reads_prefix(self) -> bool:
        """Whether a processor may look at the tokens before the node."""
        return any(not isinstance(p, POINTWISE) for p in self.processors)

    def pick(self, logits: Tensor, positions: Tensor, prefix: Prefix) -> Tensor:
        """Draw the target's token at one node of every row.

        logits [B, V]: raw logits at the node. positions [B] long: position of the token to be drawn.
        prefix: gives row b's true tokens up to and including the node; called only if it is read.

        Returns [B] long; ties go to the lowest id.
        """
        scores = self.process(logits, prefix)
        if self.noise is not None:
            scores = scores + self.noise(positions)
        return scores.argmax(-1)

    def process(self, logits: Tensor, prefix: Prefix) -> Tensor:
        """Return the processed scores [M, V] fp32 of logits [M, V], as transformers computes them before softmax.

        M is B, or a multiple of it: the nodes of row 0, then those of row 1, ...
        """
        scores = logits.to(torch.float32)
        if not self.processors:
            return scores
        if self.reads_prefix:
            lists = self.by_row or (self.processors,)
            a_row = len(scores) // len(lists)
            rows = [lists[m // a_row](prefix(m), row[None].clone()) for m, row in enumerate(scores)]  # type: ignore[arg-type]
            return torch.cat(rows)
        for processor in self.processors:
            if isinstance(processor, TopPLogitsWarper):
                scores = nucleus(scores, float(processor.top_p), processor.min_tokens_to_keep, processor.filter_value)
            else:
                scores = processor(None, scores)  # type: ignore[arg-type]
        return scores

    def narrow(self, scores: Tensor) -> Tensor:
        """Apply temperature, top-k, top-p and min-p to a drafter's scores [..., M], as the target's are going to be.

        A guess that the target's own filters would remove is no guess worth making.
        """
        flat = scores.flatten(0, -2)
        only = LogitsProcessorList(p for p in self.processors if isinstance(p, POINTWISE))
        return Sampling(only, None).process(flat, _no_prefix).view_as(scores)

    def take_rows(self, rows: list[int]) -> Sampling:
        """Return the sampling of the given rows, in that order."""
        noise = None if self.noise is None else self.noise.take_rows(torch.tensor(rows, device=self.noise.keys.device))
        by_row = None if self.by_row is None else tuple(self.by_row[row] for row in rows)
        return replace(self, noise=noise, by_row=by_row)

    def replace_rows(self, rows: list[int], other: Sampling) -> Sampling:
        """Return the sampling with `rows` taken over by the other's rows, which draws by the same rules."""
        noise, by_row = self.noise, self.by_row
        if noise is not None and other.noise is not None:
            noise = noise.replace_rows(torch.tensor(rows, device=noise.keys.device), other.noise)
        if by_row is not None and other.by_row is not None:
            new = dict(zip(rows, other.by_row, strict=True))
            by_row = tuple(new.get(row, old) for row, old in enumerate(by_row))
        return replace(self, noise=noise, by_row=by_row)


def _no_prefix(row: int) -> Tensor:
    raise AssertionError("pointwise processors read no prefix")


def nucleus(scores: Tensor, top_p: float, min_keep: int, filter_value: float = -math.inf) -> Tensor:
    """Keep the smallest set of most likely tokens whose mass reaches top_p, at least min_keep of them.

    scores [B, V] fp32. The same sets as transformers' TopPLogitsWarper, which sorts the whole vocabulary; here only the
    best candidates are sorted, unless they do not cover top_p. Of equal scores at the edge the lowest ids stay, in any
    batch (there transformers leaves the choice to an unstable sort).
    """
    if top_p >= 1.0:
        return scores
    size, on_cpu = scores.shape[-1], scores.device.type == "cpu"
    # on the CPU looking costs nothing; elsewhere it would be a sync, so everything is sorted
    count = min(max(NUCLEUS_CANDIDATES, min_keep), size) if on_cpu else size
    top = scores.amax(-1, keepdim=True)
    total = (scores - top).exp().sum(-1, keepdim=True).double()
    best = scores.topk(count, dim=-1).values
    mass = (best - top).double().exp().cumsum(-1) / total
    if count < size and bool((mass[:, -1] < top_p).any()):
        best = scores.sort(dim=-1, descending=True).values
        mass = (best - top).double().exp().cumsum(-1) / total
    wanted = 1 + (mass[:, :-1] < top_p).sum(-1, keepdim=True).clamp(min=min(min_keep, size) - 1)
    edge = best.gather(-1, wanted - 1)
    above, at_edge = scores > edge, scores == edge
    room = wanted - above.sum(-1, keepdim=True)
    if not on_cpu or bool((at_edge.sum(-1, keepdim=True) > room).any()):
        at_edge &= at_edge.cumsum(-1) <= room
    return scores.masked_fill(~(above | at_edge), filter_value)
