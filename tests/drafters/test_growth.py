"""Trees from laws: static and dynamic, for laws that depend on the path."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tiny_batches import scrambled
from tiny_targets import prompts_of, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList

from headstart import build_drafter
from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.proposals import candidates
from headstart.core.sampling import Sampling
from headstart.core.tree import DraftTree, DynamicTree, TreeTopology
from headstart.drafters.base import DraftRequest
from headstart.drafters.growth import Level, grow, static_tree
from headstart.drafters.modules import DraftVocabulary
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.verify import Prefixes, Question, SpeculativeSampling

V, ROWS = 7, 3
BUSH = TreeTopology.from_paths([(0,), (1,), (2,), (0, 0), (0, 2), (2, 0), (2, 0, 0), (2, 0, 1), (0, 2, 0)])


def request_of(proposal: str, sampled: bool, rows: int = ROWS) -> DraftRequest:
    noise = KeyedNoise(request_keys(5, rows, torch.device("cpu")), V) if sampled else None
    positions = torch.arange(rows) + 4
    active = torch.ones(rows, dtype=torch.bool)
    return DraftRequest(Sampling(LogitsProcessorList(), noise), positions, active, proposal=proposal)


class Markov:
    """A law that depends on the node's token and depth; notes what it was asked."""

    def __init__(self, seed: int = 0) -> None:
        self.table = torch.randn(4, V, V, generator=torch.Generator().manual_seed(seed)) * 1.5
        self.asked: list[Level] = []

    def __call__(self, level: Level) -> Tensor:
        self.asked.append(level)
        return self.table[level.depth][level.tokens]


def children_of(tree: DraftTree, row: int, node: int) -> list[int]:
    return [i for i, parent in enumerate(tree.parents[row].tolist()) if parent == node and bool(tree.valid[row, i])]


