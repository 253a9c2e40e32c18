"""Muon for a drafter's hidden matrices, AdamW for everything else, as one optimizer; and what does not go with it.

Muon (arXiv 2502.16982, and torch.optim.Muon) takes the step of a matrix in the direction nearest to its momentum among
those whose singular values are all 1. That is meant for matrices from one hidden state to another. Embeddings, heads
over the vocabulary, norms, biases and scalars stay with AdamW, and so does all that is trained of a target.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from transformers import TrainingArguments

from ..drafters.base import Drafter
from .processes import deepspeed_stage, fsdp_version

MUON, ADAMW = "muon", "adamw"


def check_optimizer(args: TrainingArguments) -> None:
    """Raise ValueError where Muon was asked for and cannot be had; before anything is loaded."""
    if args.optim != MUON:
        return
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(
            f"optim muon needs torch 2.9 or later, but torch is {torch.__version__}; pip install -U torch, or leave "
            "optim out"
        )
    if args.optim_args:
        raise ValueError(f"optim muon takes no optim_args, but they are {args.optim_args!r}; leave them out")
    why = "a step of Muon needs a matrix as a whole, but"
    stage = deepspeed_stage(args)
    if stage is not None:
        raise ValueError(
            f"{why} DeepSpeed's ZeRO (here stage {stage}) flattens weights and cuts them up; leave optim out, or start "
            "without DeepSpeed"
        )
    if fsdp_version() is not None:
        raise ValueError(f"{why} FSDP cuts weights up; leave optim out, or start without FSDP")


def hidden_matrices(drafter: Drafter) -> dict[str, nn.Parameter]:
    """Return the matrices that lead from one hidden state to another, by name.

    They are those whose shape does not follow the size of the vocabulary: a drafter for one token more, without
    memory for its weights, tells.
    """
    config: Any = copy.deepcopy(drafter.config)
    config.target_vocab_size += 1
    if config.draft_vocab_size is not None:
        config.draft_vocab_size += 1
    with torch.device("meta"):
        larger: nn.Module = type(drafter)(config)
    shapes = {name: parameter.shape for name, parameter in larger.named_parameters()}
    return {
        name: parameter
        for name, parameter in drafter.named_parameters()
        if parameter.ndim == 2 and shapes[name] == parameter.shape
    }


def muon_with_adamw(groups: Sequence[dict[str, Any]], drafter: Drafter, args: TrainingArguments) -> MuonWithAdamW:
    """Return the optimizer of these groups: of each, the drafter's hidden matrices go to Muon.

    groups: see `parameter_groups`; their learning rates and decays hold for both, since Muon's steps are scaled to the
    usual size of AdamW's.

    Raises ValueError for a drafter without hidden matrices, and see `check_optimizer`.
    """
    check_optimizer(args)
    hidden = {id(parameter) for parameter in hidden_matrices(drafter).values() if parameter.requires_grad}
    if not hidden:
        raise ValueError(f"optim muon is for hidden matrices, but {type(drafter).__name__} has none; leave optim out")
    split: list[dict[str, Any]] = []
    for group in groups:
        for method in (MUON, ADAMW):
            mine = [p for p in group["params"] if (id(p) in hidden) == (method == MUON)]
            if mine:
                split.append({**group, "params": mine, "method": method})
    return MuonWithAdamW(split, (args.adam_beta1, args.adam_beta2), args.adam_epsilon)


class MuonWithAdamW(Optimizer):
    """torch's Muon and AdamW behind one interface: one list of groups, one state, one step.

    groups: parameter groups; `method` says whose each is ("muon" or "adamw"). betas, eps: AdamW's.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        made: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
            MUON: lambda mine: torch.optim.Muon(mine, adjust_lr_fn="match_rms_adamw"),
            ADAMW: lambda mine: AdamW(mine, betas=betas, eps=eps, fused=True),
        }
        mine = {method: [group for group in groups if group["method"] == method] for method in made}
        # Each fills its own settings into its groups, which from here on are also those of the whole.
        self._parts = {method: make(mine[method]) for method, make in made.items() if mine[method]}
        super().__init__(groups, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with every gradient that there is."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for method, part in self._parts.items():
            # Reading a checkpoint puts other lists and another state in the place of these.
            part.param_groups = [group for group in self.param_groups if group["method"] == method]
            part.state = self.state
            part.step()
        return loss
