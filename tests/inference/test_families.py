"""The contract matrix: what must hold for every family of targets, window or not."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_drafters import BUSHY, RandomDrafter, ScriptedDrafter, oracle_drafter
from tiny_targets import (
    FAMILIES,
    LIMIT,
    committed_state,
    layers_of,
    logit_tolerance,
    own_text,
    path_logits,
    prompts_of,
    tiny_target,
    transformers_text,
)
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headstart.core import hf, masks
from headstart.core.tree import DraftTree, TreeTopology, from_parents
from headstart.drafters.base import Drafter
from headstart.inference.engine import EngineState, SpeculativeEngine
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

PROMPTS, NEW, BEYOND = prompts_of(9, 3, 14), 20, 12
SAMPLED = {"do_sample": True, "seed": 7}


def warpers() -> LogitsProcessorList:
    return LogitsProcessorList(
        [TemperatureLogitsWarper(0.9), TopKLogitsWarper(40), TopPLogitsWarper(0.95), MinPLogitsWarper(0.01)]
    )


@cache
def greedy_text(family: str) -> list[list[int]]:
    return own_text(tiny_target(family), PROMPTS, NEW + BEYOND)


@cache
def sampled_text(family: str) -> list[list[int]]:
    return own_text(tiny_target(family), PROMPTS, NEW + BEYOND, processors=warpers(), **SAMPLED)


def drafters_for(texts: list[list[int]]) -> list[Drafter | None]:
    """Return one drafter of each kind: none, always right, scripted in chains and trees, random."""
    return [
        None,
        oracle_drafter(texts, 4),
        ScriptedDrafter(texts, [0, 1, 2, 3, 2], TreeTopology.chain(3)),
        ScriptedDrafter(texts, [3, 0, 2, 1], BUSHY, TreeTopology.chain(2), TreeTopology.chain(0), BUSHY),
        RandomDrafter(texts),
    ]


def new_tokens(texts: list[list[int]]) -> list[list[int]]:
    return [text[len(prompt) : len(prompt) + NEW] for text, prompt in zip(texts, PROMPTS, strict=True)]


def test_logits_made_from_final_states_are_the_models_own(family_target: Target) -> None:
    tokens = torch.tensor(prompts_of(14, 14))
    with torch.inference_mode():
        own = family_target.model(input_ids=tokens).logits
        out = family_target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ())
        torch.testing.assert_close(family_target.logits(out.final), own, rtol=0, atol=logit_tolerance(family_target))


def test_features_are_the_raw_outputs_of_the_blocks_and_the_state_after_the_final_norm(family_target: Target) -> None:
    tokens = torch.tensor(prompts_of(14))
    with torch.inference_mode():
        states = family_target.model(input_ids=tokens, output_hidden_states=True).hidden_states
        out = family_target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), (0, "final"))
    torch.testing.assert_close(out.features[:, :, 0], states[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(out.features[:, :, 1], states[-1], rtol=0, atol=1e-6)
    torch.testing.assert_close(out.features[:, :, 1], out.final, rtol=0, atol=0)


def test_plain_text_equals_the_text_of_transformers(family: str) -> None:
    target = tiny_target(family)
    expected = [transformers_text(target, prompt, NEW) for prompt in PROMPTS]
    assert new_tokens(greedy_text(family)) == expected


@pytest.mark.parametrize("kind", ["none", "oracle", "chain", "trees", "random"])
def test_greedy_text_with_any_drafter_equals_plain_text(family: str, kind: str) -> None:
    texts = greedy_text(family)
    drafter = drafters_for(texts)[["none", "oracle", "chain", "trees", "random"].index(kind)]
    state = SpeculativeEngine(tiny_target(family), drafter).generate(PROMPTS, DecodingRules(NEW))
    assert state.outputs == new_tokens(texts)


@pytest.mark.parametrize("kind", ["none", "oracle", "trees", "random"])
def test_sampled_text_with_any_drafter_equals_plain_text_of_the_same_seed(family: str, kind: str) -> None:
    texts = sampled_text(family)
    drafter = drafters_for(texts)[["none", "oracle", "chain", "trees", "random"].index(kind)]
    state = SpeculativeEngine(tiny_target(family), drafter).generate(
        PROMPTS, DecodingRules(NEW, processors=warpers(), **SAMPLED)
    )
    assert state.outputs == new_tokens(texts)
    assert texts != greedy_text(family)


def test_script_decides_how_many_nodes_each_step_accepts(family: str) -> None:
    texts = greedy_text(family)
    drafter = ScriptedDrafter(texts, [3, 0, 2, 1], BUSHY, TreeTopology.chain(2))
    state = SpeculativeEngine(tiny_target(family), drafter).generate(PROMPTS, DecodingRules(NEW))
    assert state.draft is not None
    for row in range(3):
        steps = [(promised, kept) for r, promised, kept in state.draft.log if r == row]  # type: ignore[attr-defined]
        *whole, (promised, kept) = steps
        assert all(promised == kept for promised, kept in whole)
        assert kept <= promised, "only a row's last step may be cut short"
        assert {kept for _, kept in whole} == {0, 1, 2, 3}


def branching_tree(seed: int) -> DraftTree:
    """Two rows of nine nodes in different shapes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 64, (2, 9), generator=generator)
    return from_parents(tokens, torch.tensor([[-1, 0, 0, 0, 1, 1, 2, 4, 6], [-1, 0, 1, 2, 3, 0, 5, 6, 7]]))


