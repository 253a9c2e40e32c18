"""Multi-token prediction as a drafter: one block that goes on from its own state (arXiv 2412.19437, section 2.2).

A slot t pairs the target's final state at position t with the token it then said, x_(t+1). Each is normalised with a
weight of its own, a projection brings the pair back to D, a decoder layer follows, and the target's own head on the
norm of what comes out guesses x_(t+2). A deeper guess puts that output in the place of the state, the next token in the
place of x_(t+1), and moves one position on: one block for all depths, as FastMTP has it, with depth k weighing
0.6^(k - 1) before the weights are made to add up to 1. Depth k of this project is the paper's module k.

Released training code lets a step attend to its own step alone, which is not the cache of service; here slots see the
target's true states up to their own position and their own later steps (training-time test, see `AlignedSteps`).

Ours besides: there is no loss on the target itself, which stays as it is, and the projection starts as the copy of the
state, so that the head reads something of the right size from the first step on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..core.decoder_layer import DecoderLayer, layer_settings
from ..core.tree import DraftTree
from .base import DraftBatch, Drafter, DraftRequest, DraftState, FeatureLayer, LossOutput, Observed, TargetView
from .config import LOSSES, DrafterConfig, check_choice
from .growth import grow
from .losses import depth_losses
from .modules import LogitScale, head_scores, unsure_scale
from .slots import Feed, SlotState, read_slots, slot_laws, unrolled

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
)  # fmt: skip
"""Used until training has calibrated one: 14 draft tokens, 3 deep."""


class MtpConfig(DrafterConfig):
    """Configuration of a multi-token prediction drafter.

    depth: tokens guessed ahead, and steps that are trained. layer: sizes and rotary parameters of the decoder layer,
    see `layer_settings`; None means the target's own. projection: "shared" (the target's own head, frozen) or "own" (a
    copy that is trained). loss: "kl", "reverse_kl", "jsd", "tv", "lk" (to the target's law) or "ce" (the data's next
    token). depth_weight: depth k weighs depth_weight^k; the weights add up to 1.
    """

    model_type = "headstart-mtp"

    def __init__(
        self,
        depth: int = 3,
        layer: dict[str, Any] | None = None,
        projection: str = "shared",
        loss: str = "kl",
        depth_weight: float = 0.6,
        **kwargs: Any,
    ) -> None:
        if not 1 <= depth <= 16:
            raise ValueError(f"depth must be from 1 to 16, but is {depth}")
        if not 0 < depth_weight <= 1:
            raise ValueError(f"depth_weight must be above 0 and at most 1, but is {depth_weight}")
        check_choice("projection", projection, ("shared", "own"))
        check_choice("loss", loss, LOSSES)
        self.depth = depth
        self.layer = layer
        self.projection = projection
        self.loss = loss
        self.depth_weight = depth_weight
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Size the decoder layer like the target's."""
        return {"layer": layer_settings(target.config)}


class MtpDrafter(Drafter):
    """Two norms, a projection, a decoder layer and a norm, used again for every depth; the target's head."""

    config_class = MtpConfig
    config: MtpConfig
    yields_law = True
    default_topology: Sequence[Sequence[int]] = DEFAULT_TOPOLOGY

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        if config.layer is None:
            raise ValueError("an MTP drafter needs the sizes of its layer; build_drafter takes them from the target")
        width, epsilon = config.target_width, float(config.layer["rms_norm_eps"])
        self.token_norm = LlamaRMSNorm(width, epsilon)
        self.state_norm = LlamaRMSNorm(width, epsilon)
        self.input_projection = nn.Linear(2 * width, width, bias=False)
        self.layer = DecoderLayer(width, config.layer)
        self.norm = LlamaRMSNorm(width, epsilon)
        own = config.projection == "own"
        self.projection = nn.Linear(width, self.vocabulary.size, bias=False) if own else None
        self.logit_scale = LogitScale()
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """As deep as it was trained to go on from its own outputs."""
        return self.config.depth

    @property
    def feature_layers(self) -> tuple[FeatureLayer, ...]:
        """The state after the final norm."""
        return ("final",)

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start from the copy of the state, with scores that differ by about 1; copy the head if that is trained."""
        width, rows = self.config.target_width, target.head_rows(self.vocabulary.chosen)
        self.input_projection.weight[:, width:] = torch.eye(width)
        self.logit_scale.start_at(unsure_scale(rows))
        if self.projection is not None:
            self.projection.weight.copy_(rows)

    def init_state(self, batch_size: int) -> SlotState:
        """Return an empty cache."""
        return SlotState.empty(batch_size, self.norm.weight)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Read the new slots with the target's true states; the last pairs the newest state with the root."""
        assert isinstance(state, SlotState)
        read_slots(state, observed, observed.features[:, :, 0], self.layer, self._feed(target))

    @torch.no_grad()
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Grow a tree, level by level, every node from what the block made of its parent."""
        assert isinstance(state, SlotState)
        laws = slot_laws(state, request, self.layer, self._feed(target), lambda x: self._scores(x, target))
        tree = grow(self.tree_shape(request), state.root, laws, request, self.vocabulary)
        state.cache.drop_block()
        return tree

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the weighted loss of all depths over the trained labels; ranks of the labels when not training."""
        depth = self.config.depth
        states = unrolled(batch, batch.features[:, :, 0], self.layer, self._feed(target), depth)
        weights = [self.config.depth_weight**k for k in range(depth)]
        return depth_losses(
            batch,
            target,
            self.vocabulary,
            depth,
            lambda k, rows, anchors: self._scores(states[k][rows, anchors], target),
            self.config.loss,
            [weight / sum(weights) for weight in weights],
            num_items,
            ranked=not self.training,
        )

    def _feed(self, target: TargetView) -> Feed:
        """Return how slots go into the layer; every step learns through the ones before it."""

        def feed(states: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
            with torch.no_grad():
                embedded = target.embed(tokens).to(self.norm.weight.dtype)
            pair = [self.token_norm(embedded), self.state_norm(states.to(embedded.dtype))]
            return self.input_projection(torch.cat(pair, dim=-1)), None

        return feed

    def _scores(self, states: Tensor, target: TargetView) -> Tensor:
        """Return scores [..., Vd] from the block's outputs [..., D]."""
        return head_scores(self.norm(states), self.logit_scale(), self.projection, target, self.vocabulary)
