"""What a decoding step spends its time on: the target, the drafter, and the engine around them.

The engine's price is all that is neither the target's forward pass nor the drafter's own matrix products. The target's
forward is timed around its modules (the model below the head, and the head), so masks, positions and hooks count as
overhead; the drafter's products are timed one by one, so its top-k and tree building count as overhead too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...drafters.base import Drafter
from ..clock import synchronise
from ..engine import SpeculativeEngine
from ..target import Target
from .clock import ClockedDrafter, ProductClock
from .methods import Decoding


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds over all steps, by what they went into; `parts` sum up to `total`.

    parts: "target forward" and "drafter's matrix products", then the overhead: "drafter, the rest", "around the
    forward" (masks, positions, hooks), "verify", "commit", "between" (cutting, statistics, dropping finished rows).
    """

    steps: int
    nodes_per_step: float
    tokens_per_step: float
    total: float
    parts: dict[str, float]

    @property
    def overhead(self) -> float:
        """Share of the step that is neither the target's forward nor the drafter's own matrix products."""
        return 1 - (self.parts["target forward"] + self.parts["drafter's matrix products"]) / self.total

    def to_dict(self) -> dict[str, Any]:
        """Return milliseconds a step and shares, ready for JSON."""
        return {
            "steps": self.steps,
            "nodes_per_step": self.nodes_per_step,
            "tokens_per_step": self.tokens_per_step,
            "milliseconds": self.total / self.steps * 1000,
            "overhead": self.overhead,
            "parts": {
                name: {"milliseconds": seconds / self.steps * 1000, "share": seconds / self.total}
                for name, seconds in self.parts.items()
            },
        }


def split_steps(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], decoding: Decoding, warm_up: bool = True
) -> StepSplit:
    """Run the prompts one by one and split the time of their decoding steps.

    warm_up: run the first prompt once before. Raises ValueError when no prompt took a step.
    """
    clocked = ClockedDrafter(drafter, ProductClock(target.device))
    engine = SpeculativeEngine(target, clocked, times_phases=True)  # pyright: ignore[reportArgumentType]
    clock = _ForwardClock(target, clocked)
    sums = {"draft": 0.0, "target": 0.0, "verify": 0.0, "commit": 0.0}
    total = forward = products = propose = observe = 0.0
    steps = nodes = tokens = 0
    with clock.attached():
        for number, prompt in enumerate([*prompts[:1], *prompts] if warm_up else prompts):
            state = engine.prefill([prompt], decoding.rules(0))
            clocked.reset()
            assert clocked.products is not None
            clock.seconds = clocked.products.seconds = 0.0
            synchronise(target.device)
            start = time.perf_counter()
            while not state.done:
                engine.step(state)
            synchronise(target.device)
            if warm_up and number == 0:
                continue
            total += time.perf_counter() - start
            forward, products = forward + clock.seconds, products + clocked.products.seconds
            propose, observe = propose + clocked.propose_seconds, observe + clocked.observe_seconds
            sums = {phase: seconds + state.stats.seconds[phase] for phase, seconds in sums.items()}
            steps, nodes = steps + state.stats.target_passes, nodes + state.stats.nodes
            tokens += state.stats.tokens
    if not steps:
        raise ValueError("there must be a decoding step to split, but every prompt ended with its first token")
    parts = {
        "target forward": forward,
        "drafter's matrix products": products,
        "drafter, the rest": propose + observe - products,
        "around the forward": sums["target"] - forward,
        "verify": sums["verify"],
        "commit": sums["commit"] - observe,
    }
    parts["between"] = total - sum(parts.values())
    return StepSplit(steps, nodes / steps, tokens / steps, total, parts)


class _ForwardClock:
    """Adds up the seconds inside the target's own modules, unless the drafter is calling them."""

    def __init__(self, target: Target, drafter: ClockedDrafter) -> None:
        self.target, self.drafter, self.seconds = target, drafter, 0.0
        self._start = 0.0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Keep hooks on the model below its head, and on the head, while inside."""
        head = self.target.model.get_output_embeddings()
        modules: list[nn.Module] = [self.target.model.base_model, head]  # pyright: ignore[reportAssignmentType]
        handles = [module.register_forward_pre_hook(self._before) for module in modules]
        handles += [module.register_forward_hook(self._after) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, _module: nn.Module, _args: Any) -> None:
        synchronise(self.target.device)
        self._start = time.perf_counter()

    def _after(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        synchronise(self.target.device)
        if not self.drafter.inside:
            self.seconds += time.perf_counter() - self._start
