"""Settings of joint training: which part of the target is trained beside the drafter, how fast, and what for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import TrainingArguments

from .arguments import DataArguments, TargetArguments, told
from .processes import fsdp_version

RATES = {"none": 0.0, "lora": 1e-4, "full": 1e-5}
WEIGHTS = {"kl": 0.01, "ce": 0.2}
"""Medusa-2's (arXiv 2401.10774, section 2.2.2 and the released settings): of self-distillation, and of data."""


@dataclass
class JointArguments:
    """Training the target together with the drafter (Medusa-2, for any drafter)."""

    _argument_group_name: ClassVar[str] = "joint training"

    train_target: str = field(
        default="none",
        metadata=told(
            "What is trained of the target beside the drafter: none, a LoRA adapter (lora, needs peft), or all (full).",
            choices=["none", "lora", "full"],
        ),
    )
    target_learning_rate: float | None = field(
        default=None,
        metadata=told(
            "Peak learning rate of the target or its adapter; by default 1e-4 for lora, 1e-5 for full (learning_rate "
            "is the drafter's)."
        ),
    )
    target_loss: str = field(
        default="kl",
        metadata=told(
            "What holds the target: kl, to its own law before training (self-distillation), or ce, the data's tokens.",
            choices=["kl", "ce"],
        ),
    )
    drafter_loss_weight: float | None = field(
        default=None,
        metadata=told(
            "lambda in target loss + lambda x drafter loss: how far the target goes to meet the drafter; by default "
            "0.01 with kl, 0.2 with ce."
        ),
    )
    drafter_loss_schedule: str = field(
        default="constant",
        metadata=told(
            "lambda over the joint steps: constant, or rising from 0: linear, or a quarter of a sine.",
            choices=["constant", "linear", "sine"],
        ),
    )
    drafter_only_steps: float = field(
        default=0.3,
        metadata=told(
            "Steps at the start in which the drafter learns alone, its target frozen: a count, or a share of all steps "
            "if below 1."
        ),
    )
    lora_r: int = field(default=32, metadata=told("Rank of the adapter."))
    lora_alpha: int = field(default=16, metadata=told("Scale of the adapter, times its rank."))
    lora_dropout: float = field(default=0.05, metadata=told("Dropout on what the adapter reads."))
    lora_target_modules: list[str] = field(
        default_factory=list,
        metadata=told("Last names of the linear layers to adapt; by default all of them and the head."),
    )
    merge_adapter: bool = field(
        default=False,
        metadata=told("Also save the whole target with the adapter merged into its weights, in output_dir/target."),
    )

    def __post_init__(self) -> None:
        for name in ("target_learning_rate", "drafter_loss_weight"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, but is {value}; for a frozen target set train_target none")
        if self.drafter_only_steps < 0:
            raise ValueError(f"drafter_only_steps must be at least 0, but is {self.drafter_only_steps}")
        if self.lora_r < 1 or self.lora_alpha < 1 or not 0 <= self.lora_dropout < 1:
            raise ValueError(
                "lora_r and lora_alpha must be at least 1, and lora_dropout at least 0 and below 1, but are "
                f"{self.lora_r}, {self.lora_alpha} and {self.lora_dropout}"
            )
        if self.merge_adapter and self.train_target != "lora":
            raise ValueError(f"merge_adapter needs train_target lora, but that is {self.train_target}; drop it")

    @property
    def rate(self) -> float:
        """Peak learning rate of what is trained of the target."""
        return RATES[self.train_target] if self.target_learning_rate is None else self.target_learning_rate

    @property
    def weight(self) -> float:
        """Lambda at its peak."""
        return WEIGHTS[self.target_loss] if self.drafter_loss_weight is None else self.drafter_loss_weight

    def identity(self) -> dict[str, Any]:
        """Return what must not change within one folder."""
        if self.train_target != "lora":
            return {"train_target": self.train_target}
        lora = {name: getattr(self, name) for name in ("lora_r", "lora_alpha", "lora_target_modules")}
        return {"train_target": self.train_target, **lora}


def check_joint(
    joint: JointArguments, data: DataArguments, target: TargetArguments, training: TrainingArguments
) -> None:
    """Raise ValueError for settings that do not go with a target that changes while it is trained."""
    if joint.train_target == "none":
        return
    why = f"with train_target {joint.train_target} the target changes at every step"
    if data.features is not None:
        raise ValueError(f"{why}, so its features cannot come from a store, but features is {data.features}; drop it")
    if data.feature_cache_gb:
        raise ValueError(
            f"{why}, so its features cannot be kept, but feature_cache_gb is {data.feature_cache_gb}; set it to 0"
        )
    if target.bits is not None and joint.train_target == "full":
        raise ValueError(f"a target in {target.bits} bits cannot be trained whole; set train_target lora (QLoRA)")
    if target.bits is not None and joint.merge_adapter:
        raise ValueError(f"an adapter cannot be merged into weights of {target.bits} bits; drop merge_adapter")
    if fsdp_version() is not None:
        raise ValueError(f"{why}, which FSDP2 cannot do: it gives no hold on single gradients; take ZeRO-3, or none")
    if training.deepspeed_plugin is not None and joint.train_target == "full":
        raise ValueError(f"{why} from the weights kept beside it, which DeepSpeed cannot do; set train_target lora")
