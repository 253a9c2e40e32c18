"""ReDrafter: a small recurrent network over the guesses themselves, one head for all steps (arXiv 2403.09919).

With h the target's state that has read the last committed token but the root, and e_1 the root's embedding, e_2, ...
those of the guesses on a path: s_j = SiLU(W e_j + U s_{j-1} + b) with s_0 = 0, and [h; s_j] goes through residual
blocks and one projection to the law of the next token. Every step is the same function, so how deep it guesses is free.

Guesses come from a beam search, folded into a prefix tree (the paper's dynamic tree attention), or from any tree of
`growth.py`. The target's walk is exact for both, sampling included; the released code is not (it tests beams one by one
and keeps the longest, over 50 tokens only).

Where the paper and the released code differ: s_0 = 0 as in the code. The loss is the paper's distillation to the
target's law, but along the tokens of the data and not along greedy continuations from every position: data in the
target's own words are such continuations. `loss: ce` is what the released code does. Ours besides: states and
embeddings are scaled to unit root mean square, residual blocks start as the identity and the projection as the
language-model head on h, with a learned logit scale, so that one learning rate fits any target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.proposals import candidates
from ..core.tree import DraftTree, TreeTopology, best_subtree, from_beams, root_only
from .base import (
    DraftBatch,
    Drafter,
    DraftRequest,
    DraftState,
    LossOutput,
    Observed,
    TargetView,
)
from .config import LOSSES, DrafterConfig, check_choice, check_counts
from .growth import grow
from .losses import depth_losses
from .modules import DraftVocabulary, LogitScale, ResBlock, frozen_embedding, normalise, typical_size
from .states import NewestState, at_end

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 0, 0),
)  # fmt: skip
"""The static tree until training has measured one: 15 draft tokens."""

TREES = ("beams", "topology")


class RedrafterConfig(DrafterConfig):
    """Configuration of a ReDrafter.

    num_layers: residual blocks of the head. max_depth: K, tokens guessed ahead when generating. trained_steps: steps
    trained; more depth than that is allowed. loss: "kl", "reverse_kl", "jsd", "tv", "lk" (to the target's law) or "ce"
    (the data's next token).
    depth_weight: step k weighs depth_weight^k in the loss.
    tree: "beams" (beam_width of them) or "topology" (the static tree). Drawn nodes always take the static tree, and a
    `dynamic_tree` goes before both. beam_width: beams kept on every level.
    """

    model_type = "headstart-redrafter"

    def __init__(
        self,
        num_layers: int = 2,
        max_depth: int = 5,
        trained_steps: int = 5,
        loss: str = "kl",
        depth_weight: float = 1.0,
        tree: str = "beams",
        beam_width: int = 4,
        **kwargs: Any,
    ) -> None:
        check_counts(num_layers=num_layers, max_depth=max_depth, trained_steps=trained_steps, beam_width=beam_width)
        check_choice("loss", loss, LOSSES)
        check_choice("tree", tree, TREES)
        self.num_layers = num_layers
        self.max_depth = max_depth
        self.trained_steps = trained_steps
        self.loss = loss
        self.depth_weight = depth_weight
        self.tree = tree
        self.beam_width = beam_width
        super().__init__(**kwargs)


class RedrafterDrafter(Drafter):
    """A recurrent cell over embeddings, and one head over [h; s]."""

    config_class = RedrafterConfig
    config: RedrafterConfig
    topology: TreeTopology
    yields_law = True
    default_topology = DEFAULT_TOPOLOGY

    def __init__(self, config: RedrafterConfig) -> None:
        super().__init__(config)
        width = config.target_width
        self.read = nn.Linear(width, width, bias=False)  # W
        self.recur = nn.Linear(width, width)  # U and b
        self.blocks = nn.Sequential(*(ResBlock(2 * width) for _ in range(config.num_layers)))
        self.projection = nn.Linear(2 * width, self.vocabulary.size, bias=False)
        self.logit_scale = LogitScale()
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """As deep as wanted: every step is the same function."""
        return self.config.max_depth

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start as the target's language-model head on h, blind to the recurrent state."""
        width = self.config.target_width
        self.projection.weight[:, :width] = target.head_rows(self.vocabulary.chosen)
        self.projection.weight[:, width:] = 0
        self.logit_scale.start_at(typical_size(target))

    def init_state(self, batch_size: int) -> NewestState:
        """Return zero features."""
        return NewestState.empty(batch_size, self.config.target_width, self.read.weight)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Keep the newest feature and root of each row; the recurrence starts anew from every root."""
        assert isinstance(state, NewestState)
        state.keep(observed, at_end(observed.features[:, :, 0], observed.lengths))

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Search beams and fold them, or grow the other tree that is set."""
        assert isinstance(state, NewestState)
        root, laws = state.root, self._laws(state.feature, target)
        if request.drawn or self.dynamic is not None or self.config.tree == "topology":
            by_level = lambda level: laws(level.tokens, level.parents)  # noqa: E731
            return grow(self.tree_shape(request), root, by_level, request, self.vocabulary)
        depth = self.draft_depth if request.max_depth is None else min(self.draft_depth, request.max_depth)
        if depth < 1 or request.max_nodes == 1:
            return root_only(root)
        beams = search_beams(root, laws, self.config.beam_width, depth, request, self.vocabulary)
        return folded(root, beams, request)

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the loss over the trained labels: of the steps that are trained; in eval mode of those that serve."""
        depths = self.config.trained_steps if self.training else self.draft_depth
        features = normalise(batch.features[:, :, 0]).to(self.read.weight.dtype)
        read = self.read(frozen_embedding(target, batch.tokens, self.read.weight))
        states = [torch.zeros_like(features)]
        for k in range(depths):  # after it states[-1][t] has read tokens[t + 1] to tokens[t + 1 + k]
            states.append(F.silu(read.roll(-1 - k, dims=1) + self.recur(states[-1])))  # no label needs what rolls in
        return depth_losses(
            batch,
            target,
            self.vocabulary,
            depths,
            lambda k, rows, anchors: self._head(features[rows, anchors], states[k + 1][rows, anchors]),
            self.config.loss,
            self.config.depth_weight,
            num_items,
            ranked=not self.training,
        )

    @property
    def fixed_topology(self) -> TreeTopology | None:
        """The static tree, unless beams or a dynamic tree are set."""
        return None if self.config.tree == "beams" else super().fixed_topology

    @property
    def tree_told(self) -> str:
        """What trees are drawn."""
        if self.dynamic is None and self.config.tree == "beams":
            return f"beams, {self.config.beam_width} x {self.draft_depth}"
        return super().tree_told

    def set_topology(self, paths: Sequence[Sequence[int]]) -> None:
        """Use another static tree from now on, in place of beams."""
        super().set_topology(paths)
        self.config.tree = "topology"

    def _head(self, h: Tensor, s: Tensor) -> Tensor:
        """Return scores [..., Vd] for normalised states h and recurrent states s, both [..., D]."""
        return self.projection(self.blocks(torch.cat([h, s], dim=-1)) * self.logit_scale())

    def _laws(self, feature: Tensor, target: TargetView) -> PathLaws:
        """Return what answers for one level of nodes after the other, from the root on."""
        h, states = normalise(feature)[:, None], torch.zeros_like(feature)[:, None]
        rows = torch.arange(len(feature), device=feature.device)[:, None]

        def laws(tokens: Tensor, parents: Tensor) -> Tensor:
            nonlocal states
            states = F.silu(
                self.read(frozen_embedding(target, tokens, self.read.weight)) + self.recur(states[rows, parents])
            )
            return self._head(h.expand_as(states), states)

        return laws


PathLaws = Callable[[Tensor, Tensor], Tensor]
"""Unnormalised log-laws [B, P, Vd] of what follows nodes with tokens [B, P] and parents [B, P], both long: the places
of their parents among the nodes of the call before."""


@dataclass(frozen=True, slots=True)
class Beams:
    """What a beam search found, best first.

    tokens [B, W, K] long. values [B, W] fp32: log-probabilities, -inf for beams with an impossible token. kept: all
    beginnings that the search kept on the way, level by level, as `best_subtree` takes them: tokens, parents, values
    [B, M].
    """

    tokens: Tensor
    values: Tensor
    kept: tuple[Tensor, Tensor, Tensor]


def search_beams(
    root: Tensor, laws: PathLaws, width: int, depth: int, request: DraftRequest, vocabulary: DraftVocabulary
) -> Beams:
    """Search the `width` most probable continuations of `depth` tokens, keeping as many on every level.

    root [B] long. Where noise is shared, the probabilities are those of winning the race, the noise being known.
    """
    rows = torch.arange(len(root), device=root.device)[:, None]
    tokens, owner = root[:, None], torch.zeros_like(root[:, None])
    values, beams = torch.zeros_like(tokens, dtype=torch.float32), tokens[:, :, None][:, :, :0]
    kept, children = [], min(width, vocabulary.size)
    for level in range(depth):
        ahead = request.root_positions[:, None] + 1 + level
        scores = laws(tokens, owner)
        found = candidates(scores, children, request.proposal, request.sampling, ahead, vocabulary.chosen)
        scored = (values[:, :, None] + found.confidence()).flatten(1)
        best = scored.topk(min(width, scored.shape[1]), dim=1)
        owner = best.indices // children
        tokens = vocabulary.to_target(found.index.flatten(1).gather(1, best.indices))
        beams = torch.cat([beams[rows, owner], tokens[:, :, None]], dim=2)
        # below its parent's, however certain: the best of all beginnings are then connected
        limit = torch.nextafter(values.gather(1, owner), values.new_full((), -torch.inf))
        values = torch.minimum(best.values, limit)
        before = sum(part[0].shape[1] for part in kept[:-1])
        kept.append((tokens, owner + before if level else owner - 1, values))
    all_tokens, parents, all_values = (torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))
    return Beams(beams, values, (all_tokens, parents, all_values))


def folded(root: Tensor, beams: Beams, request: DraftRequest) -> DraftTree:
    """Fold beams into a tree; one host sync.

    Where they might exceed the request's budget, the tree holds the most probable of all beginnings that the search
    kept. Impossible beams and rows that take no part cost no nodes: they become copies of the best beam.
    """
    if request.max_nodes is not None and beams.kept[0].shape[1] >= request.max_nodes:
        return best_subtree(root, *beams.kept, request.max_nodes)
    useful = (beams.values > -torch.inf) & request.active[:, None]
    return from_beams(root, torch.where(useful[:, :, None], beams.tokens, beams.tokens[:, :1]))
