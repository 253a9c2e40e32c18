"""The choice of a tree: expected tokens per step against what a step costs, at the sizes that were measured.

Speed-up = tokens per step · T_1 / (T_v(nodes) + T_d(depth) + T_o). Times may be in any one unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...core.tree import TreeTopology
from ..bench.costs import predicted_ratio
from ..tree_search import best_topology, expected_accepted


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a decoding step take.

    step: T_1, a step of the model alone. nodes, forward: T_v at each measured size, ascending. draft: T_d at depth 1,
    2, ...; other: T_o.
    """

    step: float
    nodes: tuple[int, ...]
    forward: tuple[float, ...]
    draft: tuple[float, ...]
    other: float

    def forward_at(self, nodes: int) -> float:
        """Return T_v; between measured sizes on a straight line, beyond them that of the last."""
        return float(np.interp(nodes, self.nodes, self.forward))

    def draft_at(self, depth: int) -> float:
        """Return T_d of a tree of this depth, that of the deepest measured one beyond it; nothing for a lone root."""
        return self.draft[min(depth, len(self.draft)) - 1] if depth else 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A tree and what is expected of it.

    by_table: tokens per step if ranks at different depths were independent. tokens_per_step: what the choice goes by.
    speedup: expected, of decoding. forward, draft, other: T_v, T_d, T_o; step_cost: their sum in steps of the model
    alone.
    """

    topology: TreeTopology
    by_table: float
    tokens_per_step: float
    forward: float
    draft: float
    other: float
    step_cost: float
    speedup: float

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the tree, ready for JSON."""
        return {
            "nodes": self.topology.num_nodes,
            "depth": self.topology.depth,
            "tokens_per_step_by_table": self.by_table,
            "tokens_per_step": self.tokens_per_step,
            "T_v": self.forward,
            "T_d": self.draft,
            "T_o": self.other,
            "step_cost": self.step_cost,
            "expected_speedup": self.speedup,
            "topology": self.topology.paths(),
        }


def judge(
    topology: TreeTopology, table: Tensor, costs: StepCosts, tokens_per_step: Callable[[TreeTopology], float]
) -> Candidate:
    """Return what a tree is worth. table [K, R]: see `rank_table`. tokens_per_step: says it of a tree."""
    forward, draft = costs.forward_at(topology.num_nodes), costs.draft_at(topology.depth)
    tokens = tokens_per_step(topology)
    return Candidate(
        topology,
        1 + expected_accepted(table, topology),
        tokens,
        forward,
        draft,
        costs.other,
        (forward + draft + costs.other) / costs.step,
        predicted_ratio(tokens, costs.step, forward, draft, costs.other),
    )


def best_of_each_size(
    table: Tensor, costs: StepCosts, sizes: Sequence[int], tokens_per_step: Callable[[TreeTopology], float]
) -> list[Candidate]:
    """Return, for each number of nodes (root included), the tree with the greatest expected speed-up.

    For every bound on the depth the tree with the most expected accepted tokens is built, since each level costs time.
    A depth bound that leaves too few candidates for a size is out; where the table has no more nodes to add at any
    depth, larger sizes give no further tree.
    """
    found: dict[int, Candidate] = {}
    for size in sizes:
        trees = {best_topology(table, size, depth) for depth in range(1, len(table) + 1)}
        full = [tree for tree in trees if tree.num_nodes == size]
        judged = [judge(tree, table, costs, tokens_per_step) for tree in full or trees]
        best = max(judged, key=lambda one: (one.speedup, -one.topology.num_nodes, -one.topology.depth))
        found.setdefault(best.topology.num_nodes, best)
    return [found[nodes] for nodes in sorted(found)]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Return the fastest; of equals the smallest."""
    return max(candidates, key=lambda one: (one.speedup, -one.topology.num_nodes))


def reason(chosen: Candidate, candidates: Sequence[Candidate]) -> str:
    """Say in one sentence why: what the step brings and costs, and what the next sizes would."""

    def told(one: Candidate) -> str:
        return f"{one.tokens_per_step:.2f} tokens for {one.step_cost:.2f} steps of the model alone"

    nodes = chosen.topology.num_nodes
    others = [one for one in candidates if one.topology.num_nodes != nodes]
    smaller = max((one for one in others if one.topology.num_nodes < nodes), default=None, key=_size)
    larger = min((one for one in others if one.topology.num_nodes > nodes), default=None, key=_size)
    sentence = (
        f"{nodes} nodes of depth {chosen.topology.depth} are expected to bring {told(chosen)}: "
        f"{chosen.speedup:.2f} times its speed"
    )
    beside = [f"{_size(one)} nodes {told(one)} ({one.speedup:.2f})" for one in (smaller, larger) if one is not None]
    if beside:
        sentence += "; " + " and ".join(beside)
    if chosen.speedup <= 1:
        sentence += "; no tree of this drafter is expected to be faster than the model alone here"
    return sentence + "."


def _size(candidate: Candidate) -> int:
    return candidate.topology.num_nodes
