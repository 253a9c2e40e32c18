"""Drafters for tests: they are told what the target is going to say, and get it right as often as a script wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tiny_targets import VOCAB, WIDTH
from torch import Tensor

from headstart.core.tree import DraftTree, TreeTopology, from_parents
from headstart.drafters.base import (
    DraftBatch,
    Drafter,
    DraftRequest,
    DraftState,
    LossOutput,
    Observed,
    TargetView,
)
from headstart.drafters.config import DrafterConfig

BUSHY = TreeTopology.from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1), (0, 0, 0)])
"""Ten nodes, depth 3, whose deepest last path [1, 1, 1] leads over branches of rank 1."""


@dataclass
class ScriptState(DraftState):
    """rows [B] long: the caller's row; count: rows so far; step: proposals made; offered and log: promised and kept."""

    rows: Tensor
    count: int = 0
    step: int = 0
    offered: dict[int, int] = field(default_factory=dict)
    log: list[tuple[int, int, int]] = field(default_factory=list)
    seen: list[tuple[Tensor, Observed]] = field(default_factory=list)

    def replace_rows(self, rows: Tensor, other: ScriptState) -> ScriptState:
        """Number the new rows on after those before, as the engine does."""
        numbered = other.rows + self.count
        self.seen += [(seen + self.count, observed) for seen, observed in other.seen]
        return replace(self, rows=self.rows.index_copy(0, rows, numbered), count=self.count + other.count)


class _ToldDrafter(Drafter):
    """What the drafters below share: no weights, and the texts of the target.

    texts: each row's prompt and continuation, somewhat longer than will be generated.
    """

    def __init__(self, texts: Sequence[Sequence[int]], layers: tuple[int | str, ...] = (0, "final")) -> None:
        super().__init__(DrafterConfig(target_vocab_size=VOCAB, target_width=WIDTH))
        self.texts = texts
        self.layers = layers

    @property
    def feature_layers(self) -> tuple[int | str, ...]:
        return self.layers

    def initialise_from(self, target: TargetView) -> None:
        pass

    def init_state(self, batch_size: int) -> ScriptState:
        return ScriptState(torch.arange(batch_size), batch_size)

    def observe(self, observed: Observed, state: ScriptState, target: TargetView) -> None:
        """Keep what was observed; after a step, log (row, nodes promised, nodes kept) of every row that took part."""
        state.seen.append((state.rows, observed))
        for row, length in zip(state.rows.tolist(), observed.lengths.tolist(), strict=True):
            if length and row in state.offered:
                state.log.append((row, state.offered[row], length - 1))
        state.offered = {}

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        raise NotImplementedError("test drafters are not trained")

    def coming(self, row: int, root_position: int) -> list[int]:
        """Return what the target says after the root."""
        return list(self.texts[row][root_position + 1 :])


class ScriptedDrafter(_ToldDrafter):
    """Gets exactly as many nodes right as its script says.

    accepts, topologies: nodes right and shape of the tree; row r takes entry (step + r) modulo their length, so rows
    differ from each other and from step to step. The right nodes lie on the last path of the wanted length, which
    leads over branches of higher rank where there are any. Rows with smaller trees are filled up with padding nodes
    that hold the right token: they must not be accepted.
    """

    def __init__(self, texts: Sequence[Sequence[int]], accepts: Sequence[int], *topologies: TreeTopology) -> None:
        super().__init__(texts)
        self.accepts = accepts
        self.topologies = topologies

    def propose(self, state: ScriptState, target: TargetView, request: DraftRequest) -> DraftTree:
        grown = []
        rows = zip(state.rows.tolist(), request.root_positions.tolist(), request.active.tolist(), strict=True)
        for row, position, active in rows:
            turn = state.step + row
            topology = self.topologies[turn % len(self.topologies)].cut(request.max_nodes, request.max_depth)
            coming = self.coming(row, position)
            if not active:
                coming, topology = [0] * VOCAB, TreeTopology.chain(0)
            right = min(self.accepts[turn % len(self.accepts)], topology.depth)
            state.offered[row] = right
            grown.append((grow(topology, self.texts[row][position], coming, right), topology, coming[0]))
        state.step += 1
        return _padded(grown)


def oracle_drafter(texts: Sequence[Sequence[int]], depth: int) -> ScriptedDrafter:
    """Return a drafter whose chain of `depth` nodes is always right: depth + 1 tokens a step."""
    return ScriptedDrafter(texts, [depth], TreeTopology.chain(depth))


def grow(topology: TreeTopology, root: int, coming: Sequence[int], right: int) -> list[int]:
    """Fill a topology so that exactly `right` nodes on a path hold what is coming; siblings stay distinct."""
    paths: list[tuple[int, ...]] = [(), *(tuple(path) for path in topology.paths())]
    chosen = [path for path in paths if len(path) == right][-1]
    tokens = [root]
    for path in paths[1:]:
        depth = len(path)
        on_path = path == chosen[:depth]
        tokens.append(coming[depth - 1] if on_path else (coming[depth - 1] + 1 + path[-1]) % VOCAB)
    return tokens


def _padded(grown: list[tuple[list[int], TreeTopology, int]]) -> DraftTree:
    most = max(topology.num_nodes for _, topology, _ in grown)
    tokens, parents, valid = [], [], []
    for filled, topology, next_token in grown:
        rest = most - topology.num_nodes
        tokens.append(filled + [next_token] * rest)
        parents.append(list(topology.parents) + [0] * rest)
        valid.append([True] * topology.num_nodes + [False] * rest)
    return from_parents(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))


class RandomDrafter(_ToldDrafter):
    """Random trees: any shape, some nodes right, some rows nearly empty, invalid nodes anywhere."""

    def __init__(self, texts: Sequence[Sequence[int]], nodes: int = 12, seed: int = 0) -> None:
        super().__init__(texts)
        self.nodes = nodes
        self.seed = seed

    def propose(self, state: ScriptState, target: TargetView, request: DraftRequest) -> DraftTree:
        random = torch.Generator().manual_seed(self.seed * 1_000 + state.step)
        state.step += 1
        rows = zip(state.rows.tolist(), request.root_positions.tolist(), strict=True)
        drawn = [self._draw(self.coming(row, position), self.texts[row][position], random) for row, position in rows]
        tokens, parents, valid = (torch.tensor(part) for part in zip(*drawn, strict=True))
        return from_parents(tokens, parents, valid)

    def _draw(self, coming: list[int], root: int, random: torch.Generator) -> tuple[Any, ...]:
        """Hang each node under a random earlier one; half of them hold what is coming at their depth."""
        tokens, parents, depths, valid = [root], [-1], [0], [True]
        sparse = float(torch.rand((), generator=random)) < 0.3
        for node in range(1, self.nodes):
            parent = int(torch.randint(node, (), generator=random))
            right, keep = torch.rand(2, generator=random).tolist()
            told = right < 0.5 and depths[parent] < len(coming)
            guess = coming[depths[parent]] if told else int(torch.randint(VOCAB, (), generator=random))
            siblings = [tokens[i] for i in range(1, node) if parents[i] == parent and valid[i]]
            tokens.append(guess)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            valid.append(guess not in siblings and keep < (0.3 if sparse else 0.9))
        return tokens, parents, valid
