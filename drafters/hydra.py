"""Hydra: heads that see each other's guesses; Hydra++: deeper heads behind one decoder layer (arXiv 2402.05109).

Head k (1-based) at position t reads the target's state z_t and the embeddings of tokens[t + 1 .. t + k], and guesses
tokens[t + 1 + k]. So every node of a tree asks for its children's law with the tokens of its own path, level by level.

Hydra++ is a matter of settings: `prefix_attention` runs a decoder layer over the states of all committed positions, and
its output takes the place of z_t in every head; `num_layers: 4` and `loss: kl` are its deeper heads and its teacher.
The layer reads no tokens, so nothing of a draft tree ever enters its cache.

Where the paper and the released code differ: the blocks of a head are distinct (the released code repeats one), and the
projection has a bias (as in the code). Ours besides: state and embeddings are scaled to unit root mean square and each
head has a learned logit scale, so that one learning rate fits any target. The released code leaves the residual path of
the first block to chance; ours starts by passing z_t on, and the prefix layer by changing nothing, so that every head
starts as the language-model head, like Medusa's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import masks
from ..core.decoder_layer import DecoderLayer, layer_settings
from ..core.kv_cache import RaggedCache
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
from .config import LOSSES, DrafterConfig, check_choice, check_counts
from .growth import Level, grow
from .losses import depth_losses
from .modules import LogitScale, ResBlock, ZeroLinear, frozen_embedding, normalise, typical_size
from .states import NewestState, at_end

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0),
)  # fmt: skip
"""Used until training has calibrated one: 15 draft tokens."""


class HydraConfig(DrafterConfig):
    """Configuration of Hydra heads.

    num_heads: K, each guesses one token further ahead. num_layers: blocks of each head, the first of which takes
    everything that the head reads.
    loss: "kl", "reverse_kl", "jsd", "tv", "lk" (to the target's law) or "ce" (the data's next token). depth_weight:
    head k weighs depth_weight^k.
    prefix_attention: Hydra++'s decoder layer. layer: its sizes and rotary parameters, see `layer_settings`; None means
    the target's own.
    """

    model_type = "headstart-hydra"

    def __init__(
        self,
        num_heads: int = 4,
        num_layers: int = 1,
        loss: str = "kl",
        depth_weight: float = 1.0,
        prefix_attention: bool = False,
        layer: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_counts(num_heads=num_heads, num_layers=num_layers)
        check_choice("loss", loss, LOSSES)
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.loss = loss
        self.depth_weight = depth_weight
        self.prefix_attention = prefix_attention
        self.layer = layer if prefix_attention else None
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Size the prefix layer like the target's own layers."""
        return {"layer": layer_settings(target.config)}


class FirstBlock(nn.Module):
    """W_r c + SiLU(W c + b) of everything a head reads, c: the block that changes the width. W and b start at zero."""

    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.residual = nn.Linear(parts * width, width)
        self.linear = ZeroLinear(parts * width, width)

    def forward(self, c: Tensor) -> Tensor:
        """Map [..., parts * D] to [..., D]."""
        return self.residual(c) + F.silu(self.linear(c))

    @torch.no_grad()
    def pass_first_part(self) -> None:
        """Start as the identity on the first part."""
        self.residual.weight.copy_(torch.eye(*self.residual.weight.shape))
        self.residual.bias.zero_()


class PrefixLayer(nn.Module):
    """A decoder layer over the target's states, and the norm that keeps their scale."""

    def __init__(self, width: int, settings: dict[str, Any]) -> None:
        super().__init__()
        self.decoder = DecoderLayer(width, settings)
        self.norm = nn.RMSNorm(width, eps=float(settings["rms_norm_eps"]))

    def forward(self, x: Tensor, positions: Tensor, visible: Tensor, cache: RaggedCache | None = None) -> Tensor:
        """Map states [B, Q, D] at positions [B, Q] to [B, Q, D]; visible [B, Q, C] as for `DecoderLayer`."""
        return self.norm(self.decoder(x, positions, visible, None if cache is None else cache.kv))

    @torch.no_grad()
    def change_nothing(self) -> None:
        """Start as the identity on states of unit root mean square."""
        layer = self.decoder.layer
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


