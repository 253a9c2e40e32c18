"""EAGLE-1 and EAGLE-2: the target's next state, guessed from its last one and the token it said (arXiv 2401.15077).

Slot t pairs the state z_t (after the final norm) with the token x_(t+1). One decoder layer on fc([e(x_(t+1)); z_t])
guesses z_(t+1), from which the target's own head, frozen, tells what x_(t+2) may be. A deeper guess takes the guessed
state for the true one. Committed slots are always read again with true states. EAGLE-2 (arXiv 2406.16858) is the same
drafter with `dynamic_tree` set.

Training compares states (smooth-L1) and laws. EAGLE-1 learns one step and never meets its own guesses; with
`harmonised_steps` above 1 it does, on the very slots it would see when serving (HASS, arXiv 2408.15766): guesses are
detached where they are fed back, hidden slots are hidden (the released code leaves them a weight of exp(0)).

Where paper and released code differ: the noise on states follows the code, narrower in longer rows, but is not wider
than the paper's in short ones; labels count by the mask of the token that is guessed, not of the slot. Ours besides:
states are divided by one measured number, their usual root mean square, so that noise, losses and learning rate do not
depend on the target while the frozen head still gets true states; embeddings are scaled to root mean square 1; the
logits have a learned scale, which starts as that number; fc starts as the copy of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.decoder_layer import DecoderLayer, layer_settings
from ..core.tree import DraftTree
from .base import (
    DraftBatch,
    Drafter,
    DraftRequest,
    DraftState,
    LossOutput,
    Observed,
    TargetView,
)
from .config import DrafterConfig, check_choice, check_counts
from .divergences import soft_cross_entropy
from .growth import grow
from .losses import Guessed, depth_losses
from .modules import LogitScale, frozen_embedding, head_scores, typical_size
from .slots import SlotState, read_slots, slot_laws, unrolled

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 0, 0),
)  # fmt: skip
"""Used until training has calibrated one: 17 draft tokens, wide at the first depths, five deep."""

NOISE_LENGTH = 512
"""Tokens of a row from which on noise becomes narrower."""


class EagleConfig(DrafterConfig):
    """Configuration of an EAGLE-1 or EAGLE-2 drafter.

    depth: K, how many tokens ahead it may guess; each costs a pass of the layer. layer: sizes and rotary parameters of
    the decoder layer, see `layer_settings`; None means the target's own. bias: whether fc, which reads embedding and
    state, has one. projection: "shared" (the target's own head, frozen) or "own" (a copy that is trained).
    regression_weight, law_weight: of smooth-L1 on states and of the cross-entropy to the target's law. top_k_tokens,
    top_k_weight: of HASS's cross-entropy, over so many of the target's likeliest tokens alone. feature_noise:
    half-width of the uniform noise on the target's states, in units of their size. harmonised_steps: steps that are
    trained, those after the first on its own states (HASS); 1 is EAGLE-1.
    """

    model_type = "headstart-eagle"

    def __init__(
        self,
        depth: int = 5,
        layer: dict[str, Any] | None = None,
        bias: bool = True,
        projection: str = "shared",
        regression_weight: float = 1.0,
        law_weight: float = 0.1,
        top_k_tokens: int = 10,
        top_k_weight: float = 0.0,
        feature_noise: float = 0.1,
        harmonised_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        if not 1 <= depth <= 16:
            raise ValueError(f"depth must be from 1 to 16, but is {depth}")
        if not 1 <= harmonised_steps <= depth:
            raise ValueError(f"harmonised_steps must be from 1 to depth ({depth}), but is {harmonised_steps}")
        check_choice("projection", projection, ("own", "shared"))
        weights = (regression_weight, law_weight, top_k_weight, feature_noise)
        if min(weights) < 0 or max(law_weight, top_k_weight) == 0:
            raise ValueError(
                "regression_weight, law_weight, top_k_weight and feature_noise must be at least 0, and law_weight or "
                f"top_k_weight more, but they are {', '.join(map(str, weights))}"
            )
        check_counts(top_k_tokens=top_k_tokens)
        self.depth = depth
        self.layer = layer
        self.bias = bias
        self.projection = projection
        self.regression_weight = regression_weight
        self.law_weight = law_weight
        self.top_k_tokens = top_k_tokens
        self.top_k_weight = top_k_weight
        self.feature_noise = feature_noise
        self.harmonised_steps = harmonised_steps
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Size the decoder layer like the target's."""
        return {"layer": layer_settings(target.config)}


class EagleDrafter(Drafter):
    """One decoder layer that guesses the target's next state, and the target's head on it."""

    config_class = EagleConfig
    config: EagleConfig
    yields_law = True
    default_topology: Sequence[Sequence[int]] = DEFAULT_TOPOLOGY
    usual_size: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        if config.layer is None:
            raise ValueError("an EAGLE drafter needs the sizes of its layer; build_drafter takes them from the target")
        width = config.target_width
        self.fc = nn.Linear(2 * width, width, bias=config.bias)
        self.layer = DecoderLayer(width, config.layer, input_norm=False)
        own = config.projection == "own"
        self.projection = nn.Linear(width, self.vocabulary.size, bias=False) if own else None
        self.logit_scale = LogitScale()
        self.register_buffer("usual_size", torch.ones(1))
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """As deep as the configuration allows; nothing in the drafter bounds it."""
        return self.config.depth

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Measure the size of the target's states and start as their copy; copy the head if that is to be trained."""
        self.usual_size.fill_(typical_size(target))
        width = self.config.target_width
        self.fc.weight[:, width:] = torch.eye(width)
        self.logit_scale.start_at(float(self.usual_size))
        if self.projection is not None:
            self.projection.weight.copy_(target.head_rows(self.vocabulary.chosen))

    def init_state(self, batch_size: int) -> SlotState:
        """Return an empty cache."""
        return SlotState.empty(batch_size, self.layer.layer.post_attention_layernorm.weight)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Read the new slots with the target's true states; the last pairs the newest state with the root."""
        assert isinstance(state, SlotState)
        read_slots(state, observed, self._scaled(observed.features), self.layer, self._feed(target))

    @torch.no_grad()
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Grow a tree from the guessed states, level by level."""
        assert isinstance(state, SlotState)
        laws = slot_laws(state, request, self.layer, self._feed(target), lambda x: self._scores(x, target))
        tree = grow(self.tree_shape(request), state.root, laws, request, self.vocabulary)
        state.cache.drop_block()
        return tree

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the loss of the trained steps; when not training, also hits and ranks at every depth."""
        truth, trained = self._scaled(batch.features), self.config.harmonised_steps
        depths = trained if self.training else self.config.depth
        read = truth + self._noise(batch) if self.training else truth
        labels = truth.detach()  # a target that is trained too must not be drawn to its drafter's guesses
        states = unrolled(batch, read, self.layer, self._feed(target, read), depths)

        def lost(guessed: Guessed) -> Tensor:
            state = states[guessed.depth][guessed.rows, guessed.anchors]
            return self._lost(guessed, state, labels[guessed.rows, (guessed.labels_at - 1).clamp(min=0)])

        return depth_losses(
            batch,
            target,
            self.vocabulary,
            depths,
            lambda k, rows, anchors: self._scores(states[k][rows, anchors], target),
            lost,
            [1.0] * trained + [0.0] * (depths - trained),
            num_items,
            ranked=not self.training,
        )

    def _lost(self, guessed: Guessed, state: Tensor, truth: Tensor) -> Tensor:
        """Return the loss [M] of guessed states [M, D], given the true ones."""
        config = self.config
        lost = config.regression_weight * F.smooth_l1_loss(state.float(), truth.float(), reduction="none").mean(-1)
        lost = lost + config.law_weight * soft_cross_entropy(guessed.scores, guessed.law)
        if config.top_k_weight:
            best = guessed.law.topk(min(config.top_k_tokens, guessed.law.shape[-1]), dim=-1)
            said = guessed.scores.float().log_softmax(-1).gather(-1, best.indices)
            lost = lost - config.top_k_weight * (best.values * said).sum(-1)
        return lost

    def _noise(self, batch: DraftBatch) -> Tensor:
        """Return noise [B, T, D]; like dropout it takes torch's own generator, which the trainer seeds and resumes."""
        in_segment = torch.zeros_like(batch.segments).scatter_add(1, batch.segments, batch.token_mask.long())
        lengths = in_segment.gather(1, batch.segments).clamp(min=NOISE_LENGTH)  # of the row that a token belongs to
        width = self.config.feature_noise * NOISE_LENGTH / lengths
        like = self.fc.weight
        noise = torch.rand(*batch.tokens.shape, self.config.target_width, device=like.device, dtype=like.dtype)
        return (2 * noise - 1) * width[..., None].to(like.dtype)

    def _scaled(self, features: Tensor) -> Tensor:
        """Turn the target's states [B, Q, 1, D] into ones of size about 1 [B, Q, D]."""
        return features[:, :, 0].to(self.fc.weight.dtype) / self.usual_size

    def _feed(self, target: TargetView, told: Tensor | None = None):
        """Return how slots go into the layer; states are detached, so no step learns through the one before.

        told: the states that come from the target, and not from a step before.
        """

        def feed(states: Tensor, tokens: Tensor) -> tuple[Tensor, None]:
            embedded = frozen_embedding(target, tokens, self.fc.weight)
            given = states if states is told else states.detach()
            return self.fc(torch.cat([embedded, given.to(embedded.dtype)], dim=-1)), None

        return feed

    def _scores(self, states: Tensor, target: TargetView) -> Tensor:
        """Return scores [..., Vd] from guessed states [..., D]."""
        return head_scores(states, self.logit_scale(), self.projection, target, self.vocabulary)
