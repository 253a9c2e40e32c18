"""What a forward pass costs here, and what speed that predicts.

The cost curve T_v(n) is the time of one target pass over n tokens behind a filled cache, logits included; T_1 is one
decoding step of transformers' `generate` with the same context, greedy or sampled as the run is. With the draft cost
T_d and everything else T_o of a measured run, speed = tokens per step · T_1 / (T_v + T_d + T_o): an identity that a
measured ratio must meet, or some time has been overlooked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import StoppingCriteriaList

from ...core import hf
from ..clock import synchronise
from ..target import Target
from .measure import Round
from .methods import BASELINE, Decoding, StepStamps

NODE_COUNTS = (1, 2, 4, 8, 12, 16, 24, 32)
STEPS_OF_GENERATE = 8


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Medians over interleaved rounds, in seconds.

    forward [contexts][nodes]: T_v. step [contexts]: T_1 of `generate`. spread [contexts][nodes]: half the distance
    between the quartiles of T_v.
    """

    batch_size: int
    contexts: tuple[int, ...]
    nodes: tuple[int, ...]
    forward: list[list[float]]
    step: list[float]
    spread: list[list[float]]

    def forward_at(self, nodes: float, context: float) -> float:
        """Return T_v between the measured points (linear), or at the nearest of them outside."""
        by_context = [float(np.interp(nodes, self.nodes, row)) for row in self.forward]
        return float(np.interp(context, self.contexts, by_context))

    def step_at(self, context: float) -> float:
        """Return T_1 at a context, as `forward_at`."""
        return float(np.interp(context, self.contexts, self.step))

    def to_dict(self) -> dict[str, Any]:
        """Return the curve, ready for JSON."""
        return {
            "batch_size": self.batch_size,
            "contexts": list(self.contexts),
            "nodes": list(self.nodes),
            "forward_seconds": self.forward,
            "forward_half_quartile_distance": self.spread,
            "generate_step_seconds": self.step,
        }


def check_contexts(target: Target, contexts: Sequence[int], nodes: Sequence[int] = NODE_COUNTS) -> int:
    """Return the tokens that the longest measured pass sees. Raises ValueError unless they fit the target's window."""
    beyond = max(*nodes, STEPS_OF_GENERATE + 1)
    limit = hf.position_limit(target.model)
    if min(contexts) < 1 or (limit is not None and max(contexts) + beyond > limit):
        most = "" if limit is None else f" and at most {limit - beyond}, the target's window less a pass of {beyond}"
        raise ValueError(f"contexts must be at least 1{most}, but are {', '.join(map(str, contexts))}")
    return max(contexts) + beyond


@torch.inference_mode()
def cost_curve(
    target: Target,
    contexts: Sequence[int],
    nodes: Sequence[int] = NODE_COUNTS,
    batch_size: int = 1,
    rounds: int = 15,
    seed: int = 0,
    progress: bool = True,
    decoding: Decoding | None = None,
) -> CostCurve:
    """Measure T_v and T_1; every round times every point once, so that a busy moment hits all alike.

    contexts: committed tokens before the pass. Text is random: costs do not depend on it. decoding: how `generate`
    takes its tokens (default: greedy); a draw over a large vocabulary is a noticeable part of a step.

    Raises ValueError when a context does not fit the target's window.
    """
    contexts, nodes = tuple(sorted(set(contexts))), tuple(sorted(set(nodes)))
    longest = check_contexts(target, contexts, nodes)
    never = target.vocab_size  # no token has this id: `generate` cannot end early
    decoding = replace(decoding or Decoding(1), max_new_tokens=STEPS_OF_GENERATE + 1, eos_token_ids=(never,))
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(target.vocab_size, (batch_size, longest), generator=generator).to(target.device)
    caches = [filled_cache(target, text[:, :context]) for context in contexts]
    passes = np.zeros((rounds, len(contexts), len(nodes)))
    steps: list[list[float]] = [[] for _ in contexts]
    for number in tqdm(range(rounds + 1), desc="costs", unit="round", disable=not progress, dynamic_ncols=True):
        for c, context in enumerate(contexts):
            stamps = _generate_steps(target, text[:, :context], decoding)
            for i in range(len(nodes)):
                n = (i + number) % len(nodes)
                seconds = time_pass(target, text[:, context : context + nodes[n]], caches[c])
                if number:  # round 0 warms up
                    passes[number - 1, c, n] = seconds
            if number:
                steps[c] += stamps
    quartiles = np.quantile(passes, [0.25, 0.5, 0.75], axis=0)
    return CostCurve(
        batch_size,
        contexts,
        nodes,
        quartiles[1].tolist(),
        [float(np.median(one)) for one in steps],
        ((quartiles[2] - quartiles[0]) / 2).tolist(),
    )


