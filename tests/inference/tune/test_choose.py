"""The choice of a tree, replayed with the worked examples of the speed model."""

import pytest
import torch

from headstart.inference.tree_search import expected_accepted
from headstart.inference.tune.choose import StepCosts, best_of_each_size, choose, judge, reason

HEADS = torch.tensor([[0.60, 0.15, 0.08, 0.04], [0.40, 0.14, 0.09, 0.05], [0.30, 0.12, 0.08, 0.05]])
SIZES = (8, 16, 32, 64, 128)
STAIRCASE = StepCosts(1.0, (1, *SIZES), (1.00, 1.02, 1.05, 1.10, 1.22, 1.60), (0.05,) * 4, 0.0)
TOKENS: dict[int, float] = dict(zip(SIZES, (2.16, 2.37, 2.57, 2.73, 2.87), strict=True))


def by(table):
    return lambda tree: 1 + expected_accepted(table, tree)


def test_best_size_lies_where_the_staircase_outruns_the_tokens():
    wide = 0.9 * torch.full((4, 16), 1 / 16)  # enough candidates for trees of every size
    found = best_of_each_size(wide, STAIRCASE, SIZES, lambda tree: TOKENS.get(tree.num_nodes, 1))
    assert [one.topology.num_nodes for one in found] == list(SIZES)
    assert [one.speedup for one in found] == pytest.approx([2.02, 2.16, 2.23, 2.15, 1.74], abs=0.006)
    assert choose(found).topology.num_nodes == 32


def test_trees_of_the_worked_table_bring_the_worked_tokens():
    free = StepCosts(1.0, (1, 13), (1.0, 1.0), (0.0,), 0.0)
    found = best_of_each_size(HEADS, free, (9, 13), by(HEADS))
    assert [one.tokens_per_step for one in found] == pytest.approx([2.34, 2.4708])
    assert [one.by_table for one in found] == pytest.approx([2.34, 2.4708])


@pytest.mark.parametrize(
    ("cost", "alpha", "length", "tokens", "speedup"),
    [
        (0.02, 0.5, 4, 1.94, 1.79),
        (0.02, 0.9, 19, 8.78, 6.37),
        (0.05, 0.7, 6, 3.06, 2.35),
        (0.05, 0.9, 13, 7.71, 4.67),
        (0.10, 0.6, 3, 2.18, 1.67),
        (0.10, 0.8, 6, 3.95, 2.47),
        (0.20, 0.5, 1, 1.50, 1.25),
        (0.20, 0.8, 4, 3.36, 1.87),
    ],
)
def test_best_chain_of_a_drafter_that_pays_for_every_token(cost, alpha, length, tokens, speedup):
    table = torch.full((20, 1), alpha, dtype=torch.float64)
    costs = StepCosts(1.0, (1, 21), (1.0, 1.0), tuple(cost * depth for depth in range(1, 21)), 0.0)
    chosen = choose(best_of_each_size(table, costs, range(2, 22), by(table)))
    assert chosen.topology.depth == length and chosen.topology.num_nodes == length + 1
    assert (chosen.tokens_per_step, chosen.speedup) == pytest.approx((tokens, speedup), abs=0.006)


def test_depth_that_costs_more_than_it_brings_is_left_out():
    def depth(draft):
        return choose(best_of_each_size(HEADS, StepCosts(1, (1, 13), (1, 1), draft, 0), (13,), by(HEADS)))

    assert depth((0.1, 0.1, 0.1)).topology.depth == 3
    shallow = depth((0.1, 0.1, 0.9))
    assert shallow.topology.depth == 2 and shallow.topology.num_nodes == 13


def test_depth_bound_that_cannot_fill_a_size_is_not_judged_between_sizes():
    table = torch.tensor([[0.5, 0.2], [0.3, 0.1]])
    (one,) = best_of_each_size(table, StepCosts(1, (1, 3, 5), (1, 1, 9), (0, 5), 0), (5,), by(table))
    assert one.topology.num_nodes == 5 and one.topology.depth == 2


def test_sizes_beyond_what_the_table_holds_give_no_further_tree():
    table = torch.tensor([[0.5, 0.2], [0.3, 0.0]])
    found = best_of_each_size(table, STAIRCASE, (4, 16, 64), by(table))
    assert [one.topology.num_nodes for one in found] == [4, 5]


def test_every_part_of_a_step_is_in_its_cost():
    one = judge(
        choose(best_of_each_size(HEADS, STAIRCASE, (8,), by(HEADS))).topology,
        HEADS,
        StepCosts(10.0, (1, 8, 16), (12.0, 14.0, 18.0), (1.0, 2.0, 3.0), 0.5),
        lambda tree: 3.0,
    )
    assert one.step_cost == pytest.approx((14 + one.draft + 0.5) / 10) and one.draft == one.topology.depth
    assert one.speedup == pytest.approx(3 * 10 / (14 + one.draft + 0.5))


def test_reason_names_the_choice_and_its_neighbours():
    wide = 0.9 * torch.full((4, 16), 1 / 16)
    found = best_of_each_size(wide, STAIRCASE, SIZES, lambda tree: TOKENS.get(tree.num_nodes, 1))
    told = reason(choose(found), found)
    assert told.startswith("32 nodes of depth") and "2.57 tokens for 1.15 steps" in told
    assert "16 nodes 2.37 tokens" in told and "64 nodes 2.73 tokens" in told and "8 nodes" not in told
    assert "no tree" not in told


def test_reason_says_when_nothing_is_faster_than_the_model_alone():
    slow = StepCosts(1.0, (1, 16), (1.0, 1.0), (5.0,), 0.0)
    found = best_of_each_size(HEADS, slow, (8,), by(HEADS))
    assert "no tree of this drafter is expected to be faster" in reason(choose(found), found)
