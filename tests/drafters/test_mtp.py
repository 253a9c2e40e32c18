"""What is the multi-token prediction block's own: its equation, and the weights of its depths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import batch_of, scrambled
from tiny_targets import WIDTH
from torch import Tensor

from headstart.core import masks
from headstart.drafters.base import LossOutput
from headstart.drafters.mtp import MtpConfig, MtpDrafter
from headstart.drafters.registry import new_drafter
from headstart.drafters.slots import unrolled
from headstart.inference.target import Target


def mtp(target: Target, **settings: Any) -> MtpDrafter:
    drafter = new_drafter("mtp", target, **settings)
    assert isinstance(drafter, MtpDrafter)
    return drafter.double().eval()


@torch.no_grad()
def test_the_first_depth_is_the_papers_module(target: Target) -> None:
    """h' = M [norm(e(x_(t+1))); norm(h_t)], then a block; the head reads the norm of what comes out (section 2.2)."""
    drafter = scrambled(mtp(target))
    batch = batch_of(target, drafter)
    (found,) = unrolled(batch, batch.features[:, :, 0], drafter.layer, drafter._feed(target), 1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), weight, drafter.norm.variance_epsilon)

    token = norm(target.embed(batch.tokens[:, 1:]), drafter.token_norm.weight)
    state = norm(batch.features[:, :-1, 0], drafter.state_norm.weight)
    into = drafter.input_projection.weight
    x = token @ into[:, :WIDTH].T + state @ into[:, WIDTH:].T
    out = drafter.layer(x, batch.positions[:, :-1], masks.causal(batch.token_mask[:, :-1]))
    torch.testing.assert_close(found[:, :-1], out, rtol=1e-5, atol=1e-5)  # norms are fp32 inside


@torch.no_grad()
def test_fresh_block_reads_the_state_and_not_yet_the_token(target: Target) -> None:
    drafter = mtp(target)
    into = drafter.input_projection.weight
    assert torch.equal(into[:, WIDTH:], torch.eye(WIDTH, dtype=into.dtype))
    assert float(into[:, :WIDTH].abs().max()) < 0.2


def test_weights_of_the_depths_fall_and_add_up_to_one(target: Target) -> None:
    drafter = mtp(target, depth=3)
    out = drafter(batch := batch_of(target, drafter), target)
    assert isinstance(out, LossOutput) and out.loss is not None and out.sums is not None
    weights = torch.tensor([1.0, 0.6, 0.36], dtype=out.sums.dtype) / 1.96
    torch.testing.assert_close(out.loss, (weights * out.sums).sum() / batch.loss_mask.sum())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"depth": 0}, "depth must be from 1 to 16"),
        ({"depth_weight": 0.0}, "depth_weight must be above 0"),
        ({"projection": "none"}, "projection must be"),
        ({"loss": "mse"}, "loss must be"),
    ],
)
def test_settings_that_make_no_drafter_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MtpConfig(**settings)
