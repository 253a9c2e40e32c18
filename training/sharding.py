"""Weights cut up between processes (DeepSpeed ZeRO-3, FSDP2): when they are whole, and what checkpoints hold of them.

Target and drafter then stand in one module, since only what is inside it is cut up, and every process must call its
modules equally often: a call collects the weights from all. So evaluation runs inside of it too, on a whole copy of the
drafter, and every process generates from the same prompts. Spells DeepSpeed's and FSDP's own ways of gathering, and
nothing else does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer import SCHEDULER_NAME

from ..core import hf
from ..drafters.base import Drafter
from ..inference.target import Target
from .adapters import trained_target
from .arguments import DataArguments, TargetArguments
from .joint import JointModule
from .joint_arguments import JointArguments
from .processes import cuts_up_weights, deepspeed_stage, fsdp_version


def check_sharding(data: DataArguments, target: TargetArguments, args: TrainingArguments) -> None:
    """Raise ValueError for settings that do not go with weights cut up between processes; before anything is loaded."""
    if args.fsdp or fsdp_version() == 1:
        raise ValueError(
            "FSDP must be version 2 and be started by accelerate, but is "
            + ("asked for by a training flag" if args.fsdp else "version 1")
            + "; start with --config_file configs/accelerate/8gpu_fsdp2.yaml and without --fsdp"
        )
    if not cuts_up_weights(args):
        return
    why = "ZeRO-3 and FSDP2 cut up the target's weights, and every process must have it read equally often"
    if data.feature_cache_gb and data.features is None:
        raise ValueError(
            f"{why}, but feature_cache_gb is {data.feature_cache_gb}, with which a process reads what it has not kept; "
            "set it to 0, or take features from a store"
        )
    if data.missing_features == "make":
        raise ValueError(
            f"{why}, but missing_features is make, with which a process reads what its rows lack in the store; capture "
            "all rows, and set missing_features to refuse"
        )
    if target.bits is not None:
        raise ValueError(f"weights of {target.bits} bits cannot be cut up; load the target in bfloat16")


def place_to_load(args: TrainingArguments) -> str:
    """Return the device on which the target is loaded, whole: a fresh drafter is made from it before it is cut up.

    That is main memory where it is going to be cut up, since it may be too large for a GPU. transformers would cut it
    up while it loads, if DeepSpeed's configuration has told it so.
    """
    if not cuts_up_weights(args):
        return str(args.device)
    unset_hf_deepspeed_config()
    return "cpu"


def type_of_training(args: TrainingArguments) -> torch.dtype:
    """Return the type that DeepSpeed gives all weights that it trains or cuts up."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def check_type(target: Target, args: TrainingArguments) -> None:
    """Raise ValueError when ZeRO-3 would train in another type than that in which the target is loaded."""
    wanted = type_of_training(args)
    if deepspeed_stage(args) == 3 and target.dtype != wanted:
        found, needed = (str(dtype).removeprefix("torch.") for dtype in (target.dtype, wanted))
        raise ValueError(
            f"under ZeRO-3 all weights have the type of the training, {needed}, but the target is in {found}; set "
            f"target_dtype {needed}, or bf16 true for a target in bfloat16"
        )


def side_by_side(
    drafter: Drafter, target: Target, settings: JointArguments, args: TrainingArguments
) -> JointModule | None:
    """Put drafter and target into one module where both are trained, or both cut up; None leaves the target outside."""
    if settings.train_target == "none" and not cuts_up_weights(args):
        return None
    return JointModule(drafter, trained_target(target, settings), settings)


@contextmanager
def whole(parameters: Iterable[Tensor], args: TrainingArguments) -> Iterator[None]:
    """Under ZeRO-3, have parameters whole in every process for as long as the context lasts; a collective call."""
    if deepspeed_stage(args) != 3:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters  # pyright: ignore[reportMissingImports]

    with GatheredParameters(list(parameters)):
        yield


def whole_state(module: nn.Module, args: TrainingArguments) -> dict[str, Tensor]:
    """Return copies of a module's tensors, whole, in every process; a collective call, one tensor at a time."""
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        with whole([tensor], args) if isinstance(tensor, nn.Parameter) else nullcontext():
            own = tensor.detach()
            state[name] = own.full_tensor() if isinstance(own, DTensor) else own.clone()
    return state


