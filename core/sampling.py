"""How the target draws a token: transformers' own logits processors, keyed noise, argmax.

A draw is an exponential race (Gumbel-max): argmax of log p + g. The noise g depends only on (request, position, token
id), so the emitted text depends on the target and the seed alone: it is the same with and without a drafter, for any
tree, in any batch. The idea of sharing such noise between drafter and target: drafter-invariant speculative decoding by
Gumbel coupling (arXiv 2408.07978), exponential races (arXiv 2504.15475).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

POINTWISE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)
"""Processors that read the scores alone; every other one may read the prefix and gets each node's own."""

NUCLEUS_CANDIDATES = 1024
"""Tokens looked at first for a nucleus; the whole vocabulary is sorted only where these do not cover p."""

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def _splitmix(x: Tensor) -> Tensor:
    """Finalise int64 words as splitmix64 does; shifts are logical, so the sign bits they pull in are masked."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix(x: Tensor) -> Tensor:
    """Scramble int32 words (a bijection): xor-shift 16, multiply, xor-shift 15, multiply, xor-shift 16."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


class KeyedNoise:
    """Standard Gumbel noise as a pure function of (request key, position, token id).

    keys [B] long: one per row, see `request_keys`.
    """

    def __init__(self, keys: Tensor, vocab_size: int) -> None:
        self.keys = keys
        ids = torch.arange(vocab_size, dtype=torch.int32, device=keys.device)
        self._table = _mix(ids)

    def __call__(self, positions: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return the noise for the tokens at the given positions.

        positions [B] or [B, K] long: position, in its row, of the token to be drawn.
        token_ids [M] long: the ids to make noise for; None means the whole vocabulary.

        Returns [B, M] or [B, K, M] fp32.
        """
        table = self._table if token_ids is None else self._table[token_ids]
        keys = self.keys.view(-1, *[1] * (positions.dim() - 1))
        words = _splitmix(keys + positions * GOLDEN)[..., None]
        high, low = (words >> 32).to(torch.int32), words.to(torch.int32)
        hashed = _mix(_mix(table ^ high) ^ low) & 0x7FFFFFFF
        # the last factor keeps the uniform below 1, whose -inf would beat a lone allowed token
        uniform = (hashed.to(torch.float32) + 0.5).mul_(2.0**-31 * (1 - 2.0**-24))
        return uniform.neg_().log1p_().neg_().log_().neg_()

    def take_rows(self, rows: Tensor) -> KeyedNoise:
        """Return the noise of the given rows [R] long, in that order."""
        taken = object.__new__(KeyedNoise)
        taken.keys, taken._table = self.keys[rows], self._table
        return taken


def request_keys(seed: int | Sequence[int] | None, batch_size: int, device: torch.device) -> Tensor:
    """Make one noise key a row.

    seed: an int gives row i the request key (seed, i); a sequence gives each row its own, as if it were row 0 of a
    call with that int; None draws an int from torch's global generator.

    Returns [B] long. Raises ValueError when a sequence of seeds does not have one entry a row.
    """
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, int):
        seeds, requests = [seed] * batch_size, list(range(batch_size))
    else:
        seeds, requests = [int(s) for s in seed], [0] * batch_size
        if len(seeds) != batch_size:
            raise ValueError(f"seed must be an int or one int a row: found {len(seeds)} seeds for {batch_size} rows")
    wrapped = [(s + (1 << 63)) % (1 << 64) - (1 << 63) for s in seeds]
    first = _splitmix(torch.tensor(wrapped, dtype=torch.long) * GOLDEN + 1)
    return _splitmix(first + torch.tensor(requests, dtype=torch.long) * GOLDEN).to(device)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How rows draw: greedily, or from their processed law with keyed noise.

    processors: transformers' processors in transformers' order (temperature, top-k, top-p, min-p, penalties, ...).
    noise: None for greedy decoding.
    """

    processors: LogitsProcessorList
    noise: KeyedNoise | None

    @property
    def temperature(self) -> float:
        """Temperature of the target's law; 1.0 where none is set."""
        return next((p.temperature for p in self.processors if isinstance(p, TemperatureLogitsWarper)), 1.0)

    @property
    def reads_prefix(self) -> bool:
        """Whether a processor may look at the tokens before the node."""
        return any(not isinstance(p, POINTWISE) for p in self.processors)

    def pick(self, logits: Tensor, positions: Tensor, prefix: Callable[[int], Tensor]) -> Tensor:
        """Draw the target's token at one node of every row.

        logits [B, V]: raw logits at the node. positions [B] long: position of the token to be drawn.
        prefix: gives row b's true tokens up to and including the node, [1, P] long; called only if it is read.

        Returns [B] long; ties go to the lowest id.
        """
        scores = self.process(logits, prefix)
        if self.noise is not None:
            scores = scores + self.noise(positions)
        return scores.argmax(-1)

    def process(self, logits: Tensor, prefix: Callable[[int], Tensor]) -> Tensor:
        """Return the processed scores [B, V] fp32, as transformers computes them before softmax."""
        scores = logits.to(torch.float32)
        if not self.processors:
            return scores
        if self.reads_prefix:
            rows = [self.processors(prefix(b), row[None].clone()) for b, row in enumerate(scores)]  # type: ignore[arg-type]
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

    def take_rows(self, rows: Tensor) -> Sampling:
        """Return the sampling of the given rows [R] long, in that order."""
        return Sampling(self.processors, None if self.noise is None else self.noise.take_rows(rows))


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