@torch.inference_mode()
def run_behind_ragged_cache(target: Target, tree: DraftTree) -> tuple[list[list[int]], Tensor]:
    """Run a tree behind rows of lengths 8 and 4 that have holes; return the rows' tokens and the nodes' logits."""
    committed: list[list[int]] = [[], []]
    cache = target.new_cache(2)
    generator = torch.Generator().manual_seed(3)
    for nodes, lengths in [
        ([[0, 1, 2], [0, 1, 0]], [3, 2]),
        ([[0, 2, 3, 4], [1, 0, 0, 0]], [4, 1]),
        ([[0], [0]], [1, 1]),
    ]:
        kept = torch.tensor(nodes)
        block = torch.randint(1, 64, (2, int(kept.max()) + 1), generator=generator)
        path = torch.zeros(2, block.shape[1], block.shape[1], dtype=torch.bool)
        positions = torch.zeros_like(block)
        for row, (path_nodes, length) in enumerate(zip(nodes, lengths, strict=True)):
            for depth, node in enumerate(path_nodes[:length]):
                path[row, node, path_nodes[: depth + 1]] = True
                positions[row, node] = len(committed[row]) + depth
            committed[row] += block[row, path_nodes[:length]].tolist()
        path |= torch.eye(block.shape[1], dtype=torch.bool)
        target.forward(block, positions, path, cache, ())
        cache.commit(kept, torch.tensor(lengths))
    out = target.forward(tree.tokens, cache.lengths[:, None] + tree.depth, tree.ancestors, cache, ())
    return committed, target.logits(out.final)


def test_logits_of_every_node_equal_those_of_its_own_path(family_target: Target) -> None:
    tree = branching_tree(1)
    committed, logits = run_behind_ragged_cache(family_target, tree)
    assert [len(row) for row in committed] == [8, 4]
    for row in range(2):
        for node in range(9):
            path = tree.tokens[row][tree.ancestors[row, node]].tolist()
            expected = path_logits(family_target, committed[row] + path)[-1]
            torch.testing.assert_close(logits[row, node], expected, rtol=0, atol=logit_tolerance(family_target))


def test_logits_of_a_node_do_not_depend_on_nodes_that_are_not_its_ancestors(family_target: Target) -> None:
    tree = branching_tree(1)
    node = 7
    changed = tree.tokens.clone()
    others = ~tree.ancestors[:, node]
    changed[others] = (changed[others] + 5) % 64
    _, before = run_behind_ragged_cache(family_target, tree)
    _, after = run_behind_ragged_cache(family_target, from_parents(changed, tree.parents))
    torch.testing.assert_close(after[:, node], before[:, node], rtol=0, atol=1e-12)
    assert (after - before).abs().amax() > 1e-3


