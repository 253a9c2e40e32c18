"""Batches, seeds, stopping, prefill, dropping and compacting: what the engine does around the walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_drafters import BUSHY, RandomDrafter, ScriptedDrafter, oracle_drafter
from tiny_targets import own_text, prompts_of, tiny_target, transformers_text
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.core.tree import DraftTree, TreeTopology
from headstart.drafters.base import DraftRequest, DraftState, TargetView
from headstart.inference import engine as engine_module
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.stats import GenerationStats
from headstart.inference.target import Target

PROMPTS, NEW = prompts_of(9, 3, 14, 5), 16
TREES = (BUSHY, TreeTopology.chain(2), BUSHY)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return own_text(tiny_target("llama"), PROMPTS, NEW + 8)


@pytest.fixture
def engine(target: Target, texts: list[list[int]]) -> SpeculativeEngine:
    return SpeculativeEngine(target, ScriptedDrafter(texts, [3, 0, 2, 1], *TREES))


def cut(texts: list[list[int]], new: int) -> list[list[int]]:
    return [text[len(prompt) : len(prompt) + new] for text, prompt in zip(texts, PROMPTS, strict=True)]


PROCESSORS: dict[str, list[Any]] = {
    "none": [],
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top_k": [TemperatureLogitsWarper(1.3), TopKLogitsWarper(5)],
    "top_p": [TopPLogitsWarper(0.8)],
    "min_p": [MinPLogitsWarper(0.1)],
    "all warpers": [TemperatureLogitsWarper(0.8), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.6), TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.9)],
    "no repeated pair": [NoRepeatNGramLogitsProcessor(2), TemperatureLogitsWarper(0.5)],
}


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_text_under_processors_equals_plain_text(target: Target, name: str, do_sample: bool) -> None:
    settings: dict[str, Any] = {
        "processors": LogitsProcessorList(PROCESSORS[name]),
        "do_sample": do_sample,
        "seed": [4, 5, 4, 2**63 + 1],
    }
    told = own_text(target, PROMPTS, NEW + 12, **settings)
    for drafter in (ScriptedDrafter(told, [3, 0, 2, 1], *TREES), RandomDrafter(told)):
        state = SpeculativeEngine(target, drafter).generate(PROMPTS, DecodingRules(NEW, **settings))
        assert state.outputs == cut(told, NEW)
        assert state.stats.tokens_per_step > 1.2


@pytest.mark.parametrize("name", ["repetition penalty", "no repeated pair"])
def test_processors_that_read_the_prefix_change_greedy_text_as_they_do_in_transformers(
    target: Target, name: str
) -> None:
    processors = LogitsProcessorList(PROCESSORS[name][:1])
    plain = plain_generate(target, PROMPTS, DecodingRules(NEW, processors=processors))
    assert plain == [transformers_text(target, prompt, NEW, processors) for prompt in PROMPTS]
    assert plain != plain_generate(target, PROMPTS, DecodingRules(NEW))


def test_minimum_length_forbids_the_end_at_every_node_by_its_own_length(target: Target) -> None:
    prompt = PROMPTS[:1]
    end = plain_generate(target, prompt, DecodingRules(NEW))[0][2]
    least = LogitsProcessorList([MinNewTokensLengthLogitsProcessor(len(prompt[0]), 7, end, device="cpu")])
    plain = plain_generate(target, prompt, DecodingRules(NEW, [end], least))
    told = own_text(target, prompt, NEW + 8, processors=least)
    state = SpeculativeEngine(target, oracle_drafter(told, 4)).generate(prompt, DecodingRules(NEW, [end], least))
    assert state.outputs == plain
    assert end not in plain[0][:7]


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_row_of_a_batch_equals_the_row_alone(target: Target, do_sample: bool) -> None:
    seeds = [11, 12, 13, 11]
    told = own_text(target, PROMPTS, NEW + 8, do_sample=do_sample, seed=seeds)
    batch = SpeculativeEngine(target, ScriptedDrafter(told, [3, 0, 2, 1], *TREES)).generate(
        PROMPTS, DecodingRules(NEW, do_sample=do_sample, seed=seeds)
    )
    for row, prompt in enumerate(PROMPTS):
        alone = SpeculativeEngine(target, ScriptedDrafter(told[row:], [3, 0, 2, 1], *TREES))
        assert alone.generate([prompt], DecodingRules(NEW, do_sample=do_sample, seed=seeds[row])).outputs == [
            batch.outputs[row]
        ]


def test_one_seed_gives_rows_of_one_prompt_different_texts(target: Target) -> None:
    outputs = SpeculativeEngine(target).generate([PROMPTS[0]] * 3, DecodingRules(NEW, do_sample=True, seed=5)).outputs
    assert len({tuple(row) for row in outputs}) == 3


def test_without_a_seed_texts_follow_torchs_global_generator(target: Target) -> None:
    def sample() -> list[list[int]]:
        return SpeculativeEngine(target).generate(PROMPTS, DecodingRules(NEW, do_sample=True)).outputs

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first, second = sample(), sample()
        torch.manual_seed(1)
        assert sample() == first != second


def test_row_that_accepts_nothing_still_emits_one_token(target: Target, texts: list[list[int]]) -> None:
    drafter = ScriptedDrafter(texts, [0], BUSHY)
    state = SpeculativeEngine(target, drafter).generate(PROMPTS, DecodingRules(NEW))
    assert state.outputs == cut(texts, NEW)
    assert state.stats.target_passes == NEW - 1
    assert state.stats.tokens_per_step == 1.0


def test_oracle_reaches_depth_plus_one_tokens_a_step(target: Target, texts: list[list[int]]) -> None:
    state = SpeculativeEngine(target, oracle_drafter(texts, 4)).generate(PROMPTS, DecodingRules(NEW))
    assert state.outputs == cut(texts, NEW)
    assert state.stats.target_passes == (NEW - 1) / 5
    assert state.stats.tokens_per_step == 5.0
    assert state.stats.acceptance_by_depth == [1.0] * 4


@pytest.mark.parametrize("new", range(1, 9))
def test_length_limit_inside_the_accepted_block_cuts_there(target: Target, texts: list[list[int]], new: int) -> None:
    state = SpeculativeEngine(target, oracle_drafter(texts, 6)).generate(PROMPTS, DecodingRules(new))
    assert state.outputs == cut(texts, new)
    assert state.finish_reasons == ["length"] * 4
    assert torch.equal(state.cache.lengths, state.lengths - 1)


def test_rows_may_have_limits_of_their_own(engine: SpeculativeEngine, texts: list[list[int]]) -> None:
    state = engine.generate(PROMPTS, DecodingRules([1, 7, 16, 4]))
    assert [len(row) for row in state.outputs] == [1, 7, 16, 4]
    assert state.outputs == [row[:n] for row, n in zip(cut(texts, NEW), [1, 7, 16, 4], strict=True)]


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("depth", [1, 3, 7])
@pytest.mark.parametrize("drop_below", [0.0, 1.0])
def test_end_of_sequence_inside_the_accepted_block_cuts_there(
    monkeypatch: pytest.MonkeyPatch,
    target: Target,
    texts: list[list[int]],
    place: int,
    depth: int,
    drop_below: float,
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", drop_below)
    ends = sorted({cut(texts, NEW)[0][place], cut(texts, NEW)[1][place + 1]})
    engine = SpeculativeEngine(target, oracle_drafter(texts, depth))
    state = engine.prefill(PROMPTS, DecodingRules(NEW, ends))
    while not state.done:
        assert torch.equal(state.cache.lengths, state.lengths - 1)
        assert torch.equal(state.cache.valid.sum(1), state.cache.lengths)
        engine.step(state)
    assert state.outputs == plain_generate(target, PROMPTS, DecodingRules(NEW, ends))
    assert [row[-1] in ends for row in state.outputs] == [reason == "stop" for reason in state.finish_reasons]
    assert "stop" in state.finish_reasons


def test_end_of_sequence_on_the_last_allowed_token_counts_as_a_stop(target: Target, texts: list[list[int]]) -> None:
    last = cut(texts, NEW)[0][5]
    assert last not in cut(texts, NEW)[0][:5]
    state = SpeculativeEngine(target, oracle_drafter(texts, 3)).generate(PROMPTS[:1], DecodingRules(6, [last]))
    assert state.finish_reasons == ["stop"]


def test_end_of_sequence_beyond_the_last_allowed_token_is_no_stop(target: Target, texts: list[list[int]]) -> None:
    beyond = cut(texts, NEW)[0][5]
    # the second row may grow further, so the tree reaches beyond the first row's limit
    state = SpeculativeEngine(target, oracle_drafter(texts, 7)).generate(PROMPTS[:2], DecodingRules([5, NEW], [beyond]))
    assert state.outputs[0] == cut(texts, 5)[0]
    assert state.finish_reasons[0] == "length"


def test_row_whose_first_token_ends_it_takes_no_step(target: Target, texts: list[list[int]]) -> None:
    state = SpeculativeEngine(target, oracle_drafter(texts, 3)).generate(
        PROMPTS[:1], DecodingRules(NEW, [cut(texts, 1)[0][0]])
    )
    assert state.outputs == cut(texts, 1)[:1]
    assert state.stats.target_passes == 0


@pytest.mark.parametrize("drop_below", [0.0, 1.0])
@pytest.mark.parametrize("compact", [(1, 1.0), (1, 0.6), (1000, 1.0)])
def test_dropping_finished_rows_and_compacting_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    engine: SpeculativeEngine,
    texts: list[list[int]],
    drop_below: float,
    compact: tuple[int, float],
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", drop_below)
    monkeypatch.setattr(engine_module, "COMPACT_EVERY", compact[0])
    monkeypatch.setattr(engine_module, "COMPACT_BELOW", compact[1])
    limits = [3, 12, NEW, 9]
    state, batches = engine.prefill(PROMPTS, DecodingRules(limits)), set()
    while not state.done:
        batches.add(len(state.order))
        if compact == (1, 1.0):
            assert state.cache.columns == int(state.cache.lengths.max())
        engine.step(state)
    assert state.outputs == [row[:n] for row, n in zip(cut(texts, NEW), limits, strict=True)]
    assert batches == ({4} if drop_below == 0.0 else {4, 3, 2, 1})


def test_stream_yields_the_prefills_token_and_then_each_steps(
    engine: SpeculativeEngine, texts: list[list[int]]
) -> None:
    pieces = list(engine.stream(engine.prefill(PROMPTS, DecodingRules(NEW))))
    assert [len(row) for row in pieces[0]] == [1] * 4
    assert [[token for piece in pieces for token in piece[row]] for row in range(4)] == cut(texts, NEW)
    assert max(len(row) for piece in pieces[1:] for row in piece) == 4


class _Watcher(ScriptedDrafter):
    """Keeps the requests it was given."""

    requests: list[DraftRequest]

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        self.requests.append(request)
        return super().propose(state, target, request)  # type: ignore[arg-type]


def test_request_tells_the_drafter_budget_roots_active_rows_and_the_noise(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", 0.0)
    told = own_text(target, PROMPTS, NEW + 8, do_sample=True, seed=3)
    watcher = _Watcher(told, [1], BUSHY)
    watcher.requests = []
    engine = SpeculativeEngine(target, watcher, max_nodes=4)
    state = engine.generate(PROMPTS, DecodingRules([2, 8, 8, 8], do_sample=True, seed=3))
    assert state.outputs == [row[:n] for row, n in zip(cut(told, NEW), [2, 8, 8, 8], strict=True)]
    requests = watcher.requests
    assert [request.max_depth for request in requests] == [6, 4, 2]
    assert {request.max_nodes for request in requests} == {4}
    assert requests[0].root_positions.tolist() == [9, 3, 14, 5]
    assert [request.active.tolist()[0] for request in requests] == [True, False, False]
    noise = requests[0].sampling.noise
    assert noise is not None and noise.keys.shape == (4,)
    assert (state.stats.nodes, state.stats.target_passes) == (4 * 3 + 1, 4), "one token is left: no tree is asked for"


def test_budget_of_a_step_is_that_of_the_rows_still_running(
    monkeypatch: pytest.MonkeyPatch, target: Target, texts: list[list[int]]
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", 0.0)
    watcher = _Watcher(texts, [0], BUSHY)
    watcher.requests = []
    engine = SpeculativeEngine(target, watcher)
    state = engine.prefill(PROMPTS[:2], DecodingRules([NEW, 4]))
    engine.stop(state, [0], "enough")
    while not state.done:
        engine.step(state)
    assert [request.max_depth for request in watcher.requests] == [2, 1]


@pytest.mark.parametrize("drop_below", [0.0, 1.0])
def test_row_stopped_between_steps_keeps_what_it_has_and_disturbs_no_other(
    monkeypatch: pytest.MonkeyPatch, engine: SpeculativeEngine, texts: list[list[int]], drop_below: float
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", drop_below)
    state = engine.prefill(PROMPTS, DecodingRules([NEW, NEW, 1, NEW]))
    engine.step(state)
    before = [list(row) for row in state.outputs]
    engine.stop(state, [1, 2], "enough")
    while not state.done:
        engine.step(state)
    assert state.finish_reasons == ["length", "enough", "length", "length"]
    assert state.outputs[1] == before[1] and len(before[1]) < NEW
    assert [state.outputs[row] for row in (0, 3)] == [cut(texts, NEW)[row] for row in (0, 3)]


def test_stopping_every_row_ends_the_call(engine: SpeculativeEngine) -> None:
    state = engine.prefill(PROMPTS, DecodingRules(NEW))
    engine.stop(state, range(4), "enough")
    assert state.done and state.finish_reasons == ["enough"] * 4


def test_finished_rows_keep_nothing_of_the_tree(
    monkeypatch: pytest.MonkeyPatch, target: Target, texts: list[list[int]]
) -> None:
    monkeypatch.setattr(engine_module, "DROP_BELOW", 0.0)
    engine = SpeculativeEngine(target, RandomDrafter(texts))
    state = engine.prefill(PROMPTS, DecodingRules([3, NEW, NEW, NEW]))
    while not state.done:
        before = state.lengths.clone(), state.cache.lengths.clone()
        asleep = ~state.active
        engine.step(state)
        assert torch.equal(state.lengths[asleep], before[0][asleep])
        assert torch.equal(state.cache.lengths[asleep], before[1][asleep])
    assert state.outputs == [row[:n] for row, n in zip(cut(texts, NEW), [3, NEW, NEW, NEW], strict=True)]


def test_statistics_do_not_depend_on_how_much_room_other_rows_have(target: Target, texts: list[list[int]]) -> None:
    budgets, apart = [3, NEW, 4, NEW - 1], GenerationStats()
    together = SpeculativeEngine(target, oracle_drafter(texts, 4)).generate(PROMPTS, DecodingRules(budgets)).stats
    for row, (prompt, budget) in enumerate(zip(PROMPTS, budgets, strict=True)):
        alone = SpeculativeEngine(target, oracle_drafter(texts[row:], 4))
        apart.merge(alone.generate([prompt], DecodingRules(budget)).stats)
    assert (together.tokens, together.row_steps) == (apart.tokens, apart.row_steps)
    assert (together.reached, together.accepted) == (apart.reached, apart.accepted)


def test_statistics_of_a_drafter_that_is_never_right_show_it(target: Target, texts: list[list[int]]) -> None:
    stats = (
        SpeculativeEngine(target, ScriptedDrafter(texts, [0], TreeTopology.chain(3)))
        .generate(PROMPTS, DecodingRules(NEW))
        .stats
    )
    assert stats.acceptance_by_depth == [0.0, 0.0, 0.0]
    assert set(stats.seconds) == {"draft", "target", "verify", "commit"}
    assert min(stats.seconds.values()) > 0
    assert stats.prefill_seconds > 0
