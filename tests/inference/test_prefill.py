"""Prefill: in chunks, and on the right side of rotary embeddings that change with length."""

from __future__ import annotations

import pytest
from tiny_drafters import BUSHY, ScriptedDrafter, oracle_drafter
from tiny_targets import COMMON, make_model, own_text, prompts_of, tiny_target, transformers_text

from headstart.inference import engine as engine_module
from headstart.inference.engine import EngineState, SpeculativeEngine
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

PROMPTS = prompts_of(9, 3, 14, 5)


@pytest.mark.parametrize("chunk", [1, 4, 5, 14])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-window", "gpt2"], indirect=True)
def test_prefill_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch, family: str, chunk: int) -> None:
    target = tiny_target(family)
    told = own_text(target, PROMPTS, 20)
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", chunk)
    drafter = ScriptedDrafter(told, [2, 0], BUSHY)
    state = SpeculativeEngine(target, drafter).generate(PROMPTS, DecodingRules(10))
    assert state.outputs == [text[len(prompt) :][:10] for text, prompt in zip(told, PROMPTS, strict=True)]
    _, prompt_part = state.draft.seen[0]  # type: ignore[union-attr]
    assert prompt_part.lengths.tolist() == [len(prompt) for prompt in PROMPTS]
    assert [row[:n] for row, n in zip(prompt_part.read_tokens.tolist(), prompt_part.lengths, strict=True)] == PROMPTS


def longrope_target() -> Target:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
    }
    settings = COMMON | {"rope_parameters": rope, "sliding_window": None, "original_max_position_embeddings": 16}
    return Target(make_model("phi3", settings))


def longrope_state(target: Target, prompts: list[list[int]], new: list[int]) -> EngineState:
    texts = [prompt + transformers_text(target, prompt, n) + [1] * 20 for prompt, n in zip(prompts, new, strict=True)]
    return SpeculativeEngine(target, oracle_drafter(texts, 6)).generate(prompts, DecodingRules(new))


def test_rows_below_a_longrope_switch_stay_on_its_side_even_where_trees_reach_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = longrope_target()
    prompts, new = prompts_of(12, 3), [4, 13]
    state = longrope_state(target, prompts, new)
    assert state.outputs == [transformers_text(target, prompt, n) for prompt, n in zip(prompts, new, strict=True)]


def test_rows_beyond_a_longrope_switch_are_prefilled_on_its_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "PREFILL_CHUNK", 4)
    target = longrope_target()
    prompts, new = prompts_of(30, 17), [10, 12]
    state = longrope_state(target, prompts, new)
    assert state.outputs == [transformers_text(target, prompt, n) for prompt, n in zip(prompts, new, strict=True)]


@pytest.mark.parametrize(("lengths", "new"), [((10,), 7), ((16,), 1), ((20, 8), 4)])
def test_crossing_a_longrope_switch_is_refused(lengths: tuple[int, ...], new: int) -> None:
    with pytest.raises(ValueError, match="changes at 16 positions"):
        SpeculativeEngine(longrope_target()).generate(prompts_of(*lengths), DecodingRules(new))
