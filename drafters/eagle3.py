"""EAGLE-3: one decoder layer over fused states of the target, trained on its own outputs (arXiv 2503.01840).

A slot t holds what the target thought at position t, g_t = fc of three raw block outputs (low, middle, high), and the
token it then said, x_(t+1). From both the layer makes s_t, and the head on its norm guesses x_(t+2). A deeper guess
puts s_t in the place of g_t, the next token in the place of x_(t+1), and moves one position on; so depth k of this
project is step k - 1 of training-time test, which runs these steps on every slot at once.

As in the released code, not the paper's figure: there is no projection from [g; e] to D; the layer's queries, keys and
values read [norm(e); norm(g)], and the un-normalised g is the residual stream. There is no loss on features.

Ours besides. The three states are scaled to unit root mean square first and the logits have a learned scale, so that
one learning rate fits any target; `normalise_sources=False` is for weights trained elsewhere. The official head starts
at random, which hundreds of thousands of dialogues make up for; ours starts as the target's own rows (unsure: small
scores), and fc as the copy of the highest state, the nearest to those rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..core.decoder_layer import DecoderLayer, layer_settings
from ..core.tree import DraftTree
from .base import (
    DraftBatch,
    Drafter,
    DraftRequest,
    DraftState,
    FeatureLayer,
    LossOutput,
    Observed,
    TargetView,
)
from .config import LOSSES, DrafterConfig, check_choice
from .growth import grow
from .losses import depth_losses
from .modules import LogitScale, normalise, unsure_scale
from .slots import Feed, SlotState, read_slots, slot_laws, unrolled

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip
"""Used until training has calibrated one, where the tree does not follow confidence: 19 draft tokens, 5 deep."""

SOURCES = 3


def sources_of(num_layers: int) -> list[int]:
    """Return the blocks (0-based) whose outputs are fused: 1, L/2 - 1 and L - 4, in targets of 10 blocks or more.

    Distinct where there are three blocks, and always valid.

    Example: 32 blocks give [1, 15, 28], 4 give [1, 2, 3], 2 give [0, 0, 1].
    """
    low = 1
    middle = max(low + 1, num_layers // 2 - 1)
    high = max(middle + 1, num_layers - 4)
    too_far = max(0, high - (num_layers - 1))
    return [max(0, block - too_far) for block in (low, middle, high)]


class Eagle3Config(DrafterConfig):
    """Configuration of an EAGLE-3 drafter.

    fused_layers: the three blocks (0-based) whose raw outputs it reads, low to high; None: see `sources_of`.
    normalise_sources: scale each of them to unit root mean square. layer: sizes and rotary parameters of the decoder
    layer, see `layer_settings`; None means the target's own. ttt_steps: K, steps of training-time test, and so the
    depth of its trees. loss: "kl", "reverse_kl", "jsd", "tv", "lk" (to the target's law) or "ce" (the data's next
    token). depth_weight: depth k weighs depth_weight^k in the loss (the official weights, 0.8^(k - 1), differ by a
    constant factor).
    """

    model_type = "headstart-eagle3"

    def __init__(
        self,
        fused_layers: list[int] | None = None,
        normalise_sources: bool = True,
        layer: dict[str, Any] | None = None,
        ttt_steps: int = 5,
        loss: str = "kl",
        depth_weight: float = 0.8,
        **kwargs: Any,
    ) -> None:
        if fused_layers is not None and len(fused_layers) != SOURCES:
            raise ValueError(f"fused_layers must be {SOURCES} block numbers, but are {list(fused_layers)}")
        if not 1 <= ttt_steps <= 16:
            raise ValueError(f"ttt_steps must be from 1 to 16, but is {ttt_steps}")
        check_choice("loss", loss, LOSSES)
        self.fused_layers = None if fused_layers is None else list(fused_layers)
        self.normalise_sources = normalise_sources
        self.layer = layer
        self.ttt_steps = ttt_steps
        self.loss = loss
        self.depth_weight = depth_weight
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Fuse a low, a middle and a high block; size the decoder layer like the target's."""
        sources = sources_of(int(target.config.num_hidden_layers))
        return {"fused_layers": sources, "layer": layer_settings(target.config)}


