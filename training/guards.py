"""What a run watches for: a stop signal, numbers that are not finite, tensors that do not learn."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

EXIT_STOPPED = 75
"""Exit status of a run that SIGTERM stopped and whose checkpoint is saved: EX_TEMPFAIL, "try again later"."""


class StoppedBySignal(Exception):
    """The run was asked to stop, and has saved a checkpoint."""


class NotFinite(ValueError):
    """A loss, gradient or weight is not a number. row_ids: the rows of this process that were being read."""

    def __init__(self, what: str, step: int, row_ids: Sequence[str] = ()) -> None:
        self.row_ids = list(row_ids)
        rows = f" (rows {', '.join(self.row_ids)})" if self.row_ids else ""
        super().__init__(
            f"{what} in step {step}{rows}; nothing of this step was saved and the last checkpoint is still good: lower "
            "learning_rate, set max_grad_norm, use bf16 instead of fp16, or take the rows out if they are broken"
        )


def check_gradient(norm: Tensor | float, step: int, row_ids: Sequence[str]) -> None:
    """Raise NotFinite when a step's gradient norm is no number: the weights would be none either."""
    if not math.isfinite(float(norm)):
        raise NotFinite(f"the norm of the gradient must be finite, but is {float(norm)}", step, row_ids)


def check_weights(drafter: nn.Module, step: int) -> None:
    """Raise NotFinite rather than save weights that are no numbers."""
    broken = [name for name, p in drafter.named_parameters() if not torch.isfinite(p).all()]
    if broken:
        raise NotFinite(f"every weight must be finite, but those of {', '.join(broken[:3])} are not", step)


class StopOnSignal(TrainerCallback):
    """Ends training after the step in which SIGTERM came, with a checkpoint; all processes agree on the step.

    The agreement costs no message of its own: it travels with the count of trained tokens.
    """

    def __init__(self) -> None:
        self.asked = False
        self.agreed = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note SIGTERM instead of dying of it; only a main thread may listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, _number: int, _frame: Any) -> None:
        self.asked = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Save and stop; an evaluation can wait, a machine that is being shut down cannot."""
        self.agreed = self.agreed or (self.asked and args.world_size == 1)
        if self.agreed:
            control.should_save, control.should_training_stop, control.should_evaluate = True, True, False
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Do not save the same step twice."""
        if self.agreed:
            control.should_save = control.should_evaluate = False
        return control


class EveryTensorLearns(TrainerCallback):
    """Stops in its first step when a trained tensor got no gradient: it would stay as it was made.

    learning: yields the tensors that learn in this step, by name; more may join later.
    """

    def __init__(self, learning: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        self.learning = learning
        self.checked: set[str] = set()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check each tensor once; DeepSpeed keeps gradients elsewhere."""
        if args.deepspeed_plugin is not None:
            return
        fresh = {name: p for name, p in self.learning() if name not in self.checked}
        missing = [name for name, p in fresh.items() if p.grad is None]
        if missing:
            raise ValueError(f"every trained tensor must get a gradient, but {', '.join(missing)} got none")
        self.checked |= fresh.keys()
