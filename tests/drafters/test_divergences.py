"""The divergences against their plain formulas, and where laws are so sure that numbers run out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.drafters.divergences import LAW_LOSSES, hard_cross_entropy, lk_blend, soft_cross_entropy

EXACT = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-11)}
"""Relative and absolute tolerance."""


def cross_entropy(scores: Tensor, law: Tensor) -> Tensor:
    return -(law * scores.log_softmax(-1)).sum(-1)


def reverse(scores: Tensor, law: Tensor) -> Tensor:
    return (scores.softmax(-1) * (scores.log_softmax(-1) - law.log())).sum(-1)


def shannon(scores: Tensor, law: Tensor) -> Tensor:
    q = scores.softmax(-1)
    log_mixture = ((q + law) / 2).log()
    parts = q * (scores.log_softmax(-1) - log_mixture) + law * (law.log() - log_mixture)
    return parts.sum(-1) / 2


def variation(scores: Tensor, law: Tensor) -> Tensor:
    return 1 - torch.minimum(scores.softmax(-1), law).sum(-1)


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": cross_entropy,
    "reverse_kl": reverse,
    "jsd": shannon,
    "tv": variation,
    "lk": lambda scores, law: torch.stack([cross_entropy(scores, law), variation(scores, law)]),
}


def assert_same(found: Tensor, expected: Tensor) -> None:
    rtol, atol = EXACT[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def drawn(rows: int, size: int, spread: float, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores, others = (spread * torch.randn(rows, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return scores.to(dtype).requires_grad_(), others.softmax(-1).to(dtype)


def test_every_loss_has_a_plain_formula() -> None:
    assert PLAIN.keys() == LAW_LOSSES.keys()


@pytest.mark.parametrize("name", LAW_LOSSES)
@pytest.mark.parametrize("dtype", EXACT)
@given(rows=st.integers(1, 5), size=st.integers(1, 40), spread=st.floats(0.1, 6), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_value_and_gradient_are_those_of_the_plain_formula(
    name: str, dtype: torch.dtype, rows: int, size: int, spread: float, seed: int
) -> None:
    scores, law = drawn(rows, size, spread, seed, dtype)
    expected, found = PLAIN[name](scores, law), LAW_LOSSES[name](scores, law)
    assert_same(found, expected)
    weights = torch.linspace(-1, 2, expected.numel(), dtype=dtype).view_as(expected)
    gradients = [torch.autograd.grad((loss * weights).sum(), scores)[0] for loss in (found, expected)]
    assert_same(*gradients)


@pytest.mark.parametrize("name", LAW_LOSSES)
def test_gradient_is_the_slope_of_the_value(name: str) -> None:
    scores, law = drawn(4, 9, 2.0, 3, torch.float64)
    assert torch.autograd.gradcheck(lambda scores: LAW_LOSSES[name](scores, law), scores)


@pytest.mark.parametrize("name", LAW_LOSSES)
def test_half_precision_of_the_scores_is_that_of_the_gradient_alone(name: str) -> None:
    scores, law = drawn(5, 40, 9.0, 1, torch.float32)
    scores = scores.detach().bfloat16().requires_grad_()
    law = law.clamp(min=1e-30)  # the plain formula takes its logarithm
    expected, found = PLAIN[name](scores.float(), law), LAW_LOSSES[name](scores, law)
    assert found.dtype == torch.float32
    assert_same(found, expected)
    gradients = [torch.autograd.grad(loss.sum(), scores)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", LAW_LOSSES)
def test_laws_that_rule_tokens_out_altogether_give_finite_losses_and_gradients(name: str, dtype: torch.dtype) -> None:
    """Row 0: p and q sure of the same token; row 1: of different ones; then p alone, q alone, and most tokens at 0."""
    sure, other, even = [3e4, 0.0, -3e4, -3e4], [0.0, 3e4, -3e4, -3e4], [1.0, 2.0, 3.0, 4.0]
    scores = torch.tensor([sure, sure, even, sure, [1.0, 0.0, -9e3, -9e3]], dtype=dtype, requires_grad=True)
    law = torch.tensor([sure, other, sure, even, [0.0, 1.0, -9e3, -9e3]], dtype=dtype).softmax(-1)
    assert float(law.min()) == float(scores.detach().softmax(-1).min()) == 0.0
    found = LAW_LOSSES[name](scores, law)
    (gradient,) = torch.autograd.grad(found.sum(), scores)
    assert found.isfinite().all() and gradient.isfinite().all()
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(5, dtype=dtype), atol=1e-4, rtol=0)


def test_losses_of_sure_laws_are_those_of_the_definitions() -> None:
    sure = torch.tensor([[3e4, 0.0, -3e4]])
    law = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    scores = sure.expand(2, -1)
    assert LAW_LOSSES["tv"](scores, law).tolist() == [0.0, 1.0]
    torch.testing.assert_close(LAW_LOSSES["jsd"](scores, law), torch.tensor([0.0, math.log(2)]))
    floor = torch.tensor(torch.finfo(torch.float32).tiny)
    torch.testing.assert_close(LAW_LOSSES["reverse_kl"](scores, law), torch.stack([torch.zeros(()), -floor.log()]))


@pytest.mark.parametrize("name", LAW_LOSSES)
def test_every_loss_is_least_where_the_drafter_has_the_targets_law(name: str) -> None:
    scores, law = drawn(8, 20, 2.0, 5, torch.float64)
    at_law = LAW_LOSSES[name](law.log(), law)
    expected = -(law * law.log()).sum(-1)
    if name == "lk":
        expected = torch.stack([expected, torch.zeros(8, dtype=torch.float64)])
    torch.testing.assert_close(at_law, expected if name in ("kl", "lk") else torch.zeros(8, dtype=torch.float64))
    assert (LAW_LOSSES[name](scores, law) > at_law + 1e-3).all()


def test_total_variation_is_how_often_speculative_sampling_rejects() -> None:
    """p = (.5, .3, .2), q = (.2, .3, .5): a token of q is kept with .2 + .3 + .2 = .7."""
    q, law = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[0.5, 0.3, 0.2]])
    torch.testing.assert_close(LAW_LOSSES["tv"](q.log(), law), torch.tensor([0.3]))


def test_lk_goes_over_from_kl_to_total_variation_as_the_drafter_gets_better() -> None:
    """Depth 1 accepts half of its tokens, depth 2 all, depth 3 none; depth 4 has no label."""
    sums = torch.tensor([[20.0, 5.0], [8.0, 0.0], [40.0, 10.0], [0.0, 0.0]], requires_grad=True)
    blended = lk_blend(sums, torch.tensor([10, 10, 10, 0]))
    half, whole = math.exp(-1.5), math.exp(-3.0)
    torch.testing.assert_close(blended, torch.tensor([20 * half + 5 * (1 - half), 8 * whole, 40.0, 0.0]))
    blended.sum().backward()
    assert sums.grad is not None
    torch.testing.assert_close(sums.grad[:, 0], torch.tensor([half, whole, 1.0, whole]))
    torch.testing.assert_close(sums.grad.sum(1), torch.ones(4))  # no gradient goes through the weight


def test_soft_cross_entropy_is_that_of_the_labels_where_the_law_is_sure() -> None:
    scores, _ = drawn(3, 6, 2.0, 0, torch.float32)
    labels = torch.tensor([4, 0, 5])
    law = torch.nn.functional.one_hot(labels, 6).float()
    torch.testing.assert_close(soft_cross_entropy(scores, law), hard_cross_entropy(scores, labels))


def test_labels_outside_the_vocabulary_cost_nothing() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    assert float(hard_cross_entropy(logits, torch.tensor([2, -1]))[1]) == 0.0
