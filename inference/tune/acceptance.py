"""How often each candidate is what the target says next: counted on the target's own text, drawn as it will be served.

The text does not depend on the drafter, so one run of the engine suffices for every tree: it decodes token by token
while a drafter with a wide tree says at each position what it would propose. Afterwards the true text is followed
through each wide tree. That gives the table from which trees are built, and lets any part of the wide tree be replayed:
its steps over the same text are counted exactly, without a further pass of target or drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ...core.tree import DraftTree, TreeTopology, root_only
from ...drafters.base import Drafter, DraftRequest, DraftState, TargetView
from ..bench.methods import Decoding
from ..engine import SpeculativeEngine
from ..target import Target
from ..tree_search import CANDIDATES, best_topology, with_topology

WIDE_NODES = 512
DEEPEST = 10
"""Depths that are looked at of a drafter that has no bound of its own."""

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of a wide tree at every position of some texts.

    topology: the wide tree; the children of each node have the ranks 0, 1, ... without gaps.
    texts: one [S, K] long a text, a row for each position from which a step could start: the ranks of the true tokens
    that follow, -1 from where they leave the tree. S is the number of tokens after the text's first.
    """

    topology: TreeTopology
    texts: list[Tensor]

    @property
    def positions(self) -> int:
        """Positions looked at."""
        return sum(len(ranks) for ranks in self.texts)

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return hits [K, R] and reached [K, R], fp32: how often the node's parent was right, and how often the node.

        A node counts as reached only where its parent is right and the text goes on; all drafted nodes as denominator
        would make deep candidates look worse than they are.
        """
        children = Counter(tuple(path[:-1]) for path in self.topology.paths())
        hits, reached = torch.zeros(2, self.topology.depth, self.topology.width)
        for ranks in self.texts:
            for position, row in enumerate(ranks.tolist()):
                path: Path = ()
                for depth, rank in enumerate(row[: len(ranks) - position]):
                    reached[depth, : children[path]] += 1
                    if rank < 0:
                        break
                    hits[depth, rank] += 1
                    path = (*path, rank)
        return hits, reached

    def table(self) -> Tensor:
        """Return a [K, R]: how often the candidate of this depth and rank was right where its parent was."""
        hits, reached = self.counts()
        return hits / reached.clamp(min=1)

    def tokens_per_step(self, topology: TreeTopology) -> float:
        """Replay a tree over the texts; return tokens per step as the engine counts them, 0.0 without a step.

        Exact for any part of the wide tree; nodes outside it count as wrong.
        """
        nodes = {tuple(path) for path in topology.paths()}
        steps = 0
        for ranks in self.texts:
            rows, position = ranks.tolist(), 0
            while position < len(rows):
                path: Path = ()
                for rank in rows[position]:
                    if (*path, rank) not in nodes:
                        break
                    path = (*path, rank)
                position += len(path) + 1
                steps += 1
        return self.positions / steps if steps else 0.0


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    seeds: Sequence[int],
    batch_size: int = 8,
    progress: bool = True,
) -> Acceptance:
    """Let the target answer the prompts and look at what the drafter would have guessed at every token.

    seeds: one a prompt, without effect on greedy decoding. batch_size: prompts at a time; the text is the same.

    Raises ValueError for drafters that draw their own trees.
    """
    watcher = Watcher(with_topology(drafter, wide_topology(drafter)))
    topology = watcher.drafter.topology
    assert topology is not None
    engine = SpeculativeEngine(target, watcher)  # pyright: ignore[reportArgumentType]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: dict[int, Tensor] = {}
    for begin in tqdm(range(0, len(order), batch_size), desc="acceptance", disable=not progress, dynamic_ncols=True):
        chosen = order[begin : begin + batch_size]
        state = engine.prefill([prompts[i] for i in chosen], decoding.rules([seeds[i] for i in chosen]))
        proposed: list[list[Tensor]] = [[] for _ in chosen]
        while not state.done:
            rows, watcher.seen = list(state.order), None
            engine.step(state)
            for place, row in enumerate(rows):
                blank = torch.full((topology.num_nodes,), -1)
                if watcher.seen is not None:
                    blank[: watcher.seen.shape[1]] = watcher.seen[place]
                proposed[row].append(blank)
        for row, i in enumerate(chosen):
            texts[i] = follow(topology, proposed[row], state.outputs[row])
    return Acceptance(topology, [texts[i] for i in range(len(prompts))])


class Watcher:
    """Stands in for a drafter in the engine: keeps the tree that it would propose, and proposes the root alone.

    seen [B, N] long: tokens of the last tree, in the order of the topology; None where none was asked for.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.seen: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """Answer as the drafter would; called only for what is not defined here."""
        return getattr(self.drafter, name)

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Look, and let the target go on by one token."""
        tree = self.drafter.propose(state, target, request)
        self.seen = tree.tokens.cpu()
        return root_only(tree.tokens[:, 0])


def follow(topology: TreeTopology, proposed: Sequence[Tensor], output: Sequence[int]) -> Tensor:
    """Follow the true text through the trees proposed along it.

    proposed: tokens [N] long of the tree at each step, whose root is output[step]; -1 where a node was cut away.

    Example: output [5, 7, 8] and a first tree with 7 as the root's second child and 8 nowhere give ranks [1, -1] there.

    Returns ranks [S, K] long of the S = len(output) - 1 steps, -1 from where the text leaves the tree.
    """
    steps, depths = len(output) - 1, topology.depth
    ranks = torch.full((steps, depths), -1)
    if not steps:
        return ranks
    tokens = torch.stack(list(proposed[:steps]))
    text = torch.tensor([*output, *[-2] * depths])  # no node holds -2
    parents, rank_of = torch.tensor(topology.parents), torch.tensor(topology.ranks)
    node, inside = torch.zeros(steps, dtype=torch.long), torch.ones(steps, dtype=torch.bool)
    for depth in range(depths):
        follows = text[depth + 1 : depth + 1 + steps]
        child = (parents == node[:, None]) & (tokens == follows[:, None])
        inside &= child.any(1)
        node = torch.where(inside, child.int().argmax(1), node)
        ranks[:, depth] = torch.where(inside, rank_of[node], -1)
    return ranks


def wide_topology(drafter: Drafter, nodes: int = WIDE_NODES) -> TreeTopology:
    """Return a tree that holds the drafter's own and whatever a tuned one may want, without gaps between siblings."""
    # how often a candidate is right falls about as 1 / rank; only the tree's breadth depends on this guess
    falling = 0.5 / torch.arange(1, CANDIDATES + 1, dtype=torch.float)
    deepest = with_topology(drafter, TreeTopology.chain(DEEPEST)).topology
    assert deepest is not None
    paths = {tuple(path) for path in best_topology(falling.expand(deepest.depth, -1), nodes).paths()}
    own = drafter.topology.paths() if drafter.topology is not None else []
    for path in own:
        paths |= {(*path[:k], rank) for k in range(len(path)) for rank in range(path[k] + 1)}
    return TreeTopology.from_paths(paths)
