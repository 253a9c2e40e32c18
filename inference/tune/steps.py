"""What drafting costs by depth, and what the engine costs besides: single decoding steps, taken in turn."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tqdm import tqdm

from ...core import hf
from ...core.tree import TreeTopology
from ...drafters.base import Drafter
from ..bench.clock import ClockedDrafter
from ..bench.methods import Decoding
from ..clock import synchronise
from ..engine import SpeculativeEngine
from ..state import EngineState
from ..target import Target
from ..tree_search import with_topology


def draft_costs(
    target: Target,
    drafter: Drafter,
    trees: Sequence[TreeTopology],
    prompts: Sequence[list[int]],
    decoding: Decoding,
    rounds: int = 15,
    progress: bool = True,
) -> tuple[list[float], float]:
    """Measure T_d with each tree, and T_o.

    trees: one of each depth. prompts: the rows of every step. Each round takes one real step with every tree, between
    passes of the target as in serving: a drafter alone in a loop would find its weights in the processor's cache.

    Returns medians in seconds: of proposing and observing by tree, and of what is neither that nor the target's pass.
    """
    walkers = [_Walker(target, with_topology(drafter, tree), prompts, decoding, rounds) for tree in trees]
    draft = np.zeros((rounds, len(trees)))
    other = np.zeros((rounds, len(trees)))
    for number in tqdm(range(rounds + 1), desc="drafting", unit="round", disable=not progress, dynamic_ncols=True):
        for i in range(len(walkers)):
            turn = (i + number) % len(walkers)
            drafting, rest = walkers[turn].step()
            if number:  # round 0 warms up
                draft[number - 1, turn], other[number - 1, turn] = drafting, rest
    return np.median(draft, axis=0).tolist(), float(np.median(other))


class _Walker:
    """Takes single steps with one drafter, from the prompts on, and starts over where a row's room ends."""

    def __init__(
        self, target: Target, drafter: Drafter, prompts: Sequence[list[int]], decoding: Decoding, rounds: int
    ) -> None:
        assert drafter.topology is not None
        self.target, self.prompts = target, prompts
        self.longest = drafter.topology.depth + 1  # tokens that a step can emit
        self.drafter = ClockedDrafter(drafter)
        self.engine = SpeculativeEngine(target, self.drafter, times_phases=True)  # pyright: ignore[reportArgumentType]
        limit = hf.position_limit(target.model)
        budget = 1 + self.longest * (rounds + 2)
        if limit is not None:
            budget = min(budget, limit - max(len(prompt) for prompt in prompts))
        self.decoding = replace(decoding, max_new_tokens=budget, eos_token_ids=())
        self.state: EngineState | None = None

    def step(self) -> tuple[float, float]:
        """Take a step; return the drafter's seconds, and those that are neither its nor the target's."""
        state = self.state
        if state is None or min(self._room(state)) < self.longest:
            state = self.state = self.engine.prefill(self.prompts, self.decoding.rules(0))
        self.drafter.reset()
        forward = state.stats.seconds["target"]
        synchronise(self.target.device)
        start = time.perf_counter()
        self.engine.step(state)
        synchronise(self.target.device)
        total = time.perf_counter() - start
        drafting = self.drafter.propose_seconds + self.drafter.observe_seconds
        return drafting, total - drafting - (state.stats.seconds["target"] - forward)

    @staticmethod
    def _room(state: EngineState) -> list[int]:
        return [budget - len(output) for budget, output in zip(state.budgets, state.outputs, strict=True)]
