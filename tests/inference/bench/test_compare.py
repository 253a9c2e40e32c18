import math

import pytest
import torch
from tiny_targets import COMMON, make_model, own_text, path_logits
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from headstart.core.sampling import Sampling
from headstart.inference.bench.bench import sampling_of
from headstart.inference.bench.compare import (
    TIE_GAP,
    _explained_by_edge,
    decision_scores,
    first_difference,
    look_at_divergence,
    repeats_itself,
)
from headstart.inference.bench.methods import Decoding
from headstart.inference.plain import plain_generate
from headstart.inference.target import Target

GREEDY = Sampling(LogitsProcessorList(), None)


@pytest.mark.parametrize(
    ("ours", "reference", "expected"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_first_difference_counts_a_shorter_text_as_different(ours, reference, expected):
    assert first_difference(ours, reference) == expected


def test_decisions_of_a_greedy_text_are_its_tokens(target, prompts):
    for prompt, text in zip(prompts, own_text(target, prompts, 10), strict=True):
        scores = decision_scores(target, text[:-1], 10, GREEDY)
        assert scores.argmax(-1).tolist() == text[len(prompt) :]


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 9}]
)
def test_decisions_of_a_sampled_text_are_its_tokens(target, prompts, settings):
    decoding = Decoding(10, **settings)
    for seed, prompt in enumerate(prompts):
        text = plain_generate(target, [prompt], decoding.rules([seed]))[0]
        scores = decision_scores(target, [*prompt, *text[:-1]], 10, sampling_of(decoding, seed, target))
        assert scores.argmax(-1).tolist() == text


def test_divergence_shows_the_gap_of_the_two_best_logits(target, prompts):
    text = own_text(target, prompts[:1], 6)[0][len(prompts[0]) :]
    two = path_logits(target, [*prompts[0], *text[:3]])[-1].topk(2)
    wrong = [*text[:3], int(two.indices[1]), 7, 7]
    found = look_at_divergence(target, "p", prompts[0], wrong, text, GREEDY)
    assert found is not None and found.position == 3 and found.best == tuple(two.indices.tolist())
    assert (found.token, found.reference) == (wrong[3], text[3])
    assert found.gap == pytest.approx(float(two.values[0] - two.values[1]), abs=1e-5)
    assert found.tie is False and not found.at_edge
    assert found.to_dict()["best"] == list(found.best)


def test_equal_texts_have_no_divergence(target, prompts):
    assert look_at_divergence(target, "p", prompts[0], [1, 2], [1, 2], GREEDY) is None


def test_tokens_with_equal_logits_are_a_tie_and_a_third_token_is_none():
    model = make_model("llama", COMMON)
    target = Target(model)
    best = int(path_logits(target, [5, 6, 7])[-1].argmax())
    other = (best + 1) % 64
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[best]  # pyright: ignore
    tie = look_at_divergence(target, "p", [5, 6, 7], [best], [other], GREEDY)
    assert tie is not None and tie.tie is True and tie.gap == 0
    worse = look_at_divergence(target, "p", [5, 6, 7], [best], [(best + 2) % 64], GREEDY)
    assert worse is not None and worse.tie is False
    half = look_at_divergence(Target(model.bfloat16()), "p", [5, 6, 7], [best], [other], GREEDY)
    assert half is not None and half.tie is None


def test_text_that_ends_early_is_no_tie(target, prompts):
    text = own_text(target, prompts[:1], 6)[0][len(prompts[0]) :]
    found = look_at_divergence(target, "p", prompts[0], text[:4], text, GREEDY)
    assert found is not None and found.token is None and found.tie is False


def edge_case(last_logit, pair, temperature=1.0):
    """Ask about four tokens of which the first two hold 0.8 of the mass, top_p is 0.9 and token 2 tops it up."""
    law = torch.tensor([0.5, 0.3, 0.1, 0.05])
    logits = torch.cat([law.log(), torch.full((4,), math.log(0.05 / 4))])[None]
    logits[0, 3] = last_logit(logits[0])
    processors = LogitsProcessorList([TemperatureLogitsWarper(temperature)] if temperature != 1 else [])
    processors.append(TopPLogitsWarper(0.9))
    noise = torch.zeros(8)
    noise[2], noise[3] = 5.0, 9.0

    class Fixed:
        def __call__(self, positions, token_ids=None):
            return noise.expand(*positions.shape, -1)

    sampling = Sampling(processors, Fixed())  # pyright: ignore[reportArgumentType]
    return _explained_by_edge(logits, torch.tensor([[1, 2]]), sampling, pair)


def test_token_at_the_edge_of_the_nucleus_explains_a_difference():
    beside = edge_case(lambda logits: float(logits[2]) - TIE_GAP / 2, [2, 3])
    assert beside, "tokens 2 and 3 are equal up to rounding: either may be the last one kept"


def test_token_well_outside_the_nucleus_explains_nothing():
    assert not edge_case(lambda logits: float(logits[2]) - 2.0, [2, 3])


def test_token_that_would_not_win_explains_nothing():
    assert not edge_case(lambda logits: float(logits[2]) - TIE_GAP / 2, [1, 3])


def test_edge_needs_a_nucleus():
    assert not _explained_by_edge(torch.zeros(1, 8), torch.tensor([[1]]), GREEDY, [0, 1])


def test_text_that_runs_in_circles_is_noticed():
    assert repeats_itself([9, *[1, 2, 3, 4] * 6])
    assert repeats_itself([5] * 10)
    assert not repeats_itself(list(range(60)))
    assert not repeats_itself([*range(8), 99, *range(8)])
    assert not repeats_itself([1, 2])
