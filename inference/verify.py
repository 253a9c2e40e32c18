"""Verification: which path of a draft tree the target accepts.

`Lossless` serves greedy decoding and lossless sampling with one walk: the target picks its token at a node (argmax, or
a keyed draw from its own processed law), and if the tree holds that token below the node, the walk goes on there. This
is exact for any tree and any drafter and needs no draft probabilities. `SpeculativeSampling` is the classic rule, for
trees whose nodes were drawn: lossless in law. `Typical` is lossy, and says so. The token where a path ends is the bonus
token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.noise import KeyedNoise
from ..core.sampling import Sampling
from ..core.tree import DraftTree, DrawnFrom

ACCEPTANCE_STREAM, RESIDUAL_STREAM = 1, 2
"""Streams of the keyed noise beside the target's own draws; the drafter's own draws use those from 16 on."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """nodes [B, A] long: accepted path, root first, zero-padded; lengths [B] long: its length; bonus [B] long."""

    nodes: Tensor
    lengths: Tensor
    bonus: Tensor


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The true tokens before each node, for processors that read them.

    tokens [B, M] long: committed tokens, the root last; lengths: how many of them each row has.
    """

    tokens: Tensor
    lengths: Sequence[int]

    def upto(self, row: int, path: Tensor) -> Tensor:
        """Return row's committed tokens followed by the path's draft tokens [P], as [1, length + P] long."""
        return torch.cat([self.tokens[row, : self.lengths[row]], path])[None]


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be decided: a tree, and what the target says of it.

    logits [B, N, V]: the target's, row v is the law of v's children. sampling: how the target picks.
    positions [B] long: position of the root. prefixes: committed tokens, root included.
    """

    tree: DraftTree
    logits: Tensor
    sampling: Sampling
    positions: Tensor
    prefixes: Prefixes

    def scores(self, path: _Path) -> Tensor:
        """Return the target's processed scores [B, V] fp32 at the ends of the paths."""
        lengths = path.lengths.tolist() if self.sampling.reads_prefix else []

        def prefix(row: int) -> Tensor:
            return self.prefixes.upto(row, self.tree.tokens[row, path.nodes[row, 1 : lengths[row]]])

        return self.sampling.process(self.logits[path.rows, path.node], prefix)

    def all_scores(self) -> Tensor:
        """Return the target's processed scores [B, N, V] fp32 at every node."""
        batch, nodes = self.tree.tokens.shape

        def prefix(place: int) -> Tensor:
            row, node = divmod(place, nodes)
            path = self.tree.ancestors[row, node].nonzero()[1:, 0]
            return self.prefixes.upto(row, self.tree.tokens[row, path])

        return self.sampling.process(self.logits.flatten(0, 1), prefix).view(batch, nodes, -1)


class _Path:
    """The paths of all rows while they are walked down, one level at a time.

    Rows that have stopped stay where they are. A row's place in `nodes` beyond its end holds zeros.
    """

    def __init__(self, tree: DraftTree) -> None:
        self.rows = torch.arange(len(tree.tokens), device=tree.tokens.device)
        self.node = torch.zeros_like(self.rows)
        self.nodes = self.rows.new_zeros(len(self.rows), tree.max_depth + 1)
        self.lengths = torch.ones_like(self.rows)
        self.bonus = torch.zeros_like(self.rows)
        self.walking = torch.ones_like(self.rows, dtype=torch.bool)
        self.level = 0

    def end_with(self, token: Tensor) -> None:
        """Note token [B] long as the bonus of the rows that are still walking: it counts if they get no further."""
        self.bonus = torch.where(self.walking, token, self.bonus)

    def descend(self, child: Tensor) -> None:
        """Go to node child [B] long, or stop where it is -1."""
        self.walking = self.walking & (child >= 0)
        self.node = torch.where(self.walking, child, self.node)
        self.level += 1
        self.nodes[:, self.level] = torch.where(self.walking, self.node, 0)
        self.lengths = self.lengths + self.walking

    @property
    def ended(self) -> bool:
        """Whether all rows have stopped, where looking costs nothing."""
        return _seen_to_be_none(self.walking)

    def verdict(self) -> Verdict:
        return Verdict(self.nodes, self.lengths, self.bonus)


