"""A tiny target that may be changed, a drafter for it, and both in a module to be trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tiny_batches import scrambled
from tiny_targets import FAMILIES, VOCAB, make_model
from torch import Tensor, nn

from headstart.drafters.base import Drafter
from headstart.drafters.registry import new_drafter
from headstart.inference.target import Target
from headstart.training.adapters import trained_target
from headstart.training.joint import JointModule
from headstart.training.joint_arguments import JointArguments


def own_target(family: str = "llama", **more: Any) -> Target:
    """Return a target of one's own, frozen."""
    model_type, settings = FAMILIES[family]
    model = make_model(model_type, settings | more)
    return Target(model.requires_grad_(False))


def joint_module(
    method: str = "medusa",
    target: Target | None = None,
    disturb: float = 0.0,
    drafter: Drafter | None = None,
    **more: Any,
) -> JointModule:
    """Return a drafter beside its target. disturb: size of a random change of what is trained of the target.

    more: fields of `JointArguments`.
    """
    target = own_target() if target is None else target
    settings = JointArguments(**{"train_target": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0, **more})
    drafter = scrambled(new_drafter(method, target)) if drafter is None else drafter
    torch.manual_seed(5)
    joint = JointModule(drafter, trained_target(target, settings), settings)
    if disturb:
        scramble(joint.changes.trained.values(), disturb)
    return joint


def scramble(parameters: Any, size: float) -> None:
    """Add noise to parameters."""
    draw = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(size * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))


def inputs_of(rows: int = 3, length: int = 10) -> dict[str, Tensor]:
    """Return what a collator makes: rows of unlike lengths, their answers trained."""
    tokens = torch.randint(1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    place = torch.arange(length).expand(rows, -1)
    mask = place < torch.arange(length, length - rows, -1)[:, None]
    return {"tokens": tokens, "token_mask": mask, "loss_mask": mask & (place >= 3), "positions": place.clone()}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that there are, by name."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of all parameters and buffers, by name."""
    for name, tensor in module.state_dict().items():
        yield name, tensor.detach().clone()
