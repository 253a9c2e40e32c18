"""New prompts in the places of finished rows: every row says what it says alone, whoever sat there before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from tiny_batches import scrambled
from tiny_drafters import BUSHY, RandomDrafter, ScriptedDrafter
from tiny_targets import (
    COMMON,
    committed_state,
    layers_of,
    make_model,
    own_text,
    prompts_of,
    tiny_target,
    transformers_text,
)
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from headstart.core.tree import DraftTree, TreeTopology
from headstart.drafters.base import Drafter
from headstart.drafters.registry import METHODS, new_drafter
from headstart.drafters.states import NewestState
from headstart.inference import engine as engine_module
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules, EngineState
from headstart.inference.target import Target

PROMPTS = prompts_of(9, 3, 14, 5, 2, 20, 7, 1, 26, 4)
"""Shorter and longer than what is in the cache when their turn comes."""

BUDGETS = [6, 15, 1, 9, 18, 3, 12, 1, 8, 14]
"""One token is the prefill's own, so such a row has ended before it takes a step."""

SEEDS = [11, 12, 13, 11, 2**63 + 1, 15, 16, 17, 18, 19]
SLOTS, BEYOND = 3, 10
TREES = (BUSHY, TreeTopology.chain(2), BUSHY)
FAMILIES = ["llama", "mistral-window", "gemma3-window", "phi3", "gpt2"]
SAMPLED: dict[str, Any] = {"do_sample": True, "processors": LogitsProcessorList([TemperatureLogitsWarper(0.8)])}


def rules_for(rows: Sequence[int], **settings: Any) -> DecodingRules:
    seeds = [SEEDS[row] for row in rows] if settings.get("do_sample") else None
    return DecodingRules([BUDGETS[row] for row in rows], seed=seeds, holds_slots=True, **settings)


def in_slots(
    engine: SpeculativeEngine,
    admit_at: int = 1,
    watch: Callable[[EngineState], None] = lambda state: None,
    **settings: Any,
) -> EngineState:
    """Answer all prompts in their order through a few slots, filled again when `admit_at` of them are free."""
    waiting = list(range(len(PROMPTS)))
    taken, waiting = waiting[:SLOTS], waiting[SLOTS:]
    state = engine.prefill([PROMPTS[row] for row in taken], rules_for(taken, **settings))
    while True:
        watch(state)
        free = len(state.free_slots)
        if waiting and (free >= admit_at or state.done):
            taken, waiting = waiting[:free], waiting[free:]
            engine.admit(state, [PROMPTS[row] for row in taken], rules_for(taken, **settings))
            state.holds_slots = bool(waiting)
        elif state.done:
            return state
        else:
            engine.step(state)


@cache
def told(family: str, sampled: bool) -> list[list[int]]:
    """Return each row's prompt and what the plain loop says, longer than the longest budget."""
    settings = {**SAMPLED, "seed": SEEDS} if sampled else {}
    return own_text(tiny_target(family), PROMPTS, [budget + BEYOND for budget in BUDGETS], **settings)


def new_tokens(texts: list[list[int]]) -> list[list[int]]:
    """Cut the texts to each row's budget."""
    return [
        text[len(prompt) : len(prompt) + budget] for text, prompt, budget in zip(texts, PROMPTS, BUDGETS, strict=True)
    ]


def drafter_of(kind: str, texts: list[list[int]]) -> Drafter | None:
    drafters = {"none": None, "scripted": ScriptedDrafter(texts, [3, 0, 2, 1], *TREES), "random": RandomDrafter(texts)}
    return drafters[kind]


