"""Blocks that methods share: steps of a layer over its own outputs, aligned with what serving does."""

from __future__ import annotations

import pytest
import torch
from tiny_targets import WIDTH, tiny_target

from headstart.core import masks
from headstart.core.decoder_layer import DecoderLayer, layer_settings
from headstart.core.kv_cache import RaggedCache
from headstart.drafters.modules import AlignedSteps, LogitScale, aligned_mask, following

LENGTH, STEPS = 6, 4


@pytest.fixture
def layer() -> DecoderLayer:
    torch.manual_seed(0)
    return DecoderLayer(WIDTH, layer_settings(tiny_target("llama").config), input_norm=False).double()


def random_states(rows: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)).double()


def everything(rows: int = 1) -> torch.Tensor:
    return torch.ones(rows, LENGTH, dtype=torch.bool)


def test_following_entries_move_to_the_front_and_zeros_come_after_them() -> None:
    assert following(torch.tensor([[1, 2, 3]]), 0).tolist() == [[1, 2, 3]]
    assert following(torch.tensor([[1, 2, 3]]), 2).tolist() == [[3, 0, 0]]
    assert following(torch.tensor([[1, 2, 3]]), 5).tolist() == [[0, 0, 0]]


def test_slot_sees_true_features_up_to_itself_and_its_own_later_steps() -> None:
    visible = masks.causal(torch.ones(1, 3, dtype=torch.bool))
    assert aligned_mask(visible, 0)[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert aligned_mask(visible, 2)[0].int().tolist() == [
        [1, 0, 0, 1, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 1, 0, 0, 1],
    ]


@torch.no_grad()
def test_every_slot_and_step_is_what_one_drafter_computes_with_a_cache_of_its_own(layer: DecoderLayer) -> None:
    positions = torch.arange(LENGTH)[None]
    x = first = random_states()
    run, steps = AlignedSteps(layer, positions, masks.causal(everything())), []
    for _ in range(STEPS):
        x = run(x)
        steps.append(x)
    for slot in range(LENGTH):
        cache = RaggedCache(1, x.device)
        seen = masks.causal(torch.ones(1, slot + 1, dtype=torch.bool))
        state = layer(first[:, : slot + 1], positions[:, : slot + 1], seen, cache.kv)[:, -1:]
        for step in range(STEPS):
            torch.testing.assert_close(state[:, 0], steps[step][:, slot])
            seen = torch.ones(1, 1, slot + step + 2, dtype=torch.bool)
            state = layer(state, positions[:, slot : slot + 1] + step + 1, seen, cache.kv)


@torch.no_grad()
def test_packed_documents_stay_apart_at_every_step(layer: DecoderLayer) -> None:
    positions, segments = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.tensor([[0, 0, 0, 1, 1, 1]])
    packed = AlignedSteps(layer, positions, masks.causal(everything(), segments))
    alone = AlignedSteps(layer, positions[:, 3:], masks.causal(everything()[:, 3:]))
    x, y = random_states(), random_states()[:, 3:]
    for _ in range(STEPS):
        x, y = packed(x), alone(y)
        torch.testing.assert_close(x[:, 3:], y)


def test_gradients_of_a_late_step_reach_the_first(layer: DecoderLayer) -> None:
    first = random_states().requires_grad_()
    run = AlignedSteps(layer, torch.arange(LENGTH)[None], masks.causal(everything()))
    x = first
    for _ in range(3):
        x = run(x)
    x[0, 3].sum().backward()
    assert first.grad is not None
    assert first.grad[0, :4].abs().sum(1).min() > 0, "the slots that slot 3 has read"
    assert not first.grad[0, 4:].any(), "those it has not"


def test_logit_scale_starts_where_told_and_stays_above_zero() -> None:
    scale = LogitScale(2)
    assert scale().tolist() == [1.0, 1.0]
    scale.start_at(0.25)
    torch.testing.assert_close(scale(), torch.full((2,), 0.25))
    optimizer = torch.optim.SGD(scale.parameters(), lr=10.0)
    scale().sum().backward()
    optimizer.step()
    assert bool((scale() > 0).all()) and bool((scale() < 0.25).all())
