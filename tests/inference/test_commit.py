"""What a step leaves in the cache: accepted nodes where they lie, if they may; and no holes in a single row."""

from __future__ import annotations

import pytest
from tiny_drafters import BUSHY, ScriptedDrafter
from tiny_targets import own_text, prompts_of, tiny_target

from headstart.core.kv_cache import RaggedCache
from headstart.core.tree import TreeTopology
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

NEW = 21
PROMPTS = prompts_of(5, 9, 3, 7)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def texts(target: Target) -> list[list[int]]:
    return own_text(target, PROMPTS, NEW + 8)


@pytest.mark.parametrize(
    ("accepts", "shape", "moves"),
    [
        ([0], BUSHY, False),  # the root alone
        ([4], TreeTopology.chain(4), False),
        ([1], TreeTopology.from_paths([(0,), (0, 0), (0, 1)]), False),  # the root's best child
        ([1], TreeTopology.from_paths([(0,), (1,)]), True),  # its second child
    ],
)
def test_nodes_that_lie_where_they_belong_are_not_moved(target, texts, monkeypatch, accepts, shape, moves):
    moved, commit = [], RaggedCache.commit

    def spied(cache, nodes, lengths):
        moved.append(nodes.tolist())
        commit(cache, nodes, lengths)

    monkeypatch.setattr(RaggedCache, "commit", spied)
    state = SpeculativeEngine(target, ScriptedDrafter(texts, accepts, shape)).generate(PROMPTS, DecodingRules(NEW))
    assert state.outputs == [text[len(p) : len(p) + NEW] for text, p in zip(texts, PROMPTS, strict=True)]
    assert bool(moved) is moves


def test_one_row_that_must_be_moved_moves_all(target, texts, monkeypatch):
    moved, commit = [], RaggedCache.commit
    monkeypatch.setattr(RaggedCache, "commit", lambda cache, *told: (moved.append(told), commit(cache, *told)))
    shapes = TreeTopology.from_paths([(0,), (1,)]), TreeTopology.from_paths([(0,)])
    state = SpeculativeEngine(target, ScriptedDrafter(texts, [1, 1], *shapes)).generate(PROMPTS, DecodingRules(NEW))
    assert state.outputs == [text[len(p) : len(p) + NEW] for text, p in zip(texts, PROMPTS, strict=True)]
    assert moved


def test_holes_are_counted_in_the_statistics(target, texts):
    shapes = BUSHY, TreeTopology.chain(2)
    state = SpeculativeEngine(target, ScriptedDrafter(texts, [3, 0, 2, 1], *shapes)).generate(
        PROMPTS, DecodingRules(NEW)
    )
    assert state.stats.cache_columns == state.cache.columns
    assert state.stats.retained_columns == pytest.approx(state.cache.valid.sum(1).float().mean().item())
    assert state.stats.wasted_columns > 0


def test_single_row_has_no_holes(target, texts):
    state = SpeculativeEngine(target, ScriptedDrafter(texts, [3, 0, 1], BUSHY)).generate(
        PROMPTS[:1], DecodingRules(NEW)
    )
    assert bool(state.cache.valid.all())
    assert state.stats.wasted_columns == 0
