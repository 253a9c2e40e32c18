"""The MLP speculator: a small state that takes in one token a step, from the target's state on (arXiv 2404.19124).

With s_0 = z_t / sqrt(2): s_k = GELU(LN_k(w_s W_k s_(k-1) + w_e E_k(tokens[t + k]))), and the head on s_k guesses
tokens[t + 1 + k]. LN only scales (root mean square), with weight and bias. Over K steps w_s = 0.5^(0.5 / K) and
w_e = sqrt((1 - w_s^2) inner / 2) keep the variance, for embeddings of unit length. `tie_weights` (the released default)
shares E, LN and the head among all steps, and W among all but the first, whose input is the target's.

E are tables of its own in the paper: V x inner each, learnt from scratch. The default here is the target's embedding
behind a projection. Beside a small target own tables are a large part of its memory, and a small data set leaves most
of their rows as they started; they suit large targets, whose D is far beyond inner, and long training.

Ours besides: z_t and the target's embeddings are scaled to unit root mean square, maps start orthogonal, heads start as
the target's own in the first map's space, with a learned logit scale, so that one learning rate fits any target. The
second training stage of the paper, on the target's own answers, is the only one: it is what drafters here learn from.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from .modules import LogitScale, frozen_embedding, normalise, typical_size
from .states import NewestState, at_end

DEFAULT_TOPOLOGY = (
    (0,), (1,), (2,), (3,), (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0),
    (0, 0, 0, 0),
)  # fmt: skip
"""Used until training has calibrated one: 15 draft tokens."""


class MlpConfig(DrafterConfig):
    """Configuration of an MLP speculator.

    num_steps: K, tokens guessed ahead. inner_size: width of its state; None means the target's. tie_weights: whether
    steps share weights.
    embedding: "target" (the target's, frozen, behind a projection) or "own" (tables of width inner).
    loss: "kl", "reverse_kl", "jsd", "tv", "lk" (to the target's law) or "ce" (the data's next token). depth_weight:
    step k weighs depth_weight^k.
    """

    model_type = "headstart-mlp"

    def __init__(
        self,
        num_steps: int = 4,
        inner_size: int | None = None,
        tie_weights: bool = True,
        embedding: str = "target",
        loss: str = "kl",
        depth_weight: float = 1.0,
        **kwargs: Any,
    ) -> None:
        check_counts(num_steps=num_steps, inner_size=inner_size)
        check_choice("embedding", embedding, ("target", "own"))
        check_choice("loss", loss, LOSSES)
        self.num_steps = num_steps
        self.inner_size = inner_size
        self.tie_weights = tie_weights
        self.embedding = embedding
        self.loss = loss
        self.depth_weight = depth_weight
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Make the state as wide as the target's."""
        return {"inner_size": target.width}


class ScaleNorm(nn.Module):
    """Scaling to unit root mean square, then a weight and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., inner] to [..., inner]."""
        return normalise(x) * self.weight + self.bias


class MlpDrafter(Drafter):
    """One step after the other: mix in a token, normalise, guess."""

    config_class = MlpConfig
    config: MlpConfig
    yields_law = True
    default_topology = DEFAULT_TOPOLOGY

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        width, inner, steps = config.target_width, config.inner_size or config.target_width, config.num_steps
        own = range(1 if config.tie_weights else steps)
        inputs = [width] + [inner] * (min(steps - 1, 1) if config.tie_weights else steps - 1)
        self.mixers = nn.ModuleList(nn.Linear(size, inner, bias=False) for size in inputs)
        self.embeddings = nn.ModuleList(
            nn.Embedding(config.target_vocab_size, inner)
            if config.embedding == "own"
            else nn.Linear(width, inner, bias=False)
            for _ in own
        )
        self.norms = nn.ModuleList(ScaleNorm(inner) for _ in own)
        self.heads = nn.ModuleList(nn.Linear(inner, self.vocabulary.size, bias=False) for _ in own)
        self.logit_scale = LogitScale(len(own))
        self.state_weight = 0.5 ** (0.5 / steps)
        self.token_weight = ((1 - self.state_weight**2) * inner / 2) ** 0.5
        self.unit_length = inner**-0.5
        self.post_init()

    @property
    def draft_depth(self) -> int:
        """One depth a step."""
        return self.config.num_steps

    @torch.no_grad()
    def initialise_from(self, target: TargetView) -> None:
        """Start maps orthogonal, which keeps lengths, and heads as the target's own in the space of the first map."""
        for module in (*self.mixers, *self.embeddings):
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.unit_length)
            else:
                nn.init.orthogonal_(module.weight)  # type: ignore[arg-type]
        for mixer in self.mixers[1:]:
            nn.init.eye_(mixer.weight)  # type: ignore[arg-type]  # a later state starts in the same space
        rows = target.head_rows(self.vocabulary.chosen) @ self.mixers[0].weight.T  # type: ignore[union-attr, operator]
        for head in self.heads:
            head.weight.copy_(rows)  # type: ignore[operator]
        self.logit_scale.start_at(typical_size(target))

    def init_state(self, batch_size: int) -> NewestState:
        """Return zero features."""
        return NewestState.empty(batch_size, self.config.target_width, self.logit_scale.log)

    @torch.no_grad()
    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Keep the newest state and root of each row."""
        assert isinstance(state, NewestState)
        state.keep(observed, self._first(at_end(observed.features[:, :, 0], observed.lengths)))

    @torch.no_grad()
    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Grow a tree, all nodes of a level at once, each from its parent's state."""
        assert isinstance(state, NewestState)
        rows = torch.arange(len(state.root), device=state.root.device)[:, None]
        states = [state.feature[:, None]]  # [B, P, inner] of the level before

        def laws(level: Level) -> Tensor:
            states[0] = self._step(level.depth, states[0][rows, level.parents], level.tokens, target)
            return self._scores(level.depth, states[0])

        return grow(self.tree_shape(request), state.root, laws, request, self.vocabulary)

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        """Compute the weighted loss of all steps, told the true tokens before their own; ranks when not training."""
        states = [self._first(batch.features[:, :, 0])]
        for step in range(self.config.num_steps):
            following = batch.tokens.roll(-1 - step, 1)  # what comes round belongs to anchors without a label
            states.append(self._step(step, states[-1], following, target))
        return depth_losses(
            batch,
            target,
            self.vocabulary,
            self.config.num_steps,
            lambda k, rows, anchors: self._scores(k, states[k + 1][rows, anchors]),
            self.config.loss,
            self.config.depth_weight,
            num_items,
            ranked=not self.training,
        )

    def _first(self, features: Tensor) -> Tensor:
        """Return s_0 [..., D] for final states [..., D]."""
        return normalise(features).to(self.logit_scale.log.dtype) / 2**0.5

    def _step(self, step: int, states: Tensor, tokens: Tensor, target: TargetView) -> Tensor:
        """Return the next states [..., inner] from those before and the tokens [...] that they are told."""
        embedding = _of(self.embeddings, step)
        if self.config.embedding == "own":
            told = embedding(tokens)
        else:
            told = embedding(frozen_embedding(target, tokens, states)) * self.unit_length
        mixed = self.state_weight * _of(self.mixers, step)(states) + self.token_weight * told
        return F.gelu(_of(self.norms, step)(mixed))

    def _scores(self, step: int, states: Tensor) -> Tensor:
        """Return scores [..., Vd] from states [..., inner] after a step."""
        scale = self.logit_scale()
        return _of(self.heads, step)(states * scale[min(step, len(scale) - 1)])


def _of(modules: nn.ModuleList, step: int) -> nn.Module:
    """Return a step's module; the last one serves all further steps where weights are tied."""
    return modules[min(step, len(modules) - 1)]