def check_committed_state(target: Target, state: EngineState, texts: list[list[int]]) -> None:
    """Hold invariants 1 and 5, and the cache against a fresh pass over each row's committed tokens."""
    cache = state.cache
    assert torch.equal(cache.lengths, state.lengths - 1)
    assert torch.equal(cache.valid.sum(1), cache.lengths)
    for i, row in enumerate(state.order):
        count = int(state.lengths[i])
        assert count == len(PROMPTS[row]) + len(state.outputs[row])
        assert state.tokens[i, :count].tolist() == texts[row][:count]
        columns = cache.valid[i]
        assert cache.positions[i, columns].tolist() == list(range(count - 1))
        keys, values = committed_state(target, texts[row][: count - 1])
        for layer, key, value in zip(layers_of(cache), keys, values, strict=True):
            tolerance = logit_tolerance(target)
            torch.testing.assert_close(layer.keys[i, :, : len(columns)][:, columns], key, rtol=0, atol=tolerance)
            torch.testing.assert_close(layer.values[i, :, : len(columns)][:, columns], value, rtol=0, atol=tolerance)


def test_cache_holds_exactly_the_committed_tokens_after_every_step(family: str) -> None:
    target, texts = tiny_target(family), greedy_text(family)
    drafter = ScriptedDrafter(texts, [3, 0, 2, 1], BUSHY, TreeTopology.chain(2))
    engine = SpeculativeEngine(target, drafter)
    state = engine.prefill(PROMPTS, DecodingRules([NEW, NEW - 8, NEW]))
    steps = 0
    while not state.done:
        check_committed_state(target, state, texts)
        engine.step(state)
        steps += 1
    assert 5 <= steps < NEW


def test_drafter_observes_what_was_committed_with_the_features_that_read_it(family: str) -> None:
    target, texts = tiny_target(family), greedy_text(family)
    drafter = ScriptedDrafter(texts, [3, 0, 2, 1], BUSHY, TreeTopology.chain(2))
    state = SpeculativeEngine(target, drafter).generate(PROMPTS, DecodingRules(NEW))
    expected = []
    for text in texts:
        tokens = torch.tensor([text])
        with torch.inference_mode():
            expected.append(target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), (0, "final")).features[0])
    read_so_far = [0, 0, 0]
    for rows, observed in state.draft.seen:  # type: ignore[union-attr]
        for i, row in enumerate(rows.tolist()):
            length, start = int(observed.lengths[i]), read_so_far[row]
            assert observed.read_tokens[i, :length].tolist() == texts[row][start : start + length]
            assert observed.next_tokens[i, :length].tolist() == texts[row][start + 1 : start + length + 1]
            assert observed.positions[i, :length].tolist() == list(range(start, start + length))
            torch.testing.assert_close(
                observed.features[i, :length], expected[row][start : start + length], rtol=0, atol=1e-5
            )
            read_so_far[row] += length
    assert read_so_far == [len(prompt) + NEW - 1 for prompt in PROMPTS]


def test_rows_may_grow_to_the_last_position_while_others_draft_beyond_it(family: str) -> None:
    target = tiny_target(family)
    prompts, new = prompts_of(LIMIT - 5, 4), [5, 20]
    texts = own_text(target, prompts, 5)[:1] + own_text(target, prompts[1:], 30)
    texts[0] += [1] * 30
    state = SpeculativeEngine(target, oracle_drafter(texts, 9)).generate(prompts, DecodingRules(new))
    assert state.outputs == [texts[0][LIMIT - 5 : LIMIT], texts[1][4:24]]
    assert transformers_text(target, prompts[0], 5) == state.outputs[0]


def test_windows_of_the_matrix_are_seen(family: str) -> None:
    window = hf.window_of(tiny_target(family).model)
    assert window == (FAMILIES[family][1]["sliding_window"] if "window" in family else None)


def test_masks_close_positions_outside_the_window() -> None:
    visible = torch.ones(1, 1, 10, dtype=torch.bool)
    positions = torch.arange(10)[None]
    seen = masks.within_window(visible, torch.tensor([[9]]), positions, 4)
    assert seen[0, 0].nonzero()[:, 0].tolist() == [6, 7, 8, 9]