@pytest.mark.parametrize("proposal", ["top_k", "shared_noise", "sampled", "sampled_iid"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_level_by_level_gives_the_crossed_tree_where_laws_depend_on_the_depth_alone(
    proposal: str, sampled: bool
) -> None:
    scores = torch.randn(ROWS, 3, V, generator=torch.Generator().manual_seed(1))
    request, root, vocabulary = request_of(proposal, sampled), torch.tensor([1, 2, 3]), DraftVocabulary(None, V)
    ahead = request.root_positions[:, None] + 1 + torch.arange(3)
    crossed = static_tree(BUSH, root, candidates(scores, 3, proposal, request.sampling, ahead, None), vocabulary)
    grown = grow(BUSH, root, lambda level: scores[:, level.depth, None].expand(-1, level.tokens.shape[1], -1),
                 request, vocabulary)  # fmt: skip
    for name in ("tokens", "parents", "valid", "depth", "ancestors"):
        assert torch.equal(getattr(grown, name), getattr(crossed, name)), name
    assert (grown.drawn is None) == (crossed.drawn is None)
    if grown.drawn is not None and crossed.drawn is not None:
        rows = torch.arange(ROWS)[:, None]
        mine, theirs = grown.drawn.law[rows, grown.drawn.group], crossed.drawn.law[rows, crossed.drawn.group]
        assert torch.equal(mine[:, 1:], theirs[:, 1:])


def test_static_tree_takes_the_ranked_children_of_every_nodes_own_law() -> None:
    laws, root = Markov(), torch.tensor([1, 2, 3])
    tree = grow(BUSH, root, laws, request_of("top_k", False), DraftVocabulary(None, V))
    for row in range(ROWS):
        for node in range(1, BUSH.num_nodes):
            parent, depth = BUSH.parents[node], BUSH.depths[node]
            order = laws.table[depth - 1, tree.tokens[row, parent]].argsort(descending=True)
            assert tree.tokens[row, node] == order[BUSH.ranks[node]]


def test_levels_tell_parents_and_ancestors_among_what_was_asked() -> None:
    laws, root = Markov(), torch.tensor([1, 2, 3])
    grow(BUSH, root, laws, request_of("top_k", False), DraftVocabulary(None, V))
    first, second, third = laws.asked
    assert [level.tokens.shape[1] for level in laws.asked] == [1, 2, 2], "only nodes with children are asked for"
    assert second.parents.tolist() == [[0, 0]] * ROWS and third.parents.tolist() == [[0, 1]] * ROWS
    assert first.ancestors[0].int().tolist() == [[1]]
    assert second.ancestors[0].int().tolist() == [[1, 1, 0], [1, 0, 1]]
    assert third.ancestors[0].int().tolist() == [[1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def test_topology_that_was_planned_in_inference_mode_serves_outside_of_it() -> None:
    topology, weight = TreeTopology.from_paths([(0,), (6,), (6, 0)]), torch.ones(1, requires_grad=True)
    root, vocabulary = torch.tensor([1, 2, 3]), DraftVocabulary(None, V)

    def laws(level: Level) -> Tensor:
        return Markov()(level) * weight[level.parents][..., None]

    with torch.inference_mode():
        inside = grow(topology, root, Markov(), request_of("top_k", False), vocabulary)
    assert torch.equal(grow(topology, root, laws, request_of("top_k", False), vocabulary).tokens, inside.tokens)


@pytest.mark.parametrize("nodes", [2, 5, 9, 40])
def test_dynamic_tree_holds_the_most_probable_paths(nodes: int) -> None:
    laws, root = Markov(2), torch.tensor([1, 2, 3])
    tree = grow(DynamicTree(nodes, 3, V), root, laws, request_of("top_k", False), DraftVocabulary(None, V))
    logs = laws.table.log_softmax(-1)
    for row in range(ROWS):
        probability = {}
        for depth in (1, 2, 3):
            for path in product(range(V), repeat=depth):
                before = (int(root[row]), *path)
                probability[path] = sum(float(logs[d, before[d], before[d + 1]]) for d in range(depth))
        level = {d: sorted((p for p in probability if len(p) == d), key=lambda p: -probability[p])[:V] for d in (1, 2)}
        scored = [p for p in probability if len(p) == 1 or p[:-1] in level[len(p) - 1]]
        best = sorted(scored, key=lambda p: -probability[p])[: nodes - 1]
        found = []
        for node in range(1, tree.tokens.shape[1]):
            on_path = tree.ancestors[row, node].nonzero()[1:, 0]
            found.append(tuple(tree.tokens[row, on_path].tolist()))
        assert sorted(found) == sorted(best)


def test_dynamic_tree_stays_connected_where_a_child_is_certain() -> None:
    certain = torch.full((V,), -torch.inf)
    certain[3] = 0.0
    request, root = request_of("top_k", False), torch.tensor([1, 2, 3])
    tree = grow(DynamicTree(4, 4, 2), root, lambda level: certain.expand(*level.tokens.shape, V), request,
                DraftVocabulary(None, V))  # fmt: skip
    assert tree.parents[0].tolist() == [-1, 0, 1, 2] and tree.tokens[0, 1:].tolist() == [3, 3, 3]
    wider = grow(DynamicTree(9, 2, 2), root, lambda level: certain.expand(*level.tokens.shape, V), request,
                 DraftVocabulary(None, V))  # fmt: skip
    assert wider.tokens[0][wider.valid[0]].tolist() == [1, 3, 3], "impossible tokens are no nodes"


def test_dynamic_tree_stays_connected_where_values_are_small() -> None:
    """An unlikely first token with certain ones behind it: rounding must not let a child stand beside its parent."""
    first, certain = torch.full((V,), -60.0), torch.full((V,), -torch.inf)
    first[0], certain[3] = 0.0, 0.0

    def laws(level: Level) -> Tensor:
        return (certain if level.depth else first).expand(*level.tokens.shape, V)

    tree = grow(DynamicTree(12, 4, 3), torch.tensor([1, 2, 3]), laws, request_of("top_k", False),
                DraftVocabulary(None, V))  # fmt: skip
    for row in range(ROWS):
        for node in range(1, tree.tokens.shape[1]):
            if bool(tree.valid[row, node]) and int(tree.parents[row, node]) != 0:
                assert tree.tokens[row, node] == 3, "only the certain token has a parent below the root"
        assert int(tree.depth[row][tree.valid[row]].max()) == 4
        roots_children = tree.tokens[row, 1:][(tree.parents[row, 1:] == 0) & tree.valid[row, 1:]].tolist()
        assert len(set(roots_children)) == len(roots_children)


def test_dynamic_tree_stops_where_no_path_is_likely_enough() -> None:
    flat = torch.zeros(V)
    for stop, levels in ((0.0, 3), (0.1, 2), (0.2, 1)):
        laws: list[int] = []

        def law(level: Level, asked: list[int] = laws) -> Tensor:
            asked.append(level.depth)
            return flat.expand(*level.tokens.shape, V)

        grow(DynamicTree(9, 3, 2, stop), torch.tensor([1, 2, 3]), law, request_of("top_k", False),
             DraftVocabulary(None, V))  # fmt: skip
        assert len(laws) == levels


def test_budgets_cut_both_kinds() -> None:
    root, vocabulary = torch.tensor([1, 2, 3]), DraftVocabulary(None, V)
    for shape in (BUSH, DynamicTree(12, 4, 3)):
        plain = request_of("top_k", False)
        small = DraftRequest(plain.sampling, plain.root_positions, plain.active, 4, 2, "top_k")
        tree = grow(shape, root, Markov(), small, vocabulary)
        assert tree.tokens.shape[1] == 4 and tree.max_depth <= 2


@pytest.mark.parametrize("proposal", ["sampled", "sampled_iid"])
def test_trees_drawn_from_laws_of_the_path_keep_the_targets_joint_law(proposal: str) -> None:
    rows, target = 40_000, torch.randn(V, V, generator=torch.Generator().manual_seed(9)) * 1.3
    request = request_of(proposal, True, rows)
    tree = grow(BUSH, torch.ones(rows, dtype=torch.long), Markov(3), request, DraftVocabulary(None, V))
    prefixes = Prefixes(tree.tokens[:, :1], [1] * rows)
    question = Question(tree, target[tree.tokens], request.sampling, request.root_positions, prefixes)
    verdict = SpeculativeSampling().verify(question)
    deep = verdict.lengths >= 2
    second = torch.where(verdict.lengths == 2, verdict.bonus, tree.tokens[torch.arange(rows), verdict.nodes[:, 2]])
    first = torch.where(deep, tree.tokens[torch.arange(rows), verdict.nodes[:, 1]], verdict.bonus)
    expected = target[1].softmax(0) * rows
    counts = torch.bincount(first, minlength=V)
    assert float(((counts - expected) ** 2 / expected).sum()) < 30, "6 degrees of freedom"
    for token in range(V):
        seen = second[deep & (first == token)]
        if len(seen) > 500:
            expected = target[token].softmax(0) * len(seen)
            assert float(((torch.bincount(seen, minlength=V) - expected) ** 2 / expected).sum()) < 30


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_dynamic_trees_change_no_word(do_sample: bool) -> None:
    target, prompts = tiny_target("llama"), prompts_of(6, 3, 9)
    drafter = scrambled(build_drafter("medusa", target.model, num_heads=3))
    drafter.set_dynamic_tree(DynamicTree(8, 5, 3))
    assert drafter.dynamic == DynamicTree(8, 3, 3), "no deeper than there are heads"
    rules = DecodingRules(20, do_sample=do_sample, seed=3)
    state = SpeculativeEngine(target, drafter).generate(prompts, rules)
    assert state.outputs == plain_generate(target, prompts, rules)
    assert max(len(state.stats.accepted), 1) <= 3 and state.stats.nodes <= 8 * state.stats.target_passes
