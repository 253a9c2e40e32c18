"""Topologies and trees: order, depth, ancestors, cutting, filling."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.tree import TopologyBuilder, TreeTopology, chain, from_beams, from_parents, root_only

# A tree whose tensors are worked out by hand: root, its three best children, and two children of the best one.
FIVE = TreeTopology.from_paths([(0, 0), (0,), (1,), (0, 1), (2,)])


def test_nodes_are_ordered_by_depth_and_then_by_path() -> None:
    assert FIVE.paths() == [[0], [1], [2], [0, 0], [0, 1]]
    assert FIVE.parents == (-1, 0, 0, 0, 1, 1)
    assert FIVE.ranks == (-1, 0, 1, 2, 0, 1)
    assert FIVE.depths == (0, 1, 1, 1, 2, 2)
    assert (FIVE.num_nodes, FIVE.depth, FIVE.width) == (6, 2, 3)


def test_mask_rows_of_the_worked_tree_show_the_root_the_ancestors_and_the_node_itself() -> None:
    tree = from_parents(torch.arange(6)[None], torch.tensor([FIVE.parents]))
    rows = ["".join(str(int(seen)) for seen in row) for row in tree.ancestors[0]]
    assert rows == ["100000", "110000", "101000", "100100", "110010", "110001"]
    assert tree.depth.tolist() == [[0, 1, 1, 1, 2, 2]]
    assert tree.max_depth == 2
    assert bool(tree.valid.all())


def test_every_node_takes_the_candidate_of_its_depth_and_rank() -> None:
    root, ranked = torch.tensor([50, 51]), torch.tensor([[[1, 2, 3], [4, 5, 6]], [[11, 12, 13], [14, 15, 16]]])
    tree = TopologyBuilder(FIVE, torch.device("cpu")).build(root, ranked)
    assert tree.tokens.tolist() == [[50, 1, 2, 3, 4, 5], [51, 11, 12, 13, 14, 15]]
    assert tree.parents.tolist() == [list(FIVE.parents)] * 2
    assert tree.ancestors.shape == (2, 6, 6) and bool(tree.valid.all())


def test_chain_hangs_each_draft_token_under_the_one_before() -> None:
    tree = chain(torch.tensor([9]), torch.tensor([[1, 2, 3]]))
    assert tree.tokens.tolist() == [[9, 1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2]]
    assert torch.equal(tree.ancestors[0], torch.ones(4, 4).tril().bool())
    assert TreeTopology.chain(3).paths() == [[0], [0, 0], [0, 0, 0]]


def test_chain_without_draft_tokens_is_a_lone_root() -> None:
    lone, drafts = root_only(torch.tensor([9, 8])), torch.zeros(2, 0, dtype=torch.long)
    for tree in (lone, chain(torch.tensor([9, 8]), drafts)):
        assert tree.tokens.tolist() == [[9], [8]]
        assert tree.max_depth == 0 and bool(tree.ancestors.all()) and tree.parents.tolist() == [[-1], [-1]]
    assert TreeTopology.chain(0).width == 0


def test_rows_left_with_their_root_lose_every_draft_token_and_others_none() -> None:
    valid = torch.tensor([[True, True, False], [True, True, False]])
    tree = from_parents(torch.arange(6).view(2, 3), torch.tensor([[-1, 0, 0]] * 2), valid)
    assert tree.only_root(torch.tensor([True, False])).valid.tolist() == [[True, False, False], [True, True, False]]


@pytest.mark.parametrize(
    ("max_nodes", "max_depth", "left"),
    [
        (None, None, 5),
        (4, None, 3),
        (None, 1, 3),
        (5, 1, 3),
        (3, 9, 2),
        (1, None, 0),
        (0, None, 0),
        (None, 0, 0),
        (99, 99, 5),
    ],
)
def test_cut_keeps_the_first_nodes_within_the_budget(max_nodes: int | None, max_depth: int | None, left: int) -> None:
    assert FIVE.cut(max_nodes, max_depth).paths() == FIVE.paths()[:left]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (1, 0)], r"\[1, 0\] is there, \[1\] is not"),
        ([(0,), (0,)], "stands twice"),
        ([()], "non-empty"),
        ([(0,), (-1,)], "ranks >= 0"),
    ],
)
def test_paths_that_make_no_tree_are_refused(paths: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeTopology.from_paths(paths)


@st.composite
def topologies(draw: st.DrawFn) -> TreeTopology:
    """Draw a topology by adding one child after another under any node that is there."""
    children: dict[tuple[int, ...], int] = {(): 0}
    for choice in draw(st.lists(st.integers(0, 10**6), max_size=20)):
        parent = sorted(children)[choice % len(children)]
        children[(*parent, children[parent])] = 0
        children[parent] += 1
    return TreeTopology.from_paths(path for path in children if path)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(topologies(), st.randoms(use_true_random=False))
def test_tree_and_paths_say_the_same(topology: TreeTopology, random) -> None:
    paths = [(), *(tuple(path) for path in topology.paths())]
    shuffled = paths[1:]
    random.shuffle(shuffled)
    assert TreeTopology.from_paths(shuffled) == topology
    tree = from_parents(torch.zeros(1, topology.num_nodes, dtype=torch.long), torch.tensor([topology.parents]))
    assert tree.depth[0].tolist() == list(topology.depths) == [len(path) for path in paths]
    assert tree.max_depth == topology.depth
    for node, path in enumerate(paths):
        assert topology.parents[node] < node or node == 0
        seen = {paths[other] for other in tree.ancestors[0, node].nonzero()[:, 0].tolist()}
        assert seen == {path[:depth] for depth in range(len(path) + 1)}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(topologies(), st.integers(0, 25), st.integers(0, 8))
def test_cut_topology_is_a_tree_within_its_budget(topology: TreeTopology, max_nodes: int, max_depth: int) -> None:
    cut = topology.cut(max_nodes, max_depth)
    assert TreeTopology.from_paths(cut.paths()) == cut
    assert cut.num_nodes <= max(1, max_nodes) and cut.depth <= max_depth
    fitting = [path for path in topology.paths() if len(path) <= max_depth]
    assert cut.paths() == fitting[: max(0, max_nodes - 1)]


def test_beams_are_folded_into_a_prefix_tree() -> None:
    a, b, c, d, e, f = range(1, 7)
    tree = from_beams(torch.tensor([9]), torch.tensor([[[a, b, c], [a, b, d], [a, e, f]]]))
    assert tree.tokens[0].tolist() == [9, a, b, c, d, e, f]
    assert tree.parents[0].tolist() == [-1, 0, 1, 2, 2, 1, 5]
    assert tree.depth[0].tolist() == [0, 1, 2, 3, 3, 2, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 10**6))
def test_folded_beams_hold_every_beginning_once_in_every_row(rows: int, width: int, length: int, seed: int) -> None:
    beams = torch.randint(3, (rows, width, length), generator=torch.Generator().manual_seed(seed))
    tree = from_beams(torch.zeros(rows, dtype=torch.long), beams)
    for row, told in enumerate(beams.tolist()):
        expected = {tuple(beam[:k]) for beam in told for k in range(1, length + 1)}
        found = []
        for node in range(1, tree.tokens.shape[1]):
            if bool(tree.valid[row, node]):
                path = tree.ancestors[row, node].nonzero()[1:, 0]
                found.append(tuple(tree.tokens[row, path].tolist()))
        assert len(found) == len(set(found)) and set(found) == expected
