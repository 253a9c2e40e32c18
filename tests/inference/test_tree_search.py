"""Trees from measured acceptance, replayed with a worked example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.tree import TreeTopology
from headstart.drafters.registry import new_drafter
from headstart.inference.target import Target
from headstart.inference.tree_search import (
    best_topology,
    count_ranks,
    expected_accepted,
    rank_table,
    with_topology,
)

TABLE = torch.tensor([[0.60, 0.15, 0.08, 0.04], [0.40, 0.14, 0.09, 0.05], [0.30, 0.12, 0.08, 0.05]])
BEST_FIRST = [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (2, 0), (0, 3), (0, 0, 1)]


@pytest.mark.parametrize("nodes", range(2, 14))
def test_most_probable_paths_enter_the_tree_first(nodes: int) -> None:
    paths = {tuple(path) for path in best_topology(TABLE, nodes).paths()}
    assert paths == set(BEST_FIRST[: nodes - 1])


def test_expected_tokens_of_the_worked_example() -> None:
    assert 1 + expected_accepted(TABLE, best_topology(TABLE, 9)) == pytest.approx(2.34)
    assert 1 + expected_accepted(TABLE, best_topology(TABLE, 13)) == pytest.approx(2.4708)


def test_expected_tokens_of_a_chain() -> None:
    assert 1 + expected_accepted(torch.full((5, 1), 0.8), TreeTopology.chain(5)) == pytest.approx(3.6893, abs=5e-5)


def test_ranks_beyond_the_table_are_expected_to_be_wrong() -> None:
    beside = TreeTopology.from_paths([(0,), (9,), (9, 0)])
    assert expected_accepted(TABLE, beside) == pytest.approx(0.60)


def test_depth_is_bounded_when_asked() -> None:
    assert best_topology(TABLE, 13, max_depth=2).depth == 2


def test_tree_has_a_node_even_when_nothing_was_ever_right() -> None:
    assert best_topology(torch.zeros(2, 3), 5).paths() == [[0]]


def test_depth_counts_only_where_the_depths_before_it_were_among_the_candidates() -> None:
    ranks = torch.tensor([[0, 1], [5, 0], [1, -1], [0, -1]])
    labelled = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    hits, reached = count_ranks(ranks, labelled, candidates=2)
    # Row 2 fell out at depth 1; row 3 was reached at depth 2 and its token was no candidate; row 4 has no label there.
    assert hits.tolist() == [[2, 1], [0, 1]]
    assert reached.tolist() == [4, 2]
    assert rank_table(hits, reached).tolist() == [[0.5, 0.25], [0, 0.5]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=3), st.integers(2, 10))
def test_no_single_exchange_of_leaves_improves_the_tree(rows: list[list[float]], nodes: int) -> None:
    table = torch.tensor(rows, dtype=torch.float64)
    table = table / table.sum(1, keepdim=True).clamp(min=1)
    best = best_topology(table, nodes)
    values = {tuple(p): expected_value(table, p) for p in best.paths()}
    inside = set(values)
    outside = [(*parent, r) for parent in [(), *inside] for r in range(3) if len(parent) < len(table)]
    candidates = [expected_value(table, path) for path in outside if path not in inside]
    if len(inside) == nodes - 1 and candidates:
        assert max(candidates) <= min(values.values()) + 1e-12


def expected_value(table: torch.Tensor, path: tuple[int, ...] | list[int]) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        value *= float(table[depth, rank])
    return value


def test_twin_shares_weights_and_leaves_the_drafter_its_tree(target: Target) -> None:
    heads = new_drafter("medusa", target, num_heads=2)
    before = heads.topology
    twin = with_topology(heads, TreeTopology.chain(4))
    assert twin.topology == TreeTopology.chain(2), "a chain as long as there are heads"
    assert heads.topology == before and heads.config.topology is None
    assert all(a is b for a, b in zip(heads.parameters(), twin.parameters(), strict=True))
