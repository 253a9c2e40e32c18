"""What a run watches for: a stop signal, numbers that are not finite, tensors that do not learn."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..distill.dataset import read_rows
from .processes import sum_over_processes

EXIT_STOPPED = 75
"""Exit status of a run that SIGTERM stopped and whose checkpoint is saved: EX_TEMPFAIL, "try again later"."""

PATIENCE = 5
"""Steps in which the gradient of a tensor may be all zero; the first of them often has a learning rate of 0."""


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


def places_of(row_ids: Sequence[str], sources: Sequence[str]) -> str:
    """Say in which file and line rows stand, as far as their ids tell."""
    wanted = set(row_ids)
    rows = (pair for source in sources for pair in read_rows(source)) if wanted else ()
    places = [place for place, row in rows if str(row.get("id")) in wanted]
    return f"\nthe rows stand in {'; '.join(places)}" if places else ""


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


class LearningCheck:
    """Stops a run in which a trained tensor does not learn: it would stay as it was made.

    A tensor without a gradient is told in its first step. One whose gradient is all zero is given `PATIENCE` steps, for
    behind weights that start at zero nothing learns before those have moved (a residual branch, LoRA's A), and only
    steps count in which every depth had a label somewhere.

    learning: yields the tensors that learn in this step, by name; more may join later. labels: returns the labels of
    this process in this step, by depth.
    """

    def __init__(
        self, learning: Callable[[], Iterable[tuple[str, Tensor]]], labels: Callable[[], Tensor | None]
    ) -> None:
        self.learning = learning
        self.labels = labels
        self.checked: set[str] = set()
        self.silent: Counter[str] = Counter()

    def check(self, args: TrainingArguments) -> None:
        """Look at each tensor's gradient until it has had one; DeepSpeed keeps gradients elsewhere."""
        fresh = {name: p for name, p in self.learning() if name not in self.checked}
        if args.deepspeed_plugin is not None or not fresh:
            return
        missing = [name for name, p in fresh.items() if p.grad is None]
        if missing:
            raise ValueError(f"every trained tensor must get a gradient, but {', '.join(missing)} got none")
        some = torch.stack([_own_part(p.grad).any().to(args.device) for p in fresh.values()])
        heard = sum_over_processes(some.long(), args).tolist()
        self.checked |= {name for name, count in zip(fresh, heard, strict=True) if count}
        silent = [name for name in fresh if name not in self.checked]
        labels = self.labels()
        if not silent or labels is None or not sum_over_processes(labels, args).all():
            return
        self.silent.update(silent)
        stuck = [name for name in silent if self.silent[name] >= PATIENCE]
        if stuck:
            raise ValueError(
                f"every trained tensor must learn, but the gradient of {', '.join(stuck)} was all zero in {PATIENCE} "
                "steps in which every depth had a label: the loss does not depend on it; give that part of the loss a "
                "weight, or leave the tensor out"
            )


def _own_part(gradient: Any) -> Tensor:
    """Return what this process holds of a gradient that may be spread over processes."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
