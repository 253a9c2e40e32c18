"""Several processes: how they find each other, what is refused when they do not, and sums over all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil  # comes with accelerate
import torch
import yaml
from accelerate import PartialState
from accelerate.commands.config.config_args import default_config_file
from accelerate.utils import DistributedType, is_deepspeed_available
from torch import Tensor
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

ZERO2 = "accelerate launch --config_file configs/accelerate/cpu_2proc_zero2.yaml training/train_….py"


def world_size_asked() -> int:
    """Return how many processes the launcher started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def without_gpu() -> bool:
    """Whether this is one of several processes on a machine without an accelerator."""
    return world_size_asked() > 1 and not torch.accelerator.is_available()


def check_launch(flags: Sequence[str]) -> None:
    """Raise ValueError for a way of starting that would train alone in silence, or needs what is not there.

    flags: of the training command. Called before anything is loaded.
    """
    deepspeed = _deepspeed_by_launcher() or any(flag.partition("=")[0] == "--deepspeed" for flag in flags)
    if deepspeed and not is_deepspeed_available():
        raise ValueError(
            "DeepSpeed was asked for and must be installed, but is not: pip install 'headstart[deepspeed]'"
        )
    if "WORLD_SIZE" in os.environ:
        return
    if deepspeed:
        raise ValueError(f"DeepSpeed needs a launcher that starts the processes, but this is plain Python: {ZERO2}")
    asked, where = _asked_of_accelerate()
    if asked > 1:
        raise ValueError(
            f"{where} asks for {asked} processes, but only this one was started; start them with `accelerate launch "
            "--config_file` and a file of configs/accelerate/ (for CPUs: cpu_2proc.yaml, since accelerate's own CPU "
            "setting starts one), or ask for one: accelerate launch --num_processes 1"
        )


def _deepspeed_by_launcher() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _asked_of_accelerate() -> tuple[int, str]:
    """Return how many processes accelerate was told to start, and where: its command line, else its file."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ
    words = _launcher_command() if launched else []
    for name in ("--num_processes", "--num-processes"):
        value = _value_of(name, words)
        if value is not None and value.isdecimal():
            return int(value), name
    file = Path(_value_of("--config_file", words) or default_config_file)
    if not file.is_file():
        return 1, str(file)
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    return int(settings.get("num_processes") or 1) if isinstance(settings, dict) else 1, str(file)


def _launcher_command() -> list[str]:
    """Return the words of the launcher's command that stand before the training script's own."""
    parent = psutil.Process().parent()
    words = parent.cmdline() if parent is not None else []
    script = sys.argv[0]
    return words[: words.index(script)] if script in words else words


def _value_of(name: str, words: Sequence[str]) -> str | None:
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            return words[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def join_processes() -> None:
    """Connect the processes of a CPU launch; call before `TrainingArguments` are made.

    Left to Trainer, each process of a DeepSpeed launch on CPUs would silently believe that it is alone. cpu=True makes
    accelerate average gradients without DeepSpeed, but would hide DeepSpeed from it.
    """
    if without_gpu():
        state = PartialState(cpu=not _deepspeed_by_launcher(), backend="gloo")
        if fsdp_version() is not None:
            state.distributed_type = DistributedType.MULTI_GPU  # accelerate cuts up weights for this type alone


def deepspeed_stage(args: TrainingArguments) -> int | None:
    """Return the ZeRO stage of a run, None without DeepSpeed."""
    return None if args.deepspeed_plugin is None else int(args.deepspeed_plugin.zero_stage)


def fsdp_version() -> int | None:
    """Return which FSDP the launcher has asked for, None for none."""
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return int(os.environ.get("FSDP_VERSION", "1")) if asked else None


def cuts_up_weights(args: TrainingArguments) -> bool:
    """Whether a process holds only a part of each weight, the frozen target's too: ZeRO-3, FSDP2."""
    return deepspeed_stage(args) == 3 or fsdp_version() is not None


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
