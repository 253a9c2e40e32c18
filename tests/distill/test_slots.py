"""Slots: kept full, answers out of order, and loops found by a row's own length."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_drafters import oracle_drafter
from tiny_targets import own_text, prompts_of

from headstart.distill import slots as slots_module
from headstart.distill.slots import Progress, answer_all, loop_between
from headstart.drafters.registry import new_drafter
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules, EngineState
from headstart.inference.target import Target

PROMPTS, NEW = prompts_of(14, 9, 7, 5, 5, 4, 3, 2), 12


class _Watch(SpeculativeEngine):
    """Counts the rows of every pass, and those of them that go on."""

    passes: list[tuple[int, int]]
    admitted: list[int]

    def step(self, state: EngineState) -> None:
        self.passes.append((len(state.order), len(state.unfinished)))
        super().step(state)

    def admit(self, state: EngineState, prompts: Any, rules: DecodingRules) -> None:
        self.admitted.append(len(prompts))
        super().admit(state, prompts, rules)


def answered(target: Target, slots: int, **settings: Any) -> tuple[_Watch, list[Progress]]:
    ends = [row[3] for row in plain_generate(target, PROMPTS[:3], DecodingRules(NEW))]
    engine = _Watch(target)
    engine.passes, engine.admitted = [], []
    steps = list(answer_all(engine, PROMPTS, DecodingRules(NEW, ends), list(range(8)), slots, **settings))
    answers = sorted((answer for step in steps for answer in step.answers), key=lambda answer: answer.prompt)
    assert [answer.tokens for answer in answers] == plain_generate(target, PROMPTS, DecodingRules(NEW, ends))
    assert [answer.prompt for answer in answers] == list(range(8))
    return engine, steps


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 20])
def test_every_prompt_is_answered_once_in_its_own_words(target: Target, slots: int) -> None:
    _, steps = answered(target, slots)
    said = sum(len(answer.tokens) for step in steps for answer in step.answers)
    assert said == sum(step.tokens for step in steps), "tokens are counted as they come"


def test_slots_are_full_as_long_as_prompts_are_waiting(target: Target) -> None:
    engine, _ = answered(target, 3)
    before_the_last = engine.passes[: len(engine.passes) - NEW]
    assert before_the_last and all(rows == going_on == 3 for rows, going_on in before_the_last)
    assert sum(engine.admitted) == 5


def test_several_prompts_are_run_together_once_enough_slots_are_free(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "ADMIT_SHARE", 2 / 3)
    engine, _ = answered(target, 3)
    assert engine.admitted[:-1] and all(count >= 2 for count in engine.admitted[:-1])


def test_no_place_is_held_when_all_prompts_fit(target: Target) -> None:
    engine, _ = answered(target, 8)
    assert not engine.admitted
    assert engine.passes[-1][0] < 8, "finished rows are dropped"


@pytest.mark.parametrize(
    ("slots", "sampled", "drafted"), [(3, False, False), (8, False, True), (3, True, True), (8, True, False)]
)
def test_passes_over_prompts_are_bounded_and_answers_are_the_same(
    target: Target, monkeypatch: pytest.MonkeyPatch, slots: int, sampled: bool, drafted: bool
) -> None:
    rules = DecodingRules(NEW, [own_text(target, PROMPTS[:1], NEW)[0][16]], do_sample=sampled)

    def answers() -> tuple[list[Progress], list[list[int]]]:
        read: list[list[int]] = []

        class Noting(SpeculativeEngine):
            def prefill(self, prompts: Any, rules: DecodingRules) -> EngineState:
                read.append([len(prompt) for prompt in prompts])
                return super().prefill(prompts, rules)

        drafter = new_drafter("medusa", target).double().eval() if drafted else None
        engine = Noting(target, drafter)
        return list(answer_all(engine, PROMPTS, rules, list(range(8)), slots)), read

    whole, passes = answers()
    assert passes[0] == [len(prompt) for prompt in PROMPTS[:slots]]
    monkeypatch.setattr(slots_module, "PREFILL_TOKENS", 20)
    steps, passes = answers()
    assert passes[1:] and all(len(lengths) == 1 or len(lengths) * max(lengths) <= 20 for lengths in passes)
    assert any(len(lengths) > 1 for lengths in passes[1:]), "as many at a time as may be"
    assert steps[1].tokens == 1, "the first prompt's first token shows before the second prompt is run"

    def by_prompt(steps: list[Progress]) -> list[tuple[int, list[int], str]]:
        return sorted((a.prompt, a.tokens, a.reason) for step in steps for a in step.answers)

    assert by_prompt(steps) == by_prompt(whole)
    assert sum(step.tokens for step in steps) == sum(step.tokens for step in whole)


def test_loops_are_looked_for_at_fixed_lengths_however_many_tokens_a_step_brings(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "LOOK_EVERY", 4)
    monkeypatch.setattr(slots_module, "in_a_loop", lambda tokens: len(tokens) == 8)
    texts = own_text(target, PROMPTS, 24)
    for drafter in (None, oracle_drafter(texts, 2), oracle_drafter(texts, 6)):
        steps = answer_all(SpeculativeEngine(target, drafter), PROMPTS[:2], DecodingRules(14), [0, 1], 2)
        answers = [answer for step in steps for answer in step.answers]
        assert [(len(answer.tokens), answer.reason) for answer in answers] == [(8, "loop")] * 2


def test_end_of_an_answer_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "LOOK_EVERY", 4)
    monkeypatch.setattr(slots_module, "in_a_loop", lambda tokens: len(tokens) in (8, 12))
    assert loop_between([1] * 8, 7, ended=False) == 8
    assert loop_between([1] * 8, 7, ended=True) is None
    assert loop_between([1] * 9, 7, ended=True) == 8
    assert loop_between([1] * 13, 3, ended=True) == 8
    assert loop_between([1] * 13, 8, ended=True) == 12, "what has been looked at is not looked at again"
    assert loop_between([1] * 15, 12, ended=False) is None