@pytest.mark.parametrize("kind", ["none", "scripted", "random"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_row_in_the_place_of_another_says_what_it_says_alone(family: str, sampled: bool, kind: str) -> None:
    target, texts = tiny_target(family), told(family, sampled)
    state = in_slots(SpeculativeEngine(target, drafter_of(kind, texts)), **(SAMPLED if sampled else {}))
    assert state.outputs == new_tokens(texts)
    assert state.finish_reasons == ["length"] * len(PROMPTS)


def test_heads_remember_the_row_that_sits_there_now(target: Target) -> None:
    texts = told("llama", False)

    def watch(state: EngineState) -> None:
        assert isinstance(state.draft, NewestState)
        for place, row in enumerate(state.order):
            count = int(state.lengths[place])
            assert int(state.draft.root[place]) == texts[row][count - 1]
            tokens = torch.tensor([texts[row][: count - 1]])
            with torch.inference_mode():
                expected = target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final[0, -1]
            torch.testing.assert_close(state.draft.feature[place], expected, rtol=0, atol=1e-7)

    state = in_slots(SpeculativeEngine(target, new_drafter("medusa", target).double().eval()), watch=watch)
    assert state.outputs == new_tokens(texts)


def first_guesses(target: Target, drafter: Drafter, run: Callable[[SpeculativeEngine], EngineState]) -> dict:
    """Return the first guess by row, its length and the depth of the tree (a beam's first token depends on it)."""
    engine, found = SpeculativeEngine(target, drafter), {}
    draft = engine._draft

    def watch(state: EngineState) -> DraftTree:
        tree = draft(state)
        for place, row in enumerate(state.order):
            if tree.max_depth > 0 and state.finish_reasons[row] is None:
                found[row, len(state.outputs[row]), tree.max_depth] = int(tree.tokens[place, 1])
        return tree

    engine._draft = watch  # type: ignore[method-assign]
    run(engine)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_drafter_guesses_for_an_admitted_row_what_it_guesses_for_the_row_alone(
    monkeypatch: pytest.MonkeyPatch, target: Target, method: str
) -> None:
    monkeypatch.setattr(engine_module, "COMPACT_EVERY", 3)
    drafter = scrambled(new_drafter(method, target))
    texts = new_tokens(told("llama", False))

    def in_places(engine: SpeculativeEngine) -> EngineState:
        state = in_slots(engine)
        assert state.outputs == texts
        return state

    together, compared = first_guesses(target, drafter, in_places), 0
    for row, prompt in enumerate(PROMPTS):
        alone = first_guesses(target, drafter, lambda engine, r=row, p=prompt: engine.generate([p], rules_for([r])))
        for (_, length, depth), guess in alone.items():
            if (row, length, depth) in together:
                assert together[row, length, depth] == guess
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("by_row", [False, True], ids=["one list", "a list a row"])
def test_processors_read_the_new_rows_own_prefix(target: Target, by_row: bool) -> None:
    penalties = [1.6] * len(PROMPTS) if not by_row else [1.2 + 0.1 * row for row in range(len(PROMPTS))]
    lists = tuple(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(penalty)]) for penalty in penalties)
    engine, state = SpeculativeEngine(target), None
    for rows in ([0, 1], [2, 3], [4]):
        rules = DecodingRules(
            10, processors=tuple(lists[row] for row in rows) if by_row else lists[0], holds_slots=True
        )
        prompts = [PROMPTS[row] for row in rows]
        if state is None:
            state = engine.prefill(prompts, rules)
        else:
            engine.admit(state, prompts, rules)
        while not state.done:
            engine.step(state)
    assert state is not None
    assert state.outputs == plain_generate(
        target, PROMPTS[:5], DecodingRules(10, processors=lists[:5] if by_row else lists[0])
    )


@pytest.mark.parametrize("compact", [(1, 1.0), (1, 0.6), (1000, 1.0)], ids=["every step", "now and then", "never"])
@pytest.mark.parametrize("admit_at", [1, 2, 3])
@pytest.mark.parametrize("kind", ["none", "random"])
def test_removing_holes_between_admissions_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, target: Target, compact: tuple[int, float], admit_at: int, kind: str
) -> None:
    monkeypatch.setattr(engine_module, "COMPACT_EVERY", compact[0])
    monkeypatch.setattr(engine_module, "COMPACT_BELOW", compact[1])
    texts = told("llama", False)
    state = in_slots(SpeculativeEngine(target, drafter_of(kind, texts)), admit_at)
    assert state.outputs == new_tokens(texts)


def held(target: Target, state: EngineState, texts: list[list[int]]) -> None:
    """Hold the cache of every unfinished row against a fresh pass over what the row has said."""
    cache = state.cache
    for place, row in enumerate(state.order):
        if state.finish_reasons[row] is not None:
            continue
        count = int(state.lengths[place])
        assert count == len(PROMPTS[row]) + len(state.outputs[row])
        assert state.tokens[place, :count].tolist() == texts[row][:count]
        here = cache.valid[place]
        assert cache.positions[place, here].tolist() == list(range(count - 1))
        keys, values = committed_state(target, texts[row][: count - 1])
        for layer, key, value in zip(layers_of(cache), keys, values, strict=True):
            torch.testing.assert_close(layer.keys[place][:, here], key, rtol=0, atol=1e-7)
            torch.testing.assert_close(layer.values[place][:, here], value, rtol=0, atol=1e-7)


def test_cache_of_a_place_holds_the_new_row_and_nothing_of_the_old_one(target: Target) -> None:
    texts, watched = told("llama", False), []

    def watch(state: EngineState) -> None:
        held(target, state, texts)
        watched.append(len(state.outputs))

    in_slots(SpeculativeEngine(target, RandomDrafter(texts)), watch=watch)
    assert len(set(watched)) > 3, "several admissions were watched"


def test_slots_stay_full_until_nothing_is_left_to_admit(target: Target) -> None:
    sizes: list[tuple[int, int]] = []
    in_slots(SpeculativeEngine(target), watch=lambda state: sizes.append((len(state.outputs), len(state.order))))
    assert {size for rows, size in sizes if rows < len(PROMPTS)} == {SLOTS}
    assert min(size for rows, size in sizes if rows == len(PROMPTS)) < SLOTS


