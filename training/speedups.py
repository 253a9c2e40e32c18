"""Ways to train faster or in less memory that transformers' Trainer offers, and which of them a drafter can take.

What would do nothing here, or something wrong, is refused by name before anything is loaded.
"""

from __future__ import annotations

import os
import shutil
import warnings

from transformers import TrainingArguments

from ..inference.loading import bfloat16_is_slow
from .joint_arguments import JointArguments
from .processes import fsdp_version

CUDA_GRAPHS = {"torch_compile_mode": ("reduce-overhead", "max-autotune"), "torch_compile_backend": ("cudagraphs",)}
"""Settings of torch.compile that have a step's results overwritten by the next one's."""


def check_speedups(joint: JointArguments, args: TrainingArguments) -> None:
    """Raise ValueError for a setting that would do nothing in this run, or something wrong."""
    if args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel is for models that Liger knows by name, and would leave a drafter as it is; leave it "
            "out, and set torch_compile true, which fuses the same parts of any drafter"
        )
    if args.gradient_checkpointing:
        _check_recomputing(joint, args)
    if args.torch_compile:
        _check_compiling(joint, args)


def warn_of_slow_type(target_dtype: str, args: TrainingArguments) -> None:
    """Warn where the type that was asked for takes several times as long as float32 on this machine."""
    if bfloat16_is_slow() and (args.bf16 or target_dtype == "bfloat16"):
        warnings.warn(
            "this CPU has no instructions for bfloat16 (AVX-512), so training in it takes several times as long as in "
            "float32; set target_dtype float32 and bf16 false",
            stacklevel=2,
        )


def _check_recomputing(joint: JointArguments, args: TrainingArguments) -> None:
    if joint.train_target == "none":
        raise ValueError(
            "gradient_checkpointing has a trained target's layers recompute their insides, but train_target is none: "
            "a frozen target keeps none, and of a drafter the loss, which takes the most, recomputes its chunks "
            "anyway; leave it out (for less memory lower per_device_train_batch_size or max_length)"
        )
    if args.gradient_checkpointing_kwargs:
        raise ValueError(
            f"gradient_checkpointing takes no settings here, but they are {args.gradient_checkpointing_kwargs}; leave "
            "them out"
        )


def _check_compiling(joint: JointArguments, args: TrainingArguments) -> None:
    what = "torch_compile compiles the pass of a drafter beside its whole, frozen target, but"
    if joint.train_target != "none":
        raise ValueError(
            f"{what} train_target is {joint.train_target}: what takes part in gradients then changes with the steps; "
            "leave one of them out"
        )
    if args.deepspeed_plugin is not None or fsdp_version() is not None:
        way = "FSDP" if args.deepspeed_plugin is None else "DeepSpeed"
        raise ValueError(f"{what} {way} was asked for; leave torch_compile out, or start without {way}")
    for name, values in CUDA_GRAPHS.items():
        value = getattr(args, name)
        if value in values:
            raise ValueError(
                f"{name} must be one without CUDA graphs, since figures of a step are read in later ones, but is "
                f"{value}; leave it out, or take torch_compile_mode max-autotune-no-cudagraphs"
            )
    compiler = os.environ.get("CXX", "g++")
    if args.torch_compile_backend == "inductor" and args.device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(
            f"torch_compile needs a C++ compiler on a CPU, but there is no {compiler}; apt install g++, or leave "
            "torch_compile out"
        )
