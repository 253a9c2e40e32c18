"""Keyed noise, draws and the nucleus, against their laws and against transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.core import noise as noise_module
from headstart.core import sampling as sampling_module
from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.sampling import Sampling, nucleus

CPU = torch.device("cpu")
DRAWS = 20_000


def noise_of(seeds: Any, rows: int, vocab: int) -> KeyedNoise:
    return KeyedNoise(request_keys(seeds, rows, CPU), vocab)


def chi_square(counts: Tensor, law: Tensor) -> float:
    """Return the statistic in standard deviations of its own law (degrees k, deviation sqrt(2k))."""
    expected = law * counts.sum()
    degrees = len(law) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def counts_of(winners: Tensor, kinds: int) -> Tensor:
    return torch.bincount(winners, minlength=kinds).double()


LAWS = {
    "flat": torch.zeros(8),
    "steep": torch.arange(8) * -0.9,
    "wide": torch.linspace(0, 3, 40).sin() * 2,
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("over", ["positions", "requests", "seeds"])
def test_winners_of_the_race_follow_the_softmax(law: str, over: str) -> None:
    scores = LAWS[law]
    if over == "positions":
        noise = noise_of(3, 1, len(scores))(torch.arange(DRAWS)[None])[0]
    elif over == "requests":
        noise = noise_of(3, DRAWS, len(scores))(torch.full((DRAWS,), 17))
    else:
        noise = noise_of(range(DRAWS), DRAWS, len(scores))(torch.full((DRAWS,), 17))
    winners = (scores + noise).argmax(-1)
    assert abs(chi_square(counts_of(winners, len(scores)), scores.double().softmax(-1))) < 4


def test_chi_square_sees_a_law_that_is_a_little_wrong() -> None:
    winners = (LAWS["steep"] + noise_of(3, 1, 8)(torch.arange(DRAWS)[None])[0]).argmax(-1)
    assert chi_square(counts_of(winners, 8), (LAWS["steep"] * 0.95).double().softmax(-1)) > 4


@pytest.mark.parametrize("pair", ["positions", "requests", "seeds", "tokens"])
def test_draws_at_neighbours_are_independent(pair: str) -> None:
    places = torch.arange(DRAWS)
    if pair == "positions":
        noise = noise_of(0, 1, 5)(torch.arange(DRAWS + 1)[None])[0]
        first, second = noise[:-1], noise[1:]
    elif pair == "requests":
        both = noise_of(0, 2, 5)(places.expand(2, -1))
        first, second = both[0], both[1]
    elif pair == "seeds":
        both = noise_of([0, 1], 2, 5)(places.expand(2, -1))
        first, second = both[0], both[1]
    else:
        noise = noise_of(0, 1, 10)(places[None])[0]
        first, second = noise[:, :5], noise[:, 5:]
    joint = first.argmax(-1) * 5 + second.argmax(-1)
    assert abs(chi_square(counts_of(joint, 25), torch.full((25,), 1 / 25, dtype=torch.double))) < 4
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 4 / math.sqrt(5 * DRAWS)


def test_noise_is_standard_gumbel_and_never_infinite() -> None:
    noise = noise_of(1, 1, 50_000)(torch.arange(40)[None])
    assert bool(noise.isfinite().all())
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_noise_of_the_most_extreme_hashes_is_finite_so_that_a_lone_allowed_token_wins() -> None:
    noise = KeyedNoise(torch.zeros(1, dtype=torch.long), 1)
    for extreme in (0, 0x7FFFFFFF):
        noise._table = _preimage(extreme, noise)
        assert bool(noise(torch.zeros(1, dtype=torch.long)).isfinite().all())


def _preimage(hashed: int, noise: KeyedNoise) -> Tensor:
    """Return the table entry whose noise at position 0 comes from the given hash: the mixing is a bijection."""
    word = noise_module._splitmix(noise.keys)
    high, low = int((word >> 32).to(torch.int32)), int(word.to(torch.int32))
    value = _unmix((_unmix(hashed) ^ low) & 0xFFFFFFFF) ^ high
    return torch.tensor([value & 0xFFFFFFFF]).to(torch.int32)


def _unmix(x: int) -> int:
    """Invert the mixing of 32-bit words: multiplications by their modular inverses, xor-shifts by repetition."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return x ^ (x >> 16)


