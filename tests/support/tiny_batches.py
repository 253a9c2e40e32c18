"""Training batches, processors and scrambled drafters for tests."""

from __future__ import annotations

from typing import TypeVar

import torch
from tiny_targets import VOCAB
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
