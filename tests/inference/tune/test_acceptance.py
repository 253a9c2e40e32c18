"""Acceptance counted on the target's own text, and trees replayed over it."""

import pytest
import torch
from tiny_batches import scrambled

from headstart.core.tree import TreeTopology
from headstart.drafters.registry import new_drafter
from headstart.inference.bench.methods import Decoding
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.tree_search import with_topology
from headstart.inference.tune.acceptance import Acceptance, follow, measure_acceptance, wide_topology

TREES = [
    TreeTopology.chain(3),
    TreeTopology.from_paths([(0,), (1,), (2,), (3,), (4,), (0, 0), (0, 2), (3, 4), (3, 1), (3, 4, 0)]),
    TreeTopology.from_paths([(2,)]),
]
SEEDS = [3, 4, 5, 6]


def measured_by_the_engine(target, drafter, prompts, decoding, tree):
    engine = SpeculativeEngine(target, with_topology(drafter, tree))
    return engine.generate(prompts, decoding.rules(SEEDS)).stats.tokens_per_step


@pytest.mark.parametrize("tree", TREES, ids=["chain", "bushy", "one"])
def test_replayed_tree_takes_exactly_the_steps_of_real_decoding(target, drafter, prompts, tree):
    decoding = Decoding(20)
    acceptance = measure_acceptance(target, drafter, prompts, decoding, SEEDS, batch_size=3, progress=False)
    assert acceptance.tokens_per_step(tree) == measured_by_the_engine(target, drafter, prompts, decoding, tree)


def test_replay_is_exact_where_the_text_ends_inside_a_tree(target, drafter, prompts):
    texts = SpeculativeEngine(target, None).generate(prompts, Decoding(20).rules(0)).outputs
    ends = tuple({text[place] for text, place in zip(texts, (4, 7, 9, 19), strict=True)})
    acceptance = measure_acceptance(target, drafter, prompts, Decoding(20, ends), SEEDS, progress=False)
    assert acceptance.positions < 4 * 19
    for tree in TREES:
        ours = measured_by_the_engine(target, drafter, prompts, Decoding(20, ends), tree)
        assert acceptance.tokens_per_step(tree) == ours


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_replay_of_learned_heads_is_exact_in_the_law_that_is_served(target, prompts, temperature):
    heads = scrambled(new_drafter("medusa", target, num_heads=3))
    decoding = Decoding(20, temperature=temperature)
    acceptance = measure_acceptance(target, heads, prompts, decoding, SEEDS, progress=False)
    rates = [acceptance.tokens_per_step(tree) for tree in TREES]
    assert rates == [measured_by_the_engine(target, heads, prompts, decoding, tree) for tree in TREES]
    assert max(rates) > 1, "nothing was right: the test could not fail"


def test_drafter_keeps_its_own_tree(target, drafter, prompts):
    before = drafter.topology
    measure_acceptance(target, drafter, prompts, Decoding(4), SEEDS, progress=False)
    assert drafter.topology == before and drafter.config.topology == before.paths()


def test_text_is_followed_until_it_leaves_the_tree():
    tree = TreeTopology.from_paths([(0,), (1,), (0, 0), (1, 0)])
    proposed = [torch.tensor([5, 9, 7, 3, 8]), torch.tensor([7, 8, 4, 6, 2]), torch.tensor([8, -1, -1, -1, -1])]
    # step 0: 7 is the second child, and 8 its child; step 1: 8 is the first child, and nothing follows it in the text
    assert follow(tree, proposed, [5, 7, 8, 1]).tolist() == [[1, 0], [0, -1], [-1, -1]]
    assert follow(tree, [], [5]).shape == (0, 2)


def test_only_nodes_whose_parent_was_right_count_as_reached():
    tree = TreeTopology.from_paths([(0,), (1,), (0, 0), (1, 0), (1, 1)])
    acceptance = Acceptance(tree, [torch.tensor([[1, -1], [0, 0], [-1, -1], [0, -1]])])
    hits, reached = acceptance.counts()
    # Of four steps one was right at rank 1 and two at rank 0. The last step's second depth lies behind the text's end.
    # Rank 1 of depth 2 hangs under the root's second child alone, so only the first step reached it.
    assert hits.tolist() == [[2, 1], [1, 0]] and reached.tolist() == [[4, 4], [2, 1]]
    assert acceptance.table().tolist() == [[0.5, 0.25], [0.5, 0]]


def test_replay_counts_steps_from_root_to_root():
    tree = TreeTopology.from_paths([(0,), (0, 0)])
    acceptance = Acceptance(tree, [torch.tensor([[0, 0], [0, 0], [0, 0], [-1, -1], [0, -1]])])
    assert acceptance.tokens_per_step(tree) == 5 / 3  # steps at 0, 3 and 4
    assert acceptance.tokens_per_step(TreeTopology.chain(1)) == 5 / 3  # steps at 0, 2 and 4
    assert Acceptance(tree, []).tokens_per_step(tree) == 0


def test_wide_tree_holds_the_drafters_own_without_gaps(drafter):
    paths = {tuple(path) for path in wide_topology(drafter, nodes=4).paths()}
    assert {(0,), (1,), (2,), (3,), (0, 0)} <= paths
    assert max(len(path) for path in wide_topology(drafter).paths()) == 3


def test_drafter_that_draws_its_own_trees_is_refused(target, drafter, prompts, monkeypatch):
    from headstart.drafters.base import Drafter

    monkeypatch.setattr(type(drafter), "set_topology", Drafter.set_topology)
    with pytest.raises(ValueError, match="draws its own trees"):
        measure_acceptance(target, drafter, prompts, Decoding(4), SEEDS, progress=False)