def test_noise_hangs_on_every_half_of_its_key_and_not_on_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_module, "_splitmix", lambda words: words)
    keys = torch.tensor([0, 1, 1 << 32, (1 << 32) + 1])
    vectors = KeyedNoise(keys, 50)(torch.zeros(4, dtype=torch.long))
    assert len({tuple(vector) for vector in vectors.tolist()}) == 4


def test_noise_for_some_tokens_equals_the_full_vocabularys() -> None:
    noise = noise_of(9, 2, 100)
    positions, ids = torch.tensor([[4, 5, 6], [0, 1, 99]]), torch.tensor([3, 50, 99, 0])
    assert torch.equal(noise(positions, ids), noise(positions)[..., ids])


def test_noise_depends_on_the_position_not_on_its_neighbours_in_the_call() -> None:
    noise = noise_of(9, 2, 20)
    together = noise(torch.tensor([[4, 5], [8, 4]]))
    assert torch.equal(together[:, 1], noise(torch.tensor([5, 4])))
    assert not torch.equal(together[0, 0], together[1, 1]), "rows have keys of their own"


def test_one_seed_for_the_batch_gives_row_zero_what_a_list_gives_each_row() -> None:
    together, listed = request_keys(5, 3, CPU), request_keys([5, 6, 5], 3, CPU)
    assert len(set(together.tolist())) == 3
    assert listed[0] == listed[2] == together[0]
    assert listed[1] == request_keys(6, 1, CPU)[0]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, -(2**63), 2**64 + 3])
def test_any_integer_is_a_seed(seed: int) -> None:
    keys = request_keys([seed, 12345], 2, CPU)
    assert keys.dtype == torch.long and keys[0] != keys[1]


def test_list_of_seeds_must_have_one_entry_a_row() -> None:
    with pytest.raises(ValueError, match="found 2 seeds for 3 rows"):
        request_keys([1, 2], 3, CPU)


def test_taken_rows_keep_their_noise() -> None:
    noise = noise_of(5, 4, 30)
    rows, position = torch.tensor([3, 1]), torch.tensor([7, 8])
    assert torch.equal(noise.take_rows(rows)(position), noise(torch.tensor([0, 8, 0, 7]))[rows])
    sampling = Sampling(LogitsProcessorList(), noise).take_rows(rows.tolist())
    assert sampling.noise is not None and torch.equal(sampling.noise(position), noise.take_rows(rows)(position))
    assert Sampling(LogitsProcessorList(), None).take_rows(rows.tolist()).noise is None


def no_prefix(row: int) -> Tensor:
    raise AssertionError("these processors read no prefix")


def test_greedy_pick_is_the_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, 1.0]])
    assert Sampling(LogitsProcessorList(), None).pick(logits, torch.zeros(2), no_prefix).tolist() == [1, 0]


def test_pointwise_processors_give_transformers_scores_without_reading_prefixes() -> None:
    processors = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(50), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02)]
    )
    sampling = Sampling(processors, None)
    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(0), dtype=torch.double) * 3
    expected = processors(torch.zeros(6, 1, dtype=torch.long), logits.float())  # type: ignore[arg-type]
    assert not sampling.reads_prefix and sampling.temperature == 0.7
    assert torch.equal(sampling.process(logits, no_prefix), expected)