class HydraDrafter(Drafter):
    """K heads that read the state and the tokens before their own, and the prefix layer of Hydra++."""

    config_class = HydraConfig
    config: HydraConfig
    yields_law = True
    default_topology = DEFAULT_TOPOLOGY

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        width = config.target_width
        self.blocks = nn.ModuleList(
            nn.Sequential(FirstBlock(head + 2, width), *(ResBlock(width) for _ in range(config.num_layers - 1)))
            for head in range(config.num_heads)
        )
        self.projections = nn.ModuleList(nn.Linear(width, self.vocabulary.size) for _ in range(config.num_heads))
        self.logit_scale = LogitScale(config.num_heads)
        self.prefix: PrefixLayer | None = None
        if config.prefix_attention:
            if config.layer is None:
                raise ValueError("prefix_attention needs layer, its sizes; build_drafter takes them from the target")
            self.prefix = PrefixLayer(width, config.layer)
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """One depth a head."""
        return self.config.num_heads

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start every head as the target's language-model head on z_t: same rows, and the scale that the state had."""
        rows = target.head_rows(self.vocabulary.chosen)
        for blocks, projection in zip(self.blocks, self.projections, strict=True):
            blocks[0].pass_first_part()  # type: ignore[index]
            projection.weight.copy_(rows)  # type: ignore[operator]
            projection.bias.zero_()  # type: ignore[operator]
        self.logit_scale.start_at(typical_size(target))
        if self.prefix is not None:
            self.prefix.change_nothing()

    def init_state(self, batch_size: int) -> NewestState:
        """Return zero features and, for the prefix layer, an empty cache."""
        return NewestState.empty(batch_size, self.config.target_width, self.logit_scale.log, self.prefix is not None)

    @torch.no_grad()
    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Keep the newest state and root of each row; the prefix layer reads all that is new, behind its cache."""
        assert isinstance(state, NewestState)
        lengths, width = observed.lengths, observed.read_tokens.shape[1]
        states = self._scaled(observed.features)
        if self.prefix is not None and state.cache is not None:
            inside = torch.arange(width, device=lengths.device) < lengths[:, None]
            visible = masks.block_mask(state.cache.valid, masks.causal(inside))
            states = self.prefix(states, observed.positions, visible, state.cache)
            state.cache.commit_first(width, lengths)
        state.keep(observed, at_end(states, lengths))

    @torch.no_grad()
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Grow a tree, all nodes of a level at once, each from the tokens of its own path."""
        assert isinstance(state, NewestState)
        rows = torch.arange(len(state.root), device=state.root.device)[:, None]
        paths = [state.root[:, None, None]]  # tokens [B, P, depth + 1] of the level before

        def laws(level: Level) -> Tensor:
            if level.depth:
                paths[0] = torch.cat([paths[0][rows, level.parents], level.tokens[..., None]], dim=-1)
            states = state.feature[:, None].expand(*level.tokens.shape, -1)
            return self._head(level.depth, states, frozen_embedding(target, paths[0], self.logit_scale.log))

        return grow(self.tree_shape(request), state.root, laws, request, self.vocabulary)

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the weighted loss of all heads, told the true tokens before their own; ranks when not training."""
        states = self._scaled(batch.features)
        if self.prefix is not None:
            states = self.prefix(states, batch.positions, masks.causal(batch.token_mask, batch.segments))
        embedded = frozen_embedding(target, batch.tokens, self.logit_scale.log)
        end = batch.tokens.shape[1] - 1  # an anchor without a label may lie close to it

        def guess(k: int, rows: Tensor, anchors: Tensor) -> Tensor:
            told = anchors[:, None] + torch.arange(1, k + 2, device=anchors.device)
            return self._head(k, states[rows, anchors], embedded[rows[:, None], told.clamp(max=end)])

        return depth_losses(
            batch,
            target,
            self.vocabulary,
            self.config.num_heads,
            guess,
            self.config.loss,
            self.config.depth_weight,
            num_items,
            ranked=not self.training,
        )

    def _scaled(self, features: Tensor) -> Tensor:
        """Return the final states [B, A, D] of features [B, A, 1, D] at unit root mean square."""
        return normalise(features[:, :, 0]).to(self.logit_scale.log.dtype)

    def _head(self, head: int, states: Tensor, told: Tensor) -> Tensor:
        """Return the scores [..., Vd] of one head for states [..., D] and the embeddings told [..., head + 1, D]."""
        read = torch.cat([states, told.flatten(-2)], dim=-1)
        return self.projections[head](self.blocks[head](read) * self.logit_scale()[head])
