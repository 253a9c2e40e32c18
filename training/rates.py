"""Learning rates: which parameters learn how fast, and from which step on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from ..drafters.base import Drafter
from .joint import Schedule

TARGET = "target"


def parameter_groups(
    module: nn.Module, drafter: Drafter, args: TrainingArguments, target_rate: float = 0.0
) -> list[dict[str, Any]]:
    """Group trained parameters by learning rate and by whether they decay; the drafter's first, plain ones before all.

    The first group has the learning rate as it was given, if any parameter has: it is what Trainer logs.

    module: what is trained: the drafter, or it beside its target. target_rate: of everything that is not the drafter's.

    Returns groups for an optimizer; `part` says whose they are.
    """
    own, scales = {id(p) for p in drafter.parameters()}, drafter.learning_rate_scales()
    groups: dict[tuple[bool, float, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            beside = id(parameter) not in own
            scale = next((factor for part, factor in scales.items() if part in name), 1.0)
            rate = target_rate if beside else args.learning_rate * scale
            decays = parameter.ndim > 1 and not name.endswith(("bias", "scale", "scales"))
            groups.setdefault((beside, rate, decays), []).append(parameter)
    given = args.learning_rate
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] != given, -item[0][1], not item[0][2]))
    return [
        {
            "params": params,
            "lr": rate,
            "weight_decay": args.weight_decay if decays else 0.0,
            "part": TARGET if beside else "drafter",
        }
        for (beside, rate, decays), params in ordered
    ]


def joining(scheduler: Any, optimizer: Optimizer, schedule: Schedule, warmup: int) -> LambdaLR:
    """Return a scheduler under which the target's rate is 0 until it joins, and then rises over `warmup` steps.

    scheduler: the one that all parameters would follow. Raises ValueError for one that is no function of the step.
    """
    if type(scheduler) is not LambdaLR:
        raise ValueError(
            "joint training needs a learning rate that depends on the step alone, but lr_scheduler_type gives a "
            f"{type(scheduler).__name__}; take cosine, linear, constant_with_warmup, ..."
        )

    def later(step: int, usual: Any) -> float:
        return usual(step) * schedule.rate_at(step, warmup)

    rates = [
        (lambda step, usual=usual: later(step, usual)) if group["part"] == TARGET else usual
        for group, usual in zip(optimizer.param_groups, scheduler.lr_lambdas, strict=True)
    ]
    return LambdaLR(optimizer, rates)
