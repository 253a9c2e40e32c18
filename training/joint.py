"""Joint training: a module that holds drafter and target side by side, its losses, and what counts when.

    loss = target loss + lambda x drafter loss

The target loss keeps the target what it was: the KL divergence from its own law before training (self-distillation),
or the cross-entropy of the data. The drafter's loss is the method's own; its gradient reaches the target through the
features (Medusa-2, arXiv 2401.10774, section 2.2.2). At the start the drafter learns alone, since the gradients of
an untrained drafter would spoil the target. Knows no method, and not how the target's weights are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core import hf
from ..drafters.base import DraftBatch, Drafter, LossOutput
from ..drafters.losses import chunk_size, depth_targets, filled_up, in_chunks
from ..inference.target import Target
from .adapters import TrainedTarget
from .features import fresh_batch
from .joint_arguments import JointArguments


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the target learns, and how much the drafter's loss weighs.

    first: steps of the drafter alone. total: all steps. weight: lambda at its peak. shape: see `JointArguments`.
    """

    first: int
    total: int
    weight: float
    shape: str = "constant"

    @classmethod
    def of(cls, settings: JointArguments, total: int) -> Schedule:
        """Return the schedule of a run of `total` steps."""
        asked = settings.drafter_only_steps
        first = math.ceil(asked * total - 1e-9) if asked < 1 else int(asked)  # 0.1 * 30 is a little above 3
        return cls(first, total, settings.weight, settings.drafter_loss_schedule)

    def learns(self, step: int) -> bool:
        """Whether the target learns in a step (counted from 0)."""
        return step >= self.first

    def weight_at(self, step: int) -> float:
        """Return lambda in a step in which the target learns; a rising one is nowhere 0."""
        risen = min(1.0, (step - self.first + 1) / max(1, self.total - self.first))
        if self.shape == "linear":
            return self.weight * risen
        return self.weight * math.sin(math.pi / 2 * risen) if self.shape == "sine" else self.weight

    def rate_at(self, step: int, warmup: int) -> float:
        """Return a factor on the target's learning rate: 0 before it joins, then rising over `warmup` steps to 1."""
        return 0.0 if step < self.first else min(1.0, (step - self.first + 1) / max(1, warmup))


@dataclass
class JointOutput(LossOutput):
    """A drafter's `LossOutput` with the joint loss in `loss`.

    target_sum, target_tokens: scalars, the target's loss summed over so many tokens; None while the drafter learns
    alone.
    """

    target_sum: Tensor | None = None
    target_tokens: Tensor | None = None


class JointModule(nn.Module):
    """Drafter and target side by side: the model that Trainer trains.

    changes: how the target is trained. settings: the losses. schedule, step: set by the trainer; without a schedule
    everything learns.

    The drafter's own weights get the gradient of its own loss, whatever lambda: Adam takes out any constant factor, but
    after a change of lambda it would for long take too short steps, or too long ones. So lambda says one thing alone,
    how far the target goes to meet its drafter.
    """

    def __init__(self, drafter: Drafter, changes: TrainedTarget, settings: JointArguments) -> None:
        super().__init__()
        self.drafter = drafter
        self.language_model = changes.target.model
        self.changes = changes
        self.settings = settings
        self.config = drafter.config
        self.schedule: Schedule | None = None
        self.step = 0
        self._own_share = 1.0
        self.register_load_state_dict_post_hook(_without_frozen)
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * self._own_share)

    @property
    def target_learns(self) -> bool:
        """Whether the target learns in this step."""
        return bool(self.changes.trained) and (self.schedule is None or self.schedule.learns(self.step))

    @property
    def weight(self) -> float:
        """Lambda in this step; 1 while the drafter learns alone."""
        if not self.target_learns:
            return 1.0
        return self.settings.weight if self.schedule is None else self.schedule.weight_at(self.step)

    def learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what learns in this step, by name."""
        for name, parameter in self.drafter.named_parameters():
            if parameter.requires_grad:
                yield f"drafter.{name}", parameter
        if self.target_learns:
            yield from self.changes.trained.items()

    def train(self, mode: bool = True) -> JointModule:
        """Put the drafter and the adapter's dropout into a mode; the target's own dropout stays off.

        The drafter must see states as they are served, and the original law is the one without dropout.
        """
        super().train(mode)
        self.language_model.eval()
        for name, module in self.language_model.named_modules():
            if "lora_dropout" in name:
                module.train(mode)
        hf.set_recomputing(self.language_model, mode)
        return self

    def activation_checkpointing_enable(self, **_: Any) -> None:
        """Have the target's layers recompute their insides in the backward pass; Trainer calls this when asked to."""
        hf.recompute_layers(self.language_model)
        self.train(self.training)

    gradient_checkpointing_enable = activation_checkpointing_enable  # its name in older releases

    def forward(
        self,
        read: dict[str, Tensor] | DraftBatch | Callable[[], Any],
        target: Target | None = None,
        num_items: Tensor | None = None,
    ) -> Any:
        """Compute the loss of this step, a `JointOutput`.

        read: a collator's batch, or one with features from a store; or a function to run in here, where weights that
            are cut up between processes are at hand, and whose result is returned. target: the one in here.
        num_items: see `Drafter.forward`.
        """
        if callable(read):
            return read()
        assert target is not None
        learns = self.target_learns and self.training
        self.changes.let_learn(learns)  # a drafter may also guess by way of the target's head
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            fresh = not isinstance(read, DraftBatch)
            batch = fresh_batch(target, read, self.drafter.feature_layers) if fresh else read
        # A label is what the drafter runs after: the target must not be drawn to it by way of its own law.
        out: LossOutput = self.drafter(replace(batch, final=batch.final.detach()), target, num_items)
        if not learns:
            self._own_share = 1.0
            return JointOutput(**out)
        assert out.loss is not None
        self._own_share = 1.0 / self.weight
        items = batch.loss_mask.sum().clamp(min=1) if num_items is None else num_items
        held, tokens = self._target_loss(batch, target)
        parts = {name: value for name, value in out.items() if name != "loss"}
        joint = held / items + self.weight * out.loss
        return JointOutput(loss=joint, target_sum=held.detach(), target_tokens=tokens, **parts)

    def _target_loss(self, batch: DraftBatch, target: Target) -> tuple[Tensor, Tensor]:
        """Return the target's loss, summed over the trained tokens a chunk at a time, and how many they are."""
        before: Tensor | None = None
        if self.settings.target_loss == "kl":
            with torch.no_grad(), self.changes.original(self.language_model):
                before = target.encode(batch.tokens, batch.token_mask, (), batch.positions, batch.segments).final

        def chunk(rows: Tensor, labels_at: Tensor, anchors: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
            said = target.logits(batch.final[rows, anchors]).float().log_softmax(-1)
            if before is None:
                lost = F.nll_loss(said, batch.tokens[rows, labels_at], reduction="none")
            else:
                with torch.no_grad(), self.changes.original(self.changes.head()):
                    law = target.logits(before[rows, anchors]).float().log_softmax(-1)
                lost = (law.exp() * (law - said)).sum(-1)
            return (lost * present).sum(), present.sum()

        at = depth_targets(batch.loss_mask, batch.segments, 0)  # the head itself guesses the next token
        size = chunk_size(2 * target.vocab_size)
        held, tokens = in_chunks(chunk, size, *filled_up(at.rows, at.labels_at, at.anchors, at.present))
        return held, tokens


def _without_frozen(module: nn.Module, incompatible: Any) -> None:
    """Miss no frozen weight in a checkpoint: none is ever in one."""
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in frozen]