def test_batch_in_which_all_rows_ended_at_once_takes_new_ones(target: Target) -> None:
    engine = SpeculativeEngine(target)
    state = engine.prefill(PROMPTS[:2], DecodingRules(1, holds_slots=True))
    assert state.done and state.free_slots == [0, 1]
    engine.admit(state, PROMPTS[2:4], DecodingRules([1, 5], holds_slots=True))
    while not state.done:
        engine.step(state)
    alone = plain_generate(target, PROMPTS[:4], DecodingRules([1, 1, 1, 5]))
    assert state.outputs == alone


def test_single_place_is_used_again_and_again(target: Target) -> None:
    """A lone row has no holes; its successors, who do not fill its columns, have."""
    engine, state = SpeculativeEngine(target), None
    for row in (5, 1, 8, 4):
        rules = rules_for([row])
        if state is None:
            state = engine.prefill([PROMPTS[row]], rules)
        else:
            engine.admit(state, [PROMPTS[row]], rules)
        while not state.done:
            engine.step(state)
    texts = new_tokens(told("llama", False))
    assert state is not None and state.outputs == [texts[row] for row in (5, 1, 8, 4)]


def test_row_stopped_early_gives_up_its_place(target: Target) -> None:
    engine = SpeculativeEngine(target)
    state = engine.prefill(PROMPTS[:3], DecodingRules(12, holds_slots=True))
    for _ in range(4):
        engine.step(state)
    engine.stop(state, [1], "enough")
    engine.admit(state, PROMPTS[3:4], DecodingRules(12, holds_slots=True))
    assert state.order == [0, 3, 2]
    while not state.done:
        engine.step(state)
    whole = plain_generate(target, PROMPTS[:4], DecodingRules(12))
    assert state.outputs == [whole[0], whole[1][:5], whole[2], whole[3]]
    assert state.finish_reasons == ["length", "enough", "length", "length"]


def test_holes_may_be_removed_when_a_row_is_stopped(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    engine = SpeculativeEngine(target, drafter_of("scripted", told("llama", False)))
    state = engine.prefill(PROMPTS[:2], DecodingRules(12, holds_slots=True))
    for _ in range(2):
        engine.step(state)
    assert state.cache.columns > int(state.cache.lengths.max())
    monkeypatch.setattr(engine_module, "COMPACT_EVERY", 1)
    monkeypatch.setattr(engine_module, "COMPACT_BELOW", 1.0)
    engine.stop(state, [0], "enough")
    assert state.cache.columns == int(state.cache.lengths.max())
    while not state.done:
        engine.step(state)
    assert state.outputs[1] == plain_generate(target, PROMPTS[1:2], DecodingRules(12))[0]


@pytest.mark.parametrize(("first", "second"), [(5, 20), (20, 5)])
def test_row_beyond_a_longrope_switch_takes_no_place_among_rows_below_it(first: int, second: int) -> None:
    """One pass has one set of angles, chosen by its last position."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0, 9.0]}
    settings = COMMON | {"rope_parameters": rope, "sliding_window": None, "original_max_position_embeddings": 16}
    target, own = Target(make_model("phi3", settings)), prompts_of(first, first)
    engine = SpeculativeEngine(target)
    state = engine.prefill(own, DecodingRules([1, 9], holds_slots=True))
    with pytest.raises(ValueError, match="changes at 16 positions"):
        engine.admit(state, prompts_of(second), DecodingRules(9, holds_slots=True))
    engine.admit(state, own[:1], DecodingRules(9, holds_slots=True))
    while not state.done:
        engine.step(state)
    assert state.outputs[1:] == [transformers_text(target, prompt, 9) for prompt in (own[1], own[0])]


def test_end_of_sequence_criteria_and_kept_logits_go_with_the_new_rows(target: Target) -> None:
    whole = plain_generate(target, PROMPTS[:5], DecodingRules(16))
    ends = [whole[3][4]]
    settings: dict[str, Any] = {
        "eos_token_ids": ends,
        "criteria": [lambda tokens, _: torch.tensor([int(tokens[0, -1]) == whole[4][6]])],
    }
    engine = SpeculativeEngine(target, RandomDrafter(own_text(target, PROMPTS[:5], 32)))
    state = engine.prefill(PROMPTS[:3], DecodingRules(16, keep_logits=True, holds_slots=True, **settings))
    admitted = False
    while not state.done:
        engine.step(state)
        if len(state.free_slots) >= 2 and not admitted:
            engine.admit(state, PROMPTS[3:5], DecodingRules(16, keep_logits=True, holds_slots=True, **settings))
            admitted = True
    assert state.outputs == plain_generate(target, PROMPTS[:5], DecodingRules(16, **settings))
    assert state.finish_reasons[3:] == ["stop", "stop"]
    for row in range(5):
        assert [int(logits.argmax()) for logits in state.logits[row]] == state.outputs[row]