def _seen_to_be_none(rows: Tensor) -> bool:
    """Whether no row is left; on the CPU looking costs nothing, elsewhere it would be a sync: no."""
    return rows.device.type == "cpu" and not rows.any()


class AcceptRule(ABC):
    """How a path is chosen. Abstract; the rules below are final.

    lossless: whether the emitted text follows the target's law exactly.
    """

    lossless: ClassVar[bool] = True

    @abstractmethod
    def verify(self, question: Question) -> Verdict:
        """Choose each row's path and the token that follows it."""


class Lossless(AcceptRule):
    """Find the longest path that the target would have said itself: token for token its own text."""

    def verify(self, question: Question) -> Verdict:
        """Follow the target's picks as long as the tree contains them.

        Example: children of the root are tokens 5 and 8, and the target picks 8 at the root and 3 at that child, which
        is not in the tree: nodes = [0, 2], lengths = 2, bonus = 3.
        """
        tree, path = question.tree, _Path(question.tree)
        while not path.ended:
            scores = question.scores(path)
            if question.sampling.noise is not None:
                scores = scores + question.sampling.noise(question.positions + path.level + 1)
            pick = scores.argmax(-1)
            path.end_with(pick)
            if path.level == tree.max_depth:
                break
            child = (tree.parents == path.node[:, None]) & (tree.tokens == pick[:, None]) & tree.valid
            path.descend(torch.where(child.any(1), child.int().argmax(1), -1))
        return path.verdict()


class SpeculativeSampling(AcceptRule):
    """The classic rule, for nodes that were drawn from a law q: accept with min(1, p/q), else draw from the residual.

    Siblings are tried in the order in which they were drawn; each rejection takes q's share out of p (arXiv 2211.17192,
    2302.01318; several siblings: arXiv 2305.09781, without replacement: arXiv 2402.14160). The text follows the
    target's law but depends on the drafter: it is not the text of the target alone with the same seed.

    One host sync a step, for how many siblings there are at each depth (a processor that reads the prefix costs one a
    level besides, as under any rule).
    """

    def verify(self, question: Question) -> Verdict:
        """Walk down, trying each node's children in draw order. Raises ValueError for trees of chosen nodes."""
        tree, noise = question.tree, question.sampling.noise
        if noise is None:
            return Lossless().verify(question)
        if tree.drawn is None and tree.max_depth > 0:
            raise ValueError("speculative sampling verifies drawn nodes, but these were chosen; use proposal='sampled'")
        path, accepts, residual = _Path(tree), noise.stream(ACCEPTANCE_STREAM), noise.stream(RESIDUAL_STREAM)
        siblings = _most_siblings(tree)
        while not path.ended:
            here = question.positions + path.level + 1
            law = question.scores(path).softmax(-1)
            child = torch.full_like(path.node, -1)
            if path.level < tree.max_depth:
                assert tree.drawn is not None
                child, law = _try_children(tree, tree.drawn, path, law, accepts, here, siblings[path.level])
            path.end_with((law.log() + residual(here)).argmax(-1))
            if path.level == tree.max_depth:
                break
            path.descend(child)
        return path.verdict()


def _most_siblings(tree: DraftTree) -> list[int]:
    """Return the largest number of children of any node of depth 0, 1, ..., max_depth - 1; one host sync."""
    is_child = tree.valid & (tree.parents >= 0)
    children = torch.zeros_like(tree.tokens).scatter_add(1, tree.parents.clamp(min=0), is_child.long())
    at_depth = tree.depth[:, :, None] == torch.arange(tree.max_depth, device=tree.depth.device)
    return (children[:, :, None] * at_depth).flatten(0, 1).amax(0).tolist()