def predicted_ratio(tau: float, step: float, forward: float, draft: float, other: float) -> float:
    """Return tau · T_1 / (T_v + T_d + T_o)."""
    return tau * step / (forward + draft + other)


def explain(name: str, method: dict[str, Any], rounds: Sequence[Round], curve: CostCurve) -> dict[str, Any] | None:
    """Set the speed that the costs predict beside the measured one; None for methods without draft trees.

    method: its figures as made by `method_report`. `predicted` and `measured` count decoding alone;
    `predicted_whole` and `measured_whole` count whole calls, prefill included.
    """
    counts, seconds = method["steps"], method["seconds"]
    if not counts.get("target_passes") or method["decode_speed_ratio"] is None:
        return None
    passes = counts["target_passes"]
    calls = [one.calls[name] for one in rounds]
    rows = sum(len(call.outputs) for call in calls)
    context = method["mean_context"]
    tau, nodes = method["tokens_per_step"], counts["nodes_per_pass"]
    step, forward = curve.step_at(context), curve.forward_at(nodes, context)
    draft = (seconds["draft"] + seconds["observe"]) / passes
    other = (seconds["verify"] + seconds["commit"] + seconds["other"]) / passes
    later = method["new_tokens"] / rows - 1  # tokens a row after its first
    base = [one.calls[BASELINE] for one in rounds]
    base_prefill = sum(call.prefill_seconds for call in base) / len(base)
    prefill = seconds["prefill"] / len(calls)
    whole = (base_prefill + later * step) / (prefill + later / tau * (forward + draft + other))
    predicted = predicted_ratio(tau, step, forward, draft, other)
    return {
        "context": context,
        "nodes": nodes,
        "tau": tau,
        "T_1": step,
        "T_v": forward,
        "T_v_in_run": seconds["target"] / passes,
        "T_d": draft,
        "T_o": other,
        "predicted": predicted,
        "measured": method["decode_speed_ratio"],
        "predicted_whole": whole,
        "measured_whole": method["speed_ratio"],
        "error": predicted / method["decode_speed_ratio"] - 1,
        "error_whole": whole / method["speed_ratio"] - 1,
    }


def filled_cache(target: Target, text: Tensor) -> Any:
    """Return a cache that holds the text [B, L] long, committed."""
    batch, length = text.shape
    cache = target.new_cache(batch)
    every = torch.arange(length, device=text.device).expand(batch, -1)
    lower = torch.ones(batch, length, length, dtype=torch.bool, device=text.device).tril()
    target.forward(text, every, lower, cache, ())
    cache.commit(every, torch.full((batch,), length, device=text.device))
    return cache


def time_pass(target: Target, block: Tensor, cache: Any) -> float:
    """Return the seconds of one pass over block [B, n] long with logits; the cache is left as it was."""
    batch, size = block.shape
    positions = cache.columns + torch.arange(size, device=block.device).expand(batch, -1)
    lower = torch.ones(batch, size, size, dtype=torch.bool, device=block.device).tril()
    synchronise(block.device)
    start = time.perf_counter()
    target.logits(target.forward(block, positions, lower, cache, ()).final)
    synchronise(block.device)
    seconds = time.perf_counter() - start
    cache.drop_block()
    return seconds


def _generate_steps(target: Target, text: Tensor, decoding: Decoding) -> list[float]:
    """Return the seconds of each step of `generate` after its prefill."""
    stamps = StepStamps()
    target.model.generate(  # pyright: ignore[reportCallIssue]
        text,
        attention_mask=torch.ones_like(text),
        generation_config=decoding.generation_config(),
        stopping_criteria=StoppingCriteriaList([stamps]),
    )
    return [later - earlier for earlier, later in zip(stamps.seconds[:-1], stamps.seconds[1:], strict=True)]