def whole_copy(drafter: Drafter, args: TrainingArguments) -> Drafter:
    """Return a drafter to evaluate: itself where it is whole, else a whole copy; then a collective call."""
    if not cuts_up_weights(args):
        return drafter
    state = whole_state(drafter, args)
    with torch.random.fork_rng(devices=[]):  # its weights are drawn before they are replaced
        config: Any = copy.deepcopy(drafter.config)
        made = type(drafter)(config)
    made.load_state_dict(state)
    return made.to(args.device, drafter.dtype).eval()  # type: ignore[arg-type]


class ShardedTrainer(Trainer):
    """What transformers' Trainer must do otherwise where drafter and target stand side by side in one module."""

    drafter: Drafter
    joint: JointModule | None
    model: Any
    model_wrapped: Any
    lr_scheduler: Any

    def _keep_sums_exact(self) -> None:
        """Have FSDP add gradients up, and hand back what the module returns, in the type that they have.

        accelerate's policy would round both to the type of the weights: counts of labels too.
        """
        plugin = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if plugin is not None and plugin.mixed_precision_policy is not None:
            dtype = plugin.mixed_precision_policy.param_dtype
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)

    def _cut_up(self) -> None:
        """Leave this process its part of each weight, one layer after the other: no GPU ever holds the whole.

        Called once the optimizer has been given its parameters, since a weight that is cut up has lost its shape. Of
        FSDP2's work the target's layers are done here, each by itself, and the rest is left to accelerate, which would
        choose by class and so cut up layers of a drafter too, whose parts are called one by one.
        """
        if self.joint is None or not cuts_up_weights(self.args):
            return
        if self.is_fsdp_enabled:
            plugin: Any = self.accelerator.state.fsdp_plugin
            for layer in hf.decoder_layers(self.joint.language_model):
                fully_shard(
                    layer,
                    reshard_after_forward=plugin.reshard_after_forward,
                    offload_policy=plugin.cpu_offload,
                    mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
                )
            return
        from deepspeed.runtime.zero import Init  # pyright: ignore[reportMissingImports]

        dtype = type_of_training(self.args)
        for parameter in self.joint.parameters():
            parameter.data = parameter.data.to(dtype)
        for buffer in self.joint.buffers():
            buffer.data = buffer.data.to(self.args.device)
        plugin = self.accelerator.state.deepspeed_plugin
        Init(module=self.joint, config_dict_or_path=plugin.hf_ds_config.config)

    def _with_weights(self, function: Callable[[], Any]) -> Any:
        """Run a function in which modules of the target are called."""
        if self.joint is None or not cuts_up_weights(self.args):
            return function()
        found = self.joint(function)
        for parameter in self.joint.parameters():  # generation leaves tensors of its own kind, which cannot be trained
            if parameter.is_inference():
                parameter.data = parameter.data.clone()
        return found

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what is trained, whole, and nothing frozen."""
        if self.joint is None:
            super().save_model(output_dir, _internal_call)
            return
        state = whole_state(self.drafter, self.args) if cuts_up_weights(self.args) else None
        with whole(self.joint.changes.trained.values(), self.args):
            self._save(output_dir, state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the optimizer as it is cut up; DeepSpeed and FSDP would write the frozen target along with it."""
        if self.joint is None or not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.is_deepspeed_enabled:
            self.joint.changes.let_learn(True)  # what waits for its turn to learn is not frozen
            self.model_wrapped.save_checkpoint(output_dir, exclude_frozen_parameters=True)
        else:
            from accelerate.utils import save_fsdp_optimizer

            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Read the drafter, and what is trained of its target."""
        if self.joint is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.is_fsdp_enabled:
            if isinstance(self.model, FSDPModule):
                self.model.reshard()  # an evaluation leaves weights whole
            state: Any = load_file(Path(resume_from_checkpoint) / "model.safetensors")
            set_model_state_dict(self.drafter, state, options=StateDictOptions(full_state_dict=True))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, self.drafter)
            self.joint.changes.load(Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        if self.joint is None or self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class JoinAfresh(TrainerCallback):
    """Lets the target's optimizer begin when the target does, under DeepSpeed.

    There, weights without a gradient get one of zero, and Adam counts the step: when the target joins after the drafter
    has learned alone, its first steps would be up to three times too long.
    """

    def __init__(self, joint: JointModule) -> None:
        self.joint = joint

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the count of steps back where no gradient has ever come."""
        schedule = self.joint.schedule
        if args.deepspeed_plugin is None or schedule is None or state.global_step != schedule.first:
            return
        optimizer = kwargs["optimizer"].optimizer.optimizer  # accelerate's holds DeepSpeed's, which holds torch's
        for moments in optimizer.state.values():
            if "exp_avg" in moments and not moments["exp_avg"].any():
                moments["step"] = moments["step"] * 0