def test_processors_that_read_the_prefix_get_each_rows_own() -> None:
    penalty = RepetitionPenaltyLogitsProcessor(2.0)
    sampling = Sampling(LogitsProcessorList([penalty]), None)
    logits = torch.ones(2, 6)
    prefixes = [torch.tensor([[1, 2]]), torch.tensor([[5]])]
    scores = sampling.process(logits, lambda row: prefixes[row])
    assert sampling.reads_prefix and sampling.temperature == 1.0
    assert scores.tolist() == [[1, 0.5, 0.5, 1, 1, 1], [1, 1, 1, 1, 1, 0.5]]
    assert bool((logits == 1).all()), "the target's logits are left alone"


def same_nucleus(scores: Tensor, top_p: float, min_keep: int = 1) -> None:
    """Compare with transformers, whose choice among equal scores at the edge depends on an unstable sort.

    The number of tokens may differ only where the mass up to the edge lies within rounding of top_p.
    """
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=min_keep)
    theirs, ours = warper(None, scores.clone()), nucleus(scores, top_p, min_keep)  # type: ignore[arg-type]
    assert torch.equal(ours[~ours.isneginf()], scores[~ours.isneginf()])
    mass = scores.double().softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    for row, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        counts = sorted((int(mine.isfinite().sum()), int(other.isfinite().sum())))
        assert counts[0] == counts[1] or float((mass[row, counts[0] - 1 : counts[1] - 1] - top_p).abs().max()) < 2e-6
        best = [kept.sort(descending=True).values[: counts[0]] for kept in (mine, other)]
        assert torch.equal(*best)


def random_scores(rows: int, vocab: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.9, 0.99, 1 - 1e-5, 1.0])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
def test_nucleus_is_the_set_that_transformers_keeps(top_p: float, spread: float) -> None:
    scores = random_scores(3, 3000, spread)
    same_nucleus(scores, top_p)
    same_nucleus(scores.masked_fill(scores < scores.quantile(0.9), -math.inf), top_p)


@pytest.mark.parametrize("min_keep", [1, 2, 7, 2000, 3000])
def test_nucleus_keeps_at_least_the_wanted_number(min_keep: int) -> None:
    scores = random_scores(3, 3000, 8.0)
    same_nucleus(scores, 0.5, min_keep)
    assert bool(((~nucleus(scores, 1e-9, min_keep).isneginf()).sum(-1) == min_keep).all())


def test_nucleus_of_more_than_the_first_candidates_is_exact() -> None:
    scores = random_scores(2, 5000, 0.5)
    scores[1, 17] = 20.0  # one row is covered by its best token, the other needs thousands
    kept = (~nucleus(scores, 0.9, 1).isneginf()).sum(-1)
    assert kept[0] > sampling_module.NUCLEUS_CANDIDATES and kept[1] == 1
    same_nucleus(scores, 0.9)


def test_of_equal_scores_at_the_edge_the_lowest_ids_stay() -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])  # masses .405 and four times .149
    assert nucleus(scores, 0.6, 1).isneginf().tolist() == [[False, False, False, True, True]]
    same_nucleus(scores, 0.6)


def test_token_before_which_the_mass_is_reached_exactly_is_left_out_as_in_transformers() -> None:
    scores = torch.zeros(1, 4)
    assert int(nucleus(scores, 0.5, 1).isfinite().sum()) == 2
    assert int(TopPLogitsWarper(0.5)(None, scores).isfinite().sum()) == 2  # type: ignore[arg-type]


def test_nucleus_fills_with_the_wanted_value() -> None:
    assert nucleus(torch.tensor([[3.0, 0.0]]), 0.5, 1, filter_value=-99.0).tolist() == [[3.0, -99.0]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    levels=st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    top_p=st.floats(0.0, 1.0),
    candidates=st.integers(1, 20),
    min_keep=st.integers(1, 5),
)
def test_nucleus_with_many_ties_is_the_set_that_transformers_keeps(
    levels: list[int], top_p: float, candidates: int, min_keep: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_module, "NUCLEUS_CANDIDATES", candidates)
        same_nucleus(torch.tensor([levels, levels[::-1]], dtype=torch.float32) / 2, top_p, min(min_keep, len(levels)))
