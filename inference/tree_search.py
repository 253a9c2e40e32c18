"""Choose the shape of static draft trees from how often each ranked candidate is the true token.

A path of ranks (r1, ..., rm) is expected to be accepted with probability a[1][r1] * ... * a[m][rm], where a[d][r] says
how often the candidate of rank r at depth d is right, given that the depths before it were. A tree's expected number of
accepted tokens is the sum over its nodes, so the best tree of n nodes holds the n most probable paths (Medusa, arXiv
2401.10774, section 2.3.3 and appendix C).
"""

from __future__ import annotations

import copy
import heapq

import torch
from torch import Tensor

from ..core.tree import TreeTopology
from ..drafters.base import Drafter

CANDIDATES = 16
"""Ranks that are counted; no useful tree is wider."""


def count_ranks(ranks: Tensor, labelled: Tensor, candidates: int = CANDIDATES) -> tuple[Tensor, Tensor]:
    """Count where the true tokens stand among the candidates.

    ranks [M, K] long: rank of the true token at each depth, -1 where no candidate. labelled [M, K] bool: False where
    there is no true token to compare with. A depth counts where all depths before it were among the candidates.

    Example, 2 candidates: ranks [[0, 1], [5, 0]], all labelled, give hits [[1, 0], [0, 1]] and reached [2, 1].

    Returns hits [K, R] and reached [K], both fp32, to be summed over batches and divided.
    """
    found = (ranks >= 0) & (ranks < candidates) & labelled
    before = torch.cat([torch.ones_like(found[:, :1]), found[:, :-1].cumprod(1).bool()], dim=1)
    counted = before & labelled
    index = torch.arange(candidates, device=ranks.device)
    hits = ((ranks[:, :, None] == index) & counted[:, :, None]).sum(0)
    return hits.float(), counted.sum(0).float()


def rank_table(hits: Tensor, reached: Tensor) -> Tensor:
    """Return a [K, R]: the share of reached positions where candidate r of depth d was right."""
    return hits / reached.clamp(min=1)[:, None]


def best_topology(table: Tensor, num_nodes: int, max_depth: int | None = None) -> TreeTopology:
    """Return the tree with the most expected accepted tokens.

    table [K, R]: see `rank_table`. num_nodes: nodes, the root included. max_depth: None means K.

    Greedy: of all nodes whose parent is in the tree, add the most probable. A child is never more probable than its
    parent, so this is optimal for every size, and smaller trees are parts of larger ones.
    """
    depths = [row.tolist() for row in table[:max_depth]]
    heap: list[tuple[float, int, tuple[int, ...]]] = [(-value, 1, (rank,)) for rank, value in enumerate(depths[0])]
    heapq.heapify(heap)
    paths: list[tuple[int, ...]] = []
    while heap and len(paths) < num_nodes - 1:
        value, depth, path = heapq.heappop(heap)
        if value == 0 and paths:
            break
        paths.append(path)
        if depth < len(depths):
            for rank, share in enumerate(depths[depth]):
                heapq.heappush(heap, (value * share, depth + 1, (*path, rank)))
    return TreeTopology.from_paths(paths)


def expected_accepted(table: Tensor, topology: TreeTopology) -> float:
    """Return the expected number of accepted draft tokens of a tree under a table [K, R]."""
    total = 0.0
    for path in topology.paths():
        value = 1.0
        for depth, rank in enumerate(path):
            value *= float(table[depth, rank]) if rank < table.shape[1] else 0.0
        total += value
    return total


def with_topology(drafter: Drafter, topology: TreeTopology) -> Drafter:
    """Return a twin that shares the drafter's weights and draws another tree; the drafter itself keeps its own.

    A method with fewer depths cuts the tree: the twin's `topology` says what is left.
    Raises ValueError for drafters that draw their own trees.
    """
    twin = copy.copy(drafter)
    twin.config = copy.deepcopy(drafter.config)
    twin.set_topology(topology.paths())
    return twin
