"""Draft trees: the guesses of one decoding step, and the static shapes they are made from.

Node 0 is the root, the last committed token. Parents come before children, so one pass in node order fills depth and
ancestors. This module knows neither models nor caches; `docs/tree.md` works one example through with numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeTopology:
    """The static shape of a tree: node i hangs under `parents[i]` and takes that depth's candidate of rank `ranks[i]`.

    Built by `from_paths` or `chain`, never by hand: nodes are ordered by depth, then by path.

    parents: length N, -1 for the root, otherwise `parents[i] < i`.
    ranks: length N, -1 for the root, otherwise 0 for the best candidate of that depth.
    depths: length N, 0 for the root.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    depths: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Iterable[Sequence[int]]) -> TreeTopology:
        """Build a topology from one rank path per draft token; `(0, 2)` is the third child of the root's best child.

        Example: `[(0,), (1,), (0, 0)]` is a root with two children, the first of which has one child.
        Raises ValueError when a node's parent is missing or a path is named twice.
        """
        ordered: list[Path] = sorted((tuple(int(rank) for rank in path) for path in paths), key=lambda p: (len(p), p))
        index: dict[Path, int] = {(): 0}
        parents, ranks, depths = [-1], [-1], [0]
        for path in ordered:
            if not path or min(path) < 0:
                raise ValueError(f"a tree path must be a non-empty list of ranks >= 0, but found {list(path)}")
            if path in index:
                raise ValueError(f"tree paths must be distinct, but {list(path)} stands twice")
            if path[:-1] not in index:
                raise ValueError(f"every node needs its parent: {list(path)} is there, {list(path[:-1])} is not")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
            depths.append(len(path))
        return cls(tuple(parents), tuple(ranks), tuple(depths))

    @classmethod
    def chain(cls, depth: int) -> TreeTopology:
        """Build the tree without branches: the best candidate of each of `depth` depths."""
        return cls.from_paths([(0,) * (d + 1) for d in range(depth)])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for a lone root."""
        return max(self.depths)

    @property
    def width(self) -> int:
        """Candidates needed per depth: the largest rank + 1."""
        return max(self.ranks) + 1

    def paths(self) -> list[list[int]]:
        """Return one rank path per draft token, in node order: what `from_paths` takes and config files hold."""
        paths: list[list[int]] = [[]]
        for parent, rank in zip(self.parents[1:], self.ranks[1:], strict=True):
            paths.append([*paths[parent], rank])
        return paths[1:]

    def cut(self, max_nodes: int | None = None, max_depth: int | None = None) -> TreeTopology:
        """Return the topology without nodes beyond `max_depth`, and of the rest the first `max_nodes` (root included).

        Nodes are ordered by depth, so every prefix is a tree.
        """
        if max_depth is None or max_depth >= self.depth:
            kept = self.num_nodes
        else:
            kept = sum(d <= max_depth for d in self.depths)
        kept = max(1, kept if max_nodes is None else min(kept, max_nodes))
        if kept == self.num_nodes:
            return self
        return TreeTopology(self.parents[:kept], self.ranks[:kept], self.depths[:kept])


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """Settings of a tree that follows the drafter's confidence (EAGLE-2, arXiv 2406.16858).

    nodes: N, root included. depth: levels. width: nodes expanded on a level, and children scored for each.
    stop_below: no further level when even the best path is less probable than this; 0 never stops early.
    """

    nodes: int = 24
    depth: int = 5
    width: int = 4
    stop_below: float = 0.0

    def __post_init__(self) -> None:
        if self.nodes < 2 or self.depth < 1 or self.width < 1 or not 0 <= self.stop_below < 1:
            raise ValueError(
                "a dynamic tree needs nodes >= 2, depth and width >= 1 and 0 <= stop_below < 1, but has "
                f"{self.nodes}, {self.depth}, {self.width} and {self.stop_below}"
            )


@dataclass(frozen=True, slots=True)
class DrawnFrom:
    """The laws that a tree's nodes were drawn from; siblings stand in draw order.

    law [B, P, Vd] fp32: each row sums to one. group [B, N] long: which of the P laws a node was drawn from; siblings
    share one, the root's entry means nothing. token_ids [Vd] long: the tokens of the law's entries, None for all of V.
    replacement: siblings were drawn independently and may repeat; otherwise each from what the earlier ones left.
    """

    law: Tensor
    group: Tensor
    token_ids: Tensor | None
    replacement: bool


@dataclass(frozen=True, slots=True)
class DraftTree:
    """A batch of draft trees; rows may differ in shape, padding nodes are marked in `valid`.

    tokens [B, N] long: token of each node; node 0 is the root.
    parents [B, N] long: index of the parent, -1 for the root, otherwise `parents[b, i] < i`.
    valid [B, N] bool: False for padding nodes; the root is always valid.
    depth [B, N] long: distance from the root.
    ancestors [B, N, N] bool: `[b, i, j]` says that j lies on the path from the root to i, both ends included.
    max_depth: depth of the deepest node over all rows, known on the host.
    drawn: for trees of sampled nodes, what they were drawn from; None where nodes were chosen.
    """

    tokens: Tensor
    parents: Tensor
    valid: Tensor
    depth: Tensor
    ancestors: Tensor
    max_depth: int
    drawn: DrawnFrom | None = None

    def only_root(self, rows: Tensor) -> DraftTree:
        """Return the tree with every draft token of the rows marked in `rows` [B] bool made invalid."""
        draft = torch.ones_like(self.valid)
        draft[:, 0] = False
        return replace(self, valid=self.valid & ~(rows[:, None] & draft))


def from_parents(tokens: Tensor, parents: Tensor, valid: Tensor | None = None) -> DraftTree:
    """Build a tree from tokens and parents, filling depth and ancestors.

    tokens [B, N] long; parents [B, N] long, -1 for the root, otherwise smaller than the node's own index;
    valid [B, N] bool, default all.

    Example: parents `[-1, 0, 0, 1]` gives depth `[0, 1, 1, 2]`, and node 3 sees itself, 1 and 0.
    """
    batch, nodes = tokens.shape
    ancestors = torch.eye(nodes, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
    rows = torch.arange(batch, device=tokens.device)
    for node in range(1, nodes):
        ancestors[:, node] |= ancestors[rows, parents[:, node]]
    depth = ancestors.sum(-1) - 1
    if valid is None:
        valid = torch.ones_like(tokens, dtype=torch.bool)
    return DraftTree(tokens, parents, valid, depth, ancestors, int(depth.max()))


def root_only(root: Tensor) -> DraftTree:
    """Build the tree of a step without drafting: root [B] long and nothing else."""
    tokens = root[:, None]
    ones = torch.ones_like(tokens, dtype=torch.bool)
    return DraftTree(tokens, tokens.new_full(tokens.shape, -1), ones, torch.zeros_like(tokens), ones[:, :, None], 0)


def chain(root: Tensor, drafts: Tensor) -> DraftTree:
    """Build a tree without branches from root [B] long and drafts [B, K] long."""
    return topology_builder(TreeTopology.chain(drafts.shape[1]), drafts.device).build(root, drafts[:, :, None])


def from_beams(root: Tensor, beams: Tensor) -> DraftTree:
    """Fold beams into a prefix tree: equal beginnings become one path (ReDrafter's dynamic tree attention).

    root [B] long; beams [B, W, K] long: W token sequences that follow the root. Costs one host sync, for the number of
    nodes; rows with fewer get padding nodes.

    Example: beams [[A, B, C], [A, B, D], [A, E, F]] give tokens [root, A, B, C, D, E, F] and parents
    [-1, 0, 1, 2, 2, 1, 5]. Source: arXiv 2403.09919, section 3.
    """
    batch, width, length = beams.shape
    shared = (beams[:, :, None] == beams[:, None]).cumprod(-1).bool()
    first = shared.int().argmax(2)  # the first beam with the same beginning, [B, W, K]
    kept = (first == torch.arange(width, device=beams.device)[:, None]).flatten(1)
    number = kept.cumsum(1)  # of each kept cell, row by row; the root is 0
    nodes = number.view(batch, width, length).gather(1, first)
    parent = torch.cat([torch.zeros_like(nodes[:, :, :1]), nodes[:, :, :-1]], dim=2).flatten(1)
    count = 1 + number[:, -1]
    most = int(count.max())
    place = torch.where(kept, number, most)  # cells that are no nodes go to a column that is cut off
    tokens = beams.new_zeros(batch, most + 1).scatter(1, place, beams.flatten(1))[:, :most]
    parents = beams.new_zeros(batch, most + 1).scatter(1, place, parent)[:, :most]
    tokens[:, 0], parents[:, 0] = root, -1
    return from_parents(tokens, parents, torch.arange(most, device=beams.device) < count[:, None])


def best_subtree(root: Tensor, tokens: Tensor, parents: Tensor, values: Tensor, num_nodes: int) -> DraftTree:
    """Keep the most promising of all nodes that were scored (EAGLE-2's reranking, arXiv 2406.16858, section 4.2).

    root [B] long; tokens, parents [B, M] long: scored nodes level by level, a parent by its place among the M, -1 for
    the root's children. values [B, M] fp32: strictly smaller than the parent's, so that what is kept is connected;
    -inf for nodes that are none. num_nodes: root included.
    """
    kept = values.topk(min(num_nodes - 1, values.shape[1]), dim=1).indices.sort(dim=1).values
    numbers = torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept)
    new_place = torch.zeros_like(tokens).scatter(1, kept, numbers)
    parent = parents.gather(1, kept)
    parent = torch.where(parent < 0, 0, new_place.gather(1, parent.clamp(min=0)))
    valid = torch.cat([torch.ones_like(root[:, None], dtype=torch.bool), values.gather(1, kept) > -torch.inf], dim=1)
    tokens = torch.cat([root[:, None], tokens.gather(1, kept)], dim=1)
    return from_parents(tokens, torch.cat([torch.full_like(root[:, None], -1), parent], dim=1), valid)


@lru_cache(maxsize=64)
def topology_builder(topology: TreeTopology, device: torch.device) -> TopologyBuilder:
    """Return the builder of a topology on a device; steps share it."""
    return TopologyBuilder(topology, device)


class TopologyBuilder:
    """Fills one static topology with candidates; its index tensors are made once per device and shared by all steps."""

    def __init__(self, topology: TreeTopology, device: torch.device) -> None:
        self.topology = topology
        nodes = topology.num_nodes
        blank = torch.zeros(1, nodes, dtype=torch.long, device=device)
        self._shape = from_parents(blank, torch.tensor([topology.parents], device=device))
        self._depth_index = torch.tensor(topology.depths[1:], dtype=torch.long, device=device) - 1
        self._rank_index = torch.tensor(topology.ranks[1:], dtype=torch.long, device=device)
        earlier = [topology.parents[:node].count(parent) for node, parent in enumerate(topology.parents)]
        self.places = torch.tensor(earlier[1:], dtype=torch.long, device=device)
        """[N - 1] long: the place of each draft token among its siblings, from 0."""

    def build(self, root: Tensor, ranked: Tensor, by_place: bool = False) -> DraftTree:
        """Fill the topology.

        root [B] long; ranked [B, K, R] long: candidates of each depth, best first, K >= depth and R >= width.
        Every node of depth k with rank r holds `ranked[:, k - 1, r]`, whatever its parent (Medusa's trees, arXiv
        2401.10774, section 2.3.3); by_place: r is the node's place among its siblings instead.
        """
        drafts = ranked[:, self._depth_index, self.places if by_place else self._rank_index]
        return replace(self.expand(len(root)), tokens=torch.cat([root[:, None], drafts], dim=1))

    def expand(self, batch: int) -> DraftTree:
        """Return the shape for `batch` rows, its tokens not filled in yet."""
        shape, nodes = self._shape, self.topology.num_nodes
        return DraftTree(
            shape.tokens.expand(batch, nodes),
            shape.parents.expand(batch, nodes),
            shape.valid.expand(batch, nodes),
            shape.depth.expand(batch, nodes),
            shape.ancestors.expand(batch, nodes, nodes),
            shape.max_depth,
        )
