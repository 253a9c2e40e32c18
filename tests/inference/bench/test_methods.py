from functools import partial

import pytest
import torch
from tiny_targets import COMMON, make_model, transformers_text
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from headstart.inference.bench.clock import ClockedDrafter
from headstart.inference.bench.methods import (
    NO_DRAFTER,
    PROMPT_LOOKUP,
    Autoregressive,
    Decoding,
    Engine,
    StepStamps,
    left_padded,
    padding_id,
    upto_end,
)
from headstart.inference.target import Target

GREEDY = Decoding(12, pad_token_id=0)
SEEDS = [3, 4, 5, 6]


def test_baseline_is_transformers_own_text(target, prompts):
    call = Autoregressive(target).run(prompts[:1], GREEDY, SEEDS[:1])
    assert call.outputs == [transformers_text(target, prompts[0], 12)]
    assert call.steps == call.step_tokens == 11 and 0 < call.prefill_seconds < call.seconds


def test_batch_of_the_baseline_equals_row_by_row(target, prompts):
    together = Autoregressive(target).run(prompts, GREEDY, SEEDS).outputs
    assert together == [transformers_text(target, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("size", [1, 4])
def test_engine_says_what_the_baseline_says(target, drafter, prompts, size):
    for name, ours in (("drafter", drafter), (NO_DRAFTER, None)):
        call = Engine(target, ours, name).run(prompts[:size], GREEDY, SEEDS[:size])
        assert call.outputs == Autoregressive(target).run(prompts[:size], GREEDY, SEEDS[:size]).outputs
        assert call.stats is not None and call.steps == call.stats.row_steps
        assert (call.step_tokens or 0) + size == call.new_tokens


def test_every_method_stops_at_the_end_of_sequence(target, drafter, prompts):
    text = transformers_text(target, prompts[0], 12)
    decoding = Decoding(12, (text[5],), 0)
    expected = text[: text.index(text[5]) + 1]
    for method in (Autoregressive(target), Engine(target, drafter, "drafter"), Engine(target, None, NO_DRAFTER)):
        assert method.run(prompts[:1], decoding, SEEDS[:1]).outputs == [expected]


def test_prompt_lookup_says_the_same_and_counts_its_steps(target):
    prompt = [5, 6, 7, 8, 5, 6, 7]
    passes = []
    handle = target.model.register_forward_hook(lambda *_: passes.append(1))
    call = Autoregressive(target, PROMPT_LOOKUP, 3).run([prompt], GREEDY, [0])
    handle.remove()
    assert call.outputs == Autoregressive(target).run([prompt], GREEDY, [0]).outputs
    assert call.steps is not None and call.step_tokens is not None
    assert call.steps == len(passes) - 1 and call.steps <= call.step_tokens <= 11


def test_questions_about_guesses_are_no_steps(target, monkeypatch):
    """Releases of transformers before 5.20 ask the stopping criteria about every guess, before the pass over it."""
    run = partial(Autoregressive(target, PROMPT_LOOKUP, 3).run, [[5, 6, 7, 8, 5, 6, 7]], GREEDY, [0])
    expected, made, look_up = run(), [], PromptLookupCandidateGenerator.get_candidates
    create = StepStamps.__init__
    monkeypatch.setattr(StepStamps, "__init__", lambda self: made.append(self) or create(self))

    def asking(self, input_ids, **more):
        guess = look_up(self, input_ids, **more)
        made[-1](guess[0], None)
        return guess

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", asking)
    call = run()
    assert len(made) == 1 and (call.steps, call.step_tokens) == (expected.steps, expected.step_tokens)
    assert made[0].lengths[0] <= 7 + 4 and call.prefill_seconds < call.seconds


def test_sampled_baseline_leaves_torchs_generator_alone_and_repeats_itself(target, prompts):
    decoding = Decoding(12, (), 0, temperature=1.5)
    before = torch.random.get_rng_state()
    first = Autoregressive(target).run(prompts[:1], decoding, [3])
    assert torch.equal(before, torch.random.get_rng_state())
    assert Autoregressive(target).run(prompts[:1], decoding, [3]).outputs == first.outputs
    assert Autoregressive(target).run(prompts[:1], decoding, [4]).outputs != first.outputs


def test_sampled_row_depends_on_its_own_seed_alone(target, drafter, prompts):
    decoding = Decoding(12, (), 0, temperature=0.8, top_k=20, top_p=0.9)
    together = Engine(target, drafter, "drafter").run(prompts, decoding, SEEDS).outputs
    alone = Engine(target, None, NO_DRAFTER)
    assert together == [
        alone.run([prompt], decoding, [seed]).outputs[0] for prompt, seed in zip(prompts, SEEDS, strict=True)
    ]


def test_penalties_of_the_models_own_configuration_stay_out():
    model = make_model("llama", COMMON)
    plain = Autoregressive(Target(model)).run([[5, 6, 7]], GREEDY, [0]).outputs
    model.generation_config.repetition_penalty = 5.0  # pyright: ignore[reportOptionalMemberAccess]
    model.generation_config.no_repeat_ngram_size = 1  # pyright: ignore[reportOptionalMemberAccess]
    assert Autoregressive(Target(model)).run([[5, 6, 7]], GREEDY, [0]).outputs == plain


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "at least 1"),
        ({"temperature": -1.0}, "at least 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "above 0"),
        ({"top_p": 0.9}, "need a temperature"),
        ({"top_k": 5}, "need a temperature"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Decoding(**({"max_new_tokens": 8} | settings))


def test_processors_come_in_transformers_order():
    names = [type(one).__name__ for one in Decoding(8, temperature=0.5, top_k=3, top_p=0.9).processors()]
    assert names == ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"]
    assert not Decoding(8).processors() and not Decoding(8, temperature=1.0).processors()


def test_padding_stands_on_the_left_and_is_masked():
    ids, mask = left_padded([[5, 6, 7], [8]], pad=9)
    assert ids.tolist() == [[5, 6, 7], [9, 9, 8]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_text_is_cut_after_its_first_end():
    assert upto_end([4, 2, 2, 3], (2,)) == [4, 2] and upto_end([4, 3], (2,)) == [4, 3]


def test_padding_id_is_the_models_or_one_that_ends_a_text():
    assert padding_id(make_model("llama", COMMON), (7,)) == 0
    assert padding_id(make_model("llama", COMMON | {"pad_token_id": None}), (7,)) == 7
    assert padding_id(make_model("llama", COMMON | {"pad_token_id": None}), ()) == 0


def test_clocked_drafter_times_steps_but_not_the_prompts_observation(target, drafter, prompts):
    clocked = ClockedDrafter(drafter)
    engine = Engine(target, drafter, "drafter")
    assert engine.drafter is not None and clocked.feature_layers == ("final",)
    engine.run(prompts[:1], Decoding(1), SEEDS[:1])
    assert engine.drafter.observe_seconds == engine.drafter.propose_seconds == 0
    call = engine.run(prompts[:1], GREEDY, SEEDS[:1])
    assert call.observe_seconds == engine.drafter.observe_seconds > 0
    assert call.stats is not None and engine.drafter.propose_seconds <= call.stats.seconds["draft"]


def test_device_is_waited_for_between_phases_only_where_times_of_each_are_wanted(target, drafter, prompts, monkeypatch):
    waited = []
    monkeypatch.setattr("headstart.inference.bench.clock.synchronise", lambda device: waited.append(device))
    Engine(target, drafter, "drafter").run(prompts[:1], GREEDY, SEEDS[:1])
    assert waited == []
    call = Engine(target, drafter, "drafter", times_phases=True).run(prompts[:1], GREEDY, SEEDS[:1])
    assert call.steps is not None and len(waited) > 2 * call.steps, "before and after each time the drafter is at work"
