"""Medusa: K heads on the target's last state, each guessing one token further ahead (arXiv 2401.10774).

Head k (1-based) at position t guesses tokens[t + 1 + k]; the language-model head owns tokens[t + 1]. The heads do not
see each other's guesses, so one pass gives the candidates of all depths, and a static topology crosses them.

Where the paper and the released code differ: loss weights are 0.8^k as in the paper; a head owns its projection, which
starts as a copy of the language-model head (three released versions do it in three ways); ResBlocks are distinct (the
released code repeats one). Ours besides: the state is scaled to unit root mean square and each head has a learned logit
scale, so that one learning rate fits any target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.proposals import candidates
from ..core.tree import DraftTree, DynamicTree, TreeTopology
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
from .growth import grow, static_tree
from .losses import depth_losses
from .modules import LogitScale, ResBlock, head_scores, normalise, typical_size
from .states import NewestState, at_end

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (4,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0),
    (0, 0, 0, 0),
)  # fmt: skip
"""Used until training has calibrated one: 15 draft tokens, wide at the first depth."""


class MedusaConfig(DrafterConfig):
    """Configuration of Medusa heads.

    num_heads: K, each guesses one token further ahead. num_layers: ResBlocks of each head. projection: "own" (a copy of
    the language-model head that is trained) or "shared" (the target's own head, frozen). loss: "kl", "reverse_kl",
    "jsd", "tv", "lk" (to the target's law) or "ce" (the data's next token). depth_weight: head k weighs depth_weight^k
    in the loss.
    """

    model_type = "headstart-medusa"

    def __init__(
        self,
        num_heads: int = 4,
        num_layers: int = 1,
        projection: str = "own",
        loss: str = "kl",
        depth_weight: float = 0.8,
        **kwargs: Any,
    ) -> None:
        check_counts(num_heads=num_heads, num_layers=num_layers)
        check_choice("projection", projection, ("own", "shared"))
        check_choice("loss", loss, LOSSES)
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.projection = projection
        self.loss = loss
        self.depth_weight = depth_weight
        super().__init__(**kwargs)


class MedusaDrafter(Drafter):
    """K heads of ResBlocks and a projection."""

    config_class = MedusaConfig
    config: MedusaConfig
    topology: TreeTopology
    yields_law = True
    default_topology = DEFAULT_TOPOLOGY

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        width = config.target_width
        heads = range(config.num_heads)
        self.blocks = nn.ModuleList(nn.Sequential(*(ResBlock(width) for _ in range(config.num_layers))) for _ in heads)
        self.projections = nn.ModuleList()
        if config.projection == "own":
            self.projections.extend(nn.Linear(width, self.vocabulary.size, bias=False) for _ in heads)
        self.logit_scale = LogitScale(config.num_heads)
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """One depth a head."""
        return self.config.num_heads

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start every head as the target's language-model head: same rows, and the scale that the state had."""
        rows = target.head_rows(self.vocabulary.chosen)
        for projection in self.projections:
            projection.weight.copy_(rows)  # type: ignore[operator]
        self.logit_scale.start_at(typical_size(target))

    def init_state(self, batch_size: int) -> NewestState:
        """Return zero features."""
        return NewestState.empty(batch_size, self.config.target_width, self.logit_scale.log)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Keep the newest feature and root of each row."""
        assert isinstance(state, NewestState)
        state.keep(observed, at_end(observed.features[:, :, 0], observed.lengths))

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Cross the candidates of every head along the static topology.

        When the target samples, head k's scores get the noise the target will draw with at that position: the guess is
        the very draw the target would make if its law were the head's.
        """
        assert isinstance(state, NewestState)
        shape, chosen = self.tree_shape(request), self.vocabulary.chosen
        if isinstance(shape, TreeTopology):
            shape = shape.cut(request.max_nodes, request.max_depth)
        x = normalise(state.feature)
        scores = self._scores(x, shape.depth, target)
        if isinstance(shape, DynamicTree):
            laws = lambda level: scores[:, level.depth, None].expand(-1, level.tokens.shape[1], -1)  # noqa: E731
            return grow(shape, state.root, laws, request, self.vocabulary)
        ahead = request.root_positions[:, None] + 1 + torch.arange(shape.depth, device=x.device)
        found = candidates(scores, shape.width, request.proposal, request.sampling, ahead, chosen)
        return static_tree(shape, state.root, found, self.vocabulary)

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the weighted loss of all heads over the trained labels; ranks of the labels when not training."""
        features = normalise(batch.features[:, :, 0]).to(self.logit_scale.log.dtype)
        return depth_losses(
            batch,
            target,
            self.vocabulary,
            self.config.num_heads,
            lambda k, rows, anchors: self._head(k, features[rows, anchors], target),
            self.config.loss,
            self.config.depth_weight,
            num_items,
            ranked=not self.training,
        )

    def _scores(self, x: Tensor, depth: int, target: TargetView) -> Tensor:
        """Return the scores [B, depth, Vd] of the first heads for normalised states [B, D]."""
        if self.config.projection == "own":
            return torch.stack([self._head(k, x, target) for k in range(depth)], dim=1)
        scale = self.logit_scale()
        states = torch.stack([self.blocks[k](x) * scale[k] for k in range(depth)], dim=1)
        return target.logits(states.to(target.dtype), self.vocabulary.chosen)  # the head's rows are gathered once

    def _head(self, head: int, x: Tensor, target: TargetView) -> Tensor:
        """Return the scores [M, Vd] of one head for normalised states [M, D]."""
        projection = self.projections[head] if self.projections else None
        return head_scores(self.blocks[head](x), self.logit_scale()[head], projection, target, self.vocabulary)  # type: ignore[arg-type]
