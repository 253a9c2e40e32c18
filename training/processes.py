"""Several processes: how they find each other, and sums over all of them."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import TrainingArguments
from transformers.training_args import ParallelMode


def world_size_asked() -> int:
    """Return how many processes the launcher started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def without_gpu() -> bool:
    """Whether this is one of several processes on a machine without an accelerator."""
    return world_size_asked() > 1 and not torch.accelerator.is_available()


def join_processes() -> None:
    """Connect the processes of a CPU launch; call before `TrainingArguments` are made.

    Left to Trainer, each process of a DeepSpeed launch on CPUs would silently believe that it is alone. cpu=True makes
    accelerate average gradients without DeepSpeed, but would hide DeepSpeed from it.
    """
    if without_gpu():
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        PartialState(cpu=not deepspeed, backend="gloo")


def check_joined(args: TrainingArguments) -> None:
    """Raise ValueError when the launcher started several processes that would each train alone."""
    if world_size_asked() == 1:
        return
    if args.world_size != world_size_asked() or args.parallel_mode != ParallelMode.DISTRIBUTED:
        raise ValueError(
            f"the launcher started {world_size_asked()} processes, but they have not joined (world size "
            f"{args.world_size}, {args.parallel_mode.value}); launch with a file of configs/accelerate/"
        )


def sum_over_processes(value: Tensor, args: TrainingArguments) -> Tensor:
    """Return the sum of a tensor of any shape over all processes; a collective call."""
    if args.world_size == 1:
        return value
    total = value.detach().clone().to(args.device)
    torch.distributed.all_reduce(total)
    return total
