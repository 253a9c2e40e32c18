"""What is looked at in every optimizer step, before its gradient reaches the weights.

Numbers that are not finite stop the run or have the step skipped, as the settings say; a gradient far larger than usual
is told. All processes decide alike. Knows neither the method nor how the loss is made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distill.dataset import TokenRow
from ..distill.store import row_key
from .guards import LearningCheck, NotFinite
from .processes import sum_over_processes
from .watch_arguments import WatchArguments

REMEMBERED, AT_LEAST = 100, 20
"""Norms that the median is taken of, and how many there must be before one can be unusual."""

NAMED = 8
"""Rows that an alarm names; an error names all."""

Batch = dict[str, Tensor]


class StepWatch(TrainerCallback):
    """Watches the steps of one run.

    rows: all that are trained on, to name those of a step. learning: looks at each tensor's gradient.
    skipping: whether the step in progress is left out.
    """

    def __init__(
        self, settings: WatchArguments, args: TrainingArguments, rows: Sequence[TokenRow], learning: LearningCheck
    ) -> None:
        if settings.non_finite == "skip" and args.deepspeed_plugin is not None:
            raise ValueError(
                "non_finite must be stop with DeepSpeed, which takes its step before anyone can look at the gradient, "
                "but is skip; leave it out"
            )
        self.settings, self.args, self.rows, self.learning = settings, args, rows, learning
        self.skipping = False
        self._loss, self._kept = torch.zeros(2, device=args.device)  # of the step; of those not skipped since the line
        self._batches: Sequence[Batch] = ()
        self._bad: list[Batch] = []
        self._in_a_row = 0
        self._norms: deque[float] = deque(maxlen=REMEMBERED)
        self._steps, self._skipped, self._alarms = 0, 0, 0  # since the last line of the log

    def begin_step(self, batches: Sequence[Batch]) -> None:
        """Take note of the batches of this process in the step that begins."""
        self._batches, self._bad, self.skipping = batches, [], False
        self._loss = torch.zeros_like(self._loss)

    def loss(self, loss: Tensor, batch: Batch, number: int) -> Tensor:
        """Look at the loss of one batch of step `number`; return what the log is to count.

        Raises NotFinite where such a number is to stop the run.
        """
        if torch.isfinite(loss):
            self._loss = self._loss + loss
            return loss
        if self.settings.non_finite == "stop":
            raise NotFinite(f"the loss must be finite, but is {float(loss)}", number, self.ids([batch]))
        self._bad.append(batch)
        return torch.zeros_like(loss)

    def gradient(self, norm: Tensor | float | None, model: nn.Module, number: int) -> Tensor | float | None:
        """Look at the gradient of step `number` before it is used; return its norm, None for a step that is skipped.

        Raises NotFinite where numbers that are none are to stop the run, or have come in too many steps in a row.
        """
        # Of fp16 it is expected: the scaler then leaves the step out and tries a smaller scale.
        finite = norm is None or self.args.fp16 or math.isfinite(float(norm))
        what = "" if finite else f"the norm of the gradient must be finite, but is {float(norm or 0)}"
        if self.settings.non_finite == "stop":
            if what:
                raise NotFinite(what, number, self.ids(self._batches))
        elif self._any_process(bool(self._bad or what)):
            self._skip(model, number)
            return None
        self._in_a_row = 0
        self._kept = self._kept + self._loss
        if norm is not None and math.isfinite(float(norm)):
            self._compare(float(norm), number)
        return norm

    def _any_process(self, here: bool) -> bool:
        return bool(sum_over_processes(torch.tensor(int(here), device=self.args.device), self.args))

    def _skip(self, model: nn.Module, number: int) -> None:
        """Take the gradient away: an optimizer passes over tensors without one, its own memory of them included."""
        self.skipping = True
        model.zero_grad(set_to_none=True)
        self._in_a_row += 1
        self._skipped += 1
        ids = self.ids(self._bad or self._batches)
        if self._in_a_row >= self.settings.non_finite_limit:
            what = f"{self._in_a_row} steps in a row (non_finite_limit) had a loss or gradient that is not finite"
            raise NotFinite(f"{what}, the last", number, ids)
        if self._bad or self.args.process_index == 0:
            what = "the loss is not finite" if self._bad else "the gradient is not finite"
            self._tell(f"step {number} is skipped: {what} ({_named(ids)})")

    def _compare(self, norm: float, number: int) -> None:
        usual = median(self._norms) if len(self._norms) >= AT_LEAST else 0.0
        if self.settings.grad_norm_alarm and 0 < usual * self.settings.grad_norm_alarm < norm:
            self._alarms += 1
            self._tell(
                f"step {number}: the gradient's norm is {norm:.3g}, {norm / usual:.0f} times the median ({usual:.3g}) "
                f"of the {len(self._norms)} steps before ({_named(self.ids(self._batches))})"
            )
        self._norms.append(norm)

    def ids(self, batches: Sequence[Batch]) -> list[str]:
        """Return the ids of the rows in batches of this process."""
        keys = {key for batch in batches for key in batch["row_keys"].tolist()}
        return [row.id for row in self.rows if row_key(row) in keys]

    def line(self, logs: dict[str, float]) -> dict[str, float]:
        """Return a line of the log with the loss of the steps not skipped, the number of the others and of alarms."""
        steps, skipped, alarms, kept = self._steps, self._skipped, self._alarms, self._kept
        self._steps, self._skipped, self._alarms, self._kept = 0, 0, 0, torch.zeros_like(kept)
        if skipped and skipped >= steps:
            del logs["loss"]
        elif skipped:
            mean = sum_over_processes(kept, self.args) / self.args.world_size
            logs["loss"] = float(mean) / (steps - skipped)
        counts = {"skipped_steps": float(skipped), "grad_norm_alarms": float(alarms)}
        return logs | {name: count for name, count in counts.items() if count}

    def _tell(self, text: str) -> None:
        where = f"process {self.args.process_index}: " if self.args.world_size > 1 else ""
        print(f"{where}{text}", flush=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See that every tensor learns; a step that is skipped says nothing of it."""
        if not self.skipping:
            self.learning.check(args)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the steps of a line of the log."""
        self._steps += 1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See that the figure by which the best checkpoint is chosen was measured."""
        measured = [name.removeprefix("eval_") for name in kwargs["metrics"]]
        wanted = (args.metric_for_best_model or "loss").removeprefix("eval_")
        if wanted not in measured:
            raise ValueError(
                f"metric_for_best_model must be a figure of the evaluation ({', '.join(measured)}), but is {wanted}"
            )


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return f"rows {', '.join(ids[:NAMED])}{more}"