class Eagle3Drafter(Drafter):
    """Fused states, one decoder layer that goes on from its own output, and a head."""

    config_class = Eagle3Config
    config: Eagle3Config
    yields_law = True
    default_topology: Sequence[Sequence[int]] = DEFAULT_TOPOLOGY

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        width = config.target_width
        if config.fused_layers is None or config.layer is None:
            raise ValueError(
                "an EAGLE-3 drafter needs fused_layers and layer, but one is None; build_drafter sets both"
            )
        self.fc = nn.Linear(SOURCES * width, width, bias=False)
        epsilon = float(config.layer["rms_norm_eps"])
        self.embedding_norm = LlamaRMSNorm(width, epsilon)
        self.state_norm = LlamaRMSNorm(width, epsilon)
        self.layer = DecoderLayer(width, config.layer, attention_input=2 * width, input_norm=False)
        self.norm = LlamaRMSNorm(width, epsilon)
        self.head = nn.Linear(width, self.vocabulary.size, bias=False)
        self.logit_scale = LogitScale()
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """As deep as it was trained to go on from its own outputs."""
        return self.config.ttt_steps

    @property
    def feature_layers(self) -> tuple[FeatureLayer, ...]:
        """The low, the middle and the high block."""
        return tuple(self.config.fused_layers or ())

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start as the target's head on the highest of the fused states, with scores that differ by about 1."""
        width, rows = self.config.target_width, target.head_rows(self.vocabulary.chosen)
        self.head.weight.copy_(rows)
        self.logit_scale.start_at(unsure_scale(rows))
        self.fc.weight.zero_()
        self.fc.weight[:, -width:] = torch.eye(width)

    def init_state(self, batch_size: int) -> SlotState:
        """Return an empty cache."""
        return SlotState.empty(batch_size, self.norm.weight)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Read the new slots with the target's true states; the last pairs the newest state with the root."""
        assert isinstance(state, SlotState)
        read_slots(state, observed, self._fused(observed.features), self.layer, self._feed(target))

    @torch.no_grad()
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Grow a tree, level by level, every node from what the layer made of its parent."""
        assert isinstance(state, SlotState)
        laws = slot_laws(state, request, self.layer, self._feed(target), self._scores)
        tree = grow(self.tree_shape(request), state.root, laws, request, self.vocabulary)
        state.cache.drop_block()
        return tree

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the weighted loss of all steps over the trained labels; ranks of the labels when not training."""
        steps = self.config.ttt_steps
        states = unrolled(batch, self._fused(batch.features), self.layer, self._feed(target), steps)
        return depth_losses(
            batch,
            target,
            self.vocabulary,
            steps,
            lambda k, rows, anchors: self._scores(states[k][rows, anchors]),
            self.config.loss,
            self.config.depth_weight,
            num_items,
            ranked=not self.training,
        )

    def _fused(self, features: Tensor) -> Tensor:
        """Turn the target's states [..., 3, D] into g [..., D]."""
        if self.config.normalise_sources:
            features = normalise(features)
        return self.fc(features.to(self.fc.weight.dtype).flatten(-2))

    def _feed(self, target: TargetView) -> Feed:
        """Return how slots go into the layer: the state as it is, and both normalised for attention to read.

        States are not detached: every step learns through the ones before it.
        """

        def feed(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                embedded = target.embed(tokens).to(states.dtype)
            return states, torch.cat([self.embedding_norm(embedded), self.state_norm(states)], dim=-1)

        return feed

    def _scores(self, states: Tensor) -> Tensor:
        """Return scores [..., Vd] from the layer's outputs [..., D]."""
        return self.head(self.norm(states) * self.logit_scale())
