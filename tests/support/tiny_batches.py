"""Training batches, processors and scrambled drafters for tests."""

from __future__ import annotations

from typing import TypeVar

import torch
from tiny_targets import VOCAB, WIDTH
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.drafters.base import DraftBatch, Drafter
from headstart.inference.target import Target


def processors(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> LogitsProcessorList:
    """Return transformers' processors in transformers' order; the defaults switch each off."""
    chosen = LogitsProcessorList()
    if temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen


AnyDrafter = TypeVar("AnyDrafter", bound=Drafter)


def scrambled(drafter: AnyDrafter) -> AnyDrafter:
    generator = torch.Generator().manual_seed(3)
    drafter.double().eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return drafter


def batch_of(target: Target, drafter: Drafter, rows: int = 4, length: int = 12) -> DraftBatch:
    """Return a training batch with prompts of different lengths and padding."""
    tokens = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(length, length - rows, -1)
    mask = torch.arange(length) < lengths[:, None]
    trained = mask & (torch.arange(length) >= torch.arange(2, 2 + rows)[:, None])
    positions = torch.arange(length).expand(rows, -1)
    with torch.no_grad():
        out = target.encode(tokens, mask, drafter.feature_layers)
    return DraftBatch(tokens, mask, trained, positions, torch.zeros_like(tokens), out.features, out.final)


def batch_of_followers(length: int = 7) -> DraftBatch:
    """Return rows in which every token follows from the one before it alone, and the states say nothing."""
    follower = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(4))
    rows = [torch.arange(VOCAB)]
    for _ in range(length - 1):
        rows.append(follower[rows[-1]])
    tokens = torch.stack(rows, dim=1)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    nothing = torch.zeros(*tokens.shape, WIDTH, dtype=torch.float64)
    positions = torch.arange(length).expand(VOCAB, -1)
    return DraftBatch(tokens, everything, everything, positions, torch.zeros_like(tokens), nothing[:, :, None], nothing)


def learnt_by_heart(drafter: Drafter, batch: DraftBatch, target: Target) -> tuple[list[int], list[int]]:
    """Train on one batch; return how often the drafter is right then, and how often it could be, by depth."""
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    for _ in range(100):
        drafter(batch, target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    out = drafter(batch, target)
    return out.hits.tolist(), out.counts.tolist()