def _try_children(
    tree: DraftTree, drawn: DrawnFrom, path: _Path, law: Tensor, noise: KeyedNoise, position: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Try the children of each row's node in draw order.

    law [B, V]: p at the node. most: children that any of the nodes may have.

    Returns the accepted child [B] long, -1 for none, and what is left of p [B, V].
    """
    children = (tree.parents == path.node[:, None]) & tree.valid
    place = children.cumsum(1)  # the place of each child among its siblings, from 1
    uniform = noise.uniform(position, torch.arange(most, device=law.device))
    first = torch.where(children.any(1), children.int().argmax(1), 0)
    q = drawn.law[path.rows, drawn.group[path.rows, first]].clone()
    accepted = torch.full_like(path.node, -1)
    for turn in range(most):
        is_next = children & (place == turn + 1)
        trying = is_next.any(1) & (accepted < 0)
        if _seen_to_be_none(trying):
            break
        child = is_next.int().argmax(1)
        token = tree.tokens[path.rows, child]
        entry = (
            token if drawn.token_ids is None else torch.searchsorted(drawn.token_ids, token).clamp(max=q.shape[1] - 1)
        )
        accept = trying & (uniform[:, turn] * q[path.rows, entry] < law[path.rows, token])
        accepted = torch.where(accept, child, accepted)
        rejected = (trying & ~accept)[:, None]
        law = torch.where(rejected, _residual(law, q, drawn.token_ids), law)
        if not drawn.replacement:
            rest = q.scatter(1, entry[:, None], 0.0)
            q = torch.where(rejected, rest / rest.sum(1, keepdim=True).clamp(min=1e-30), q)
    return accepted, law


def _residual(p: Tensor, q: Tensor, token_ids: Tensor | None) -> Tensor:
    """Return max(p - q, 0), normalised; p itself where nothing but rounding is left."""
    rest = (p - q if token_ids is None else p.index_add(1, token_ids, -q)).clamp(min=0)
    mass = rest.sum(1, keepdim=True)
    return torch.where(mass > 1e-6, rest / mass.clamp(min=1e-30), p)


@dataclass(frozen=True, slots=True)
class Typical(AcceptRule):
    """Medusa's typical acceptance: keep a token if it is likely enough where the law is sharp. Lossy.

    A token passes where p(token) > min(epsilon, delta * exp(-entropy of p)), p the processed law (arXiv 2401.10774,
    section 2.3.1, with its values). The longest path of passing tokens is kept, of equally long ones the likeliest; the
    token after it is the target's own draw. Greedy decoding knows no typical tokens and stays exact.
    """

    lossless: ClassVar[bool] = False
    epsilon: float = 0.09
    delta: float = 0.3

    def verify(self, question: Question) -> Verdict:
        """Judge all nodes at once, then keep the deepest path."""
        tree, noise = question.tree, question.sampling.noise
        if noise is None:
            return Lossless().verify(question)
        scores = question.all_scores()
        log_p = scores.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
        threshold = (self.delta * (-entropy).exp()).clamp(max=self.epsilon).log()
        parent = tree.parents.clamp(min=0)
        rows = torch.arange(len(parent), device=parent.device)
        told = log_p[rows[:, None], parent, tree.tokens].clamp(min=-1e4)
        passes = (told > threshold.gather(1, parent)) & tree.valid
        told[:, 0], passes[:, 0] = 0.0, True
        kept = (passes[:, None, :] | ~tree.ancestors).all(-1) & tree.valid
        likelihood = (told[:, None, :] * tree.ancestors).sum(-1)
        deepest = kept & (tree.depth == (tree.depth * kept).amax(1, keepdim=True))
        best = likelihood.masked_fill(~deepest, -torch.inf).argmax(1)
        lengths = tree.depth[rows, best] + 1
        order = (~tree.ancestors[rows, best]).to(torch.int8).argsort(dim=1, stable=True)[:, : tree.max_depth + 1]
        inside = torch.arange(order.shape[1], device=best.device) < lengths[:, None]
        bonus = (scores[rows, best] + noise(question.positions + lengths)).argmax(-1)
        return Verdict(order * inside, lengths, bonus)
