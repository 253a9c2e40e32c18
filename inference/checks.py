"""What a target and its prompts must satisfy before decoding starts; each failure says what would work."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..core import hf, masks, tree

if TYPE_CHECKING:
    from .target import Target

SELF_CHECK_PARENTS = [-1, 0, 0, 1, 2]
"""Two branches of two draft tokens each."""


@torch.inference_mode()
def check_tree_logits(target: Target) -> None:
    """Verify one small tree behind a cache with a hole, and compare with the model's own forward pass of each path.

    For families that the tests do not hold. It sees whether the model honours our masks, positions and cache, and
    whether the logits are its own; it cannot see what only shows in long sequences, such as a window.

    Raises ValueError when the model fails on a tree or gives other logits.
    """
    model, vocab = target.model, target.vocab_size
    ids = torch.arange(1, 9, device=target.device) * vocab // 9
    prompt, nodes = ids[None, :3], ids[None, 3:]
    paths = torch.stack([ids[[0, 1, 2, 3, 4, 6]], ids[[0, 1, 2, 3, 5, 7]]])
    draft_tree = tree.from_parents(nodes, torch.tensor([SELF_CHECK_PARENTS], device=ids.device))
    own = model(input_ids=paths, use_cache=False).logits
    expected = torch.stack([own[0, 3], own[0, 4], own[1, 4], own[0, 5], own[1, 5]]).float()
    cache = target.new_cache(1)
    try:
        block = masks.causal(torch.ones_like(prompt, dtype=torch.bool))
        target.forward(prompt, torch.arange(3, device=ids.device)[None], block, cache, ())
        cache.commit(torch.tensor([[0, 1, 2, 0]], device=ids.device), torch.tensor([3], device=ids.device))
        out = target.forward(nodes, 3 + draft_tree.depth, draft_tree.ancestors, cache, ())
        error = target.logits(out.final)[0].float() - expected
    except Exception as failure:
        raise ValueError(f"{_name(target)} cannot verify draft trees: {failure}; {hf.NEEDS_SUPPORTED}") from failure
    relative = float(error.norm() / (expected - expected.mean()).norm())
    tolerance = 0.2 if target.dtype in (torch.float16, torch.bfloat16) else 1e-3
    if not relative < tolerance:
        raise ValueError(
            f"{_name(target)} cannot verify draft trees: its logits on a tree differ from those of its own forward "
            f"pass by {relative:.1%}; call model.eval() if it is in training mode, otherwise {hf.NEEDS_SUPPORTED}"
        )


def _name(target: Target) -> str:
    return f"{type(target.model).__name__} ({target.model.config.model_type})"


def check_prompts(
    prompts: Sequence[Sequence[int]], budgets: Sequence[int], vocab: int, window: int | None, switch: int | None
) -> None:
    """Raise ValueError for prompts that cannot be run: empty, unknown ids, too long, or across a rope switch.

    window: the target's positions; beyond an `hf.SoftLimit` decoding goes on, with one warning.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one row, but there is none")
    if len(budgets) != len(prompts):
        raise ValueError(f"max_new_tokens must be one number or one a row: {len(budgets)} for {len(prompts)} prompts")
    for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty; a prompt needs at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab:
            raise ValueError(f"prompt {row} holds a token id outside 0 to {vocab - 1}; use this target's tokenizer")
        if budget < 1:
            raise ValueError(f"max_new_tokens must be at least 1, but is {budget} for prompt {row}")
        if window is None or len(prompt) + budget <= window:
            continue
        if isinstance(window, hf.SoftLimit):
            warnings.warn(
                f"text may grow beyond the {window} positions that the target was built for, where it gets worse; "
                "shorten the prompt or lower max_new_tokens",
                stacklevel=2,
            )
        else:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens and may grow by {budget}, but the target's window is {window}; "
                f"shorten the prompt or set max_new_tokens to at most {max(window - len(prompt), 0)}"
            )
    if switch is not None:
        short = [len(p) + n <= switch for p, n in zip(prompts, budgets, strict=True)]
        long = [len(p) > switch for p in prompts]
        if not (all(short) or all(long)):
            raise ValueError(
                f"this target's rotary embedding changes at {switch} positions; every row must stay below it or have a "
                "longer prompt: split the batch or lower max_new_tokens"
            )
