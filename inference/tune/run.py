"""One tuning, from loaded models to a report: acceptance, costs, choice, and the choice measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ...core.tree import TreeTopology
from ...drafters.base import Drafter
from ..bench.bench import BenchSettings, run_bench
from ..bench.costs import CostCurve, check_contexts, cost_curve
from ..bench.machine import machine_facts
from ..bench.measure import row_seeds
from ..bench.methods import Decoding
from ..bench.prompts import PromptSet
from ..target import Target
from ..tree_search import best_topology, with_topology
from .acceptance import Acceptance, measure_acceptance
from .choose import Candidate, StepCosts, best_of_each_size, choose, judge, reason
from .steps import draft_costs

FORMAT_VERSION = 1
SIZES = (2, 3, 4, 6, 8, 10, 12, 16, 24, 32)
SIZES_OF_ACCELERATORS = (*SIZES, 48, 64, 96, 128)
TYPICAL_SIZE = 16
"""Nodes of the trees that drafting is timed with: its cost is taken to depend on the depth, and hardly on the size."""

OWN, TUNED = "own tree", "tuned tree"


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """How to measure and what for.

    batch_sizes: a choice for each. contexts: tokens before the measured passes; the choice goes by their average.
    rounds: of every cost. sizes: nodes, root included, that a tree may have; None takes what suits the device.
    """

    decoding: Decoding
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (128, 512)
    rounds: int = 15
    seed: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or self.rounds < 1:
            raise ValueError(
                f"batch sizes and rounds must be at least 1, but are {list(self.batch_sizes)} and {self.rounds}"
            )
        if not self.contexts or min(self.contexts) < 1:
            raise ValueError(f"contexts must be at least 1, but are {list(self.contexts)}")


def run_tune(
    model: PreTrainedModel,
    drafter: Drafter,
    prompts: PromptSet,
    proof: PromptSet,
    settings: TuneSettings,
    progress: bool = True,
) -> dict[str, Any]:
    """Choose a tree for each batch size, and measure it.

    drafter: with the tree it has now, of whatever kind, the one to beat. prompts: to count acceptance on. proof: to
    measure speed on.

    Returns a dict ready for JSON: machine, settings, prompts, acceptance, and an entry for each batch size. Raises
    ValueError for drafters that draw their own trees.
    """
    target = Target(model)
    check_contexts(target, settings.contexts, _sizes(target, settings))  # not after the long run
    ids = [prompt.ids for prompt in prompts.prompts]
    seeds = row_seeds(settings.seed, 0, 0, len(ids))
    acceptance = measure_acceptance(target, drafter, ids, settings.decoding, seeds, progress=progress)
    if not acceptance.positions:
        raise ValueError("there must be a token to guess, but every answer ended with its first; give other prompts")
    hits, reached = acceptance.counts()
    return {
        "headstart_tune": FORMAT_VERSION,
        "machine": machine_facts(target),
        "settings": {**asdict(settings), "target": model.config.name_or_path},
        "prompts": prompts.to_dict(),
        "proof_prompts": proof.to_dict(),
        "proof_is_new": not {p.id for p in prompts.prompts} & {p.id for p in proof.prompts},
        "acceptance": {
            "positions": acceptance.positions,
            "hits": hits.int().tolist(),
            "reached": reached.int().tolist(),
            "table": acceptance.table().tolist(),
        },
        "batches": [_tune_batch(target, drafter, acceptance, ids, proof, settings, b, progress)
                    for b in settings.batch_sizes],
    }  # fmt: skip


def _sizes(target: Target, settings: TuneSettings) -> tuple[int, ...]:
    """Return the sizes of trees to choose among."""
    return settings.sizes or (SIZES if target.device.type == "cpu" else SIZES_OF_ACCELERATORS)


def costs_at(curve: CostCurve, context: float | None, draft: Sequence[float], other: float) -> StepCosts:
    """Return what a step takes behind this many tokens; None averages over the measured contexts."""
    if context is None:
        step, forward = float(np.mean(curve.step)), np.mean(curve.forward, axis=0).tolist()
    else:
        step, forward = curve.step_at(context), [curve.forward_at(n, context) for n in curve.nodes]
    return StepCosts(step, curve.nodes, tuple(forward), tuple(draft), other)


def _tune_batch(
    target: Target,
    drafter: Drafter,
    acceptance: Acceptance,
    prompts: Sequence[list[int]],
    proof: PromptSet,
    settings: TuneSettings,
    batch_size: int,
    progress: bool,
) -> dict[str, Any]:
    sizes = _sizes(target, settings)
    own, table = drafter.fixed_topology, acceptance.table()
    measured = sorted({1, 1 if own is None else own.num_nodes, *sizes})
    curve = cost_curve(
        target, settings.contexts, measured, batch_size, settings.rounds, settings.seed, progress, settings.decoding
    )
    rows = [prompts[i % len(prompts)] for i in range(batch_size)]
    draft, other = draft_costs(
        target, drafter, trees_to_time(table), rows, settings.decoding, settings.rounds, progress
    )
    costs = costs_at(curve, None, draft, other)
    found = best_of_each_size(table, costs, sizes, acceptance.tokens_per_step)
    chosen = choose(found)
    mine = None if own is None else judge(own, table, costs, acceptance.tokens_per_step)
    trees = {OWN: mine} if own == chosen.topology else {TUNED: chosen, OWN: mine}
    report = _measured(target.model, drafter, trees, proof, settings, batch_size, progress)
    speeds = {name: report["methods"][name]["decode_speed_ratio"] or 0.0 for name in trees}
    return {
        "batch_size": batch_size,
        "curve": curve.to_dict(),
        "draft_seconds_by_depth": draft,
        "other_seconds": other,
        "candidates": [one.to_dict() for one in found],
        "own_tree": drafter.tree_told,
        "own": None if mine is None else mine.to_dict(),
        "chosen": chosen.to_dict(),
        "reason": reason(chosen, found),
        "own_is_faster": mine is None and speeds[OWN] > speeds[TUNED],
        "proof": {
            name: _compared(one, report["methods"][name], table, acceptance, curve, draft, other)
            for name, one in trees.items()
        },
    }


def trees_to_time(table: Tensor) -> list[TreeTopology]:
    """Return a tree of each depth of the table [K, R], of about the size that will be chosen."""
    return [
        TreeTopology.from_paths(
            {tuple(path) for tree in (best_topology(table, TYPICAL_SIZE, depth), TreeTopology.chain(depth))
             for path in tree.paths()}
        )
        for depth in range(1, len(table) + 1)
    ]  # fmt: skip


def _measured(
    model: PreTrainedModel,
    drafter: Drafter,
    trees: dict[str, Candidate | None],
    proof: PromptSet,
    settings: TuneSettings,
    batch_size: int,
    progress: bool,
) -> dict[str, Any]:
    """Run the benchmark with each tree, all in turn, and the model alone."""
    twins = {name: drafter if one is None else with_topology(drafter, one.topology) for name, one in trees.items()}
    bench = BenchSettings(settings.decoding, batch_size=batch_size, seed=settings.seed)
    return run_bench(model, twins, proof, bench, progress)


def _compared(
    candidate: Candidate | None,
    method: dict[str, Any],
    table: Tensor,
    acceptance: Acceptance,
    curve: CostCurve,
    draft: Sequence[float],
    other: float,
) -> dict[str, Any]:
    """Set what was expected, behind as many tokens as the run had, beside what was measured.

    Nothing is expected of a tree that is not static (None): it is measured alone.
    """
    costs = costs_at(curve, method["mean_context"], draft, other)
    expected = None
    if candidate is not None:
        expected = judge(candidate.topology, table, costs, acceptance.tokens_per_step).speedup
    measured = method["decode_speed_ratio"]
    return {
        "context": method["mean_context"],
        "expected_speedup": expected,
        "measured_speedup": measured,
        "measured_interval": method["decode_speed_ratio_interval"],
        "deviation": None if measured is None or expected is None else expected / measured - 1,
        "expected_tokens_per_step": None if candidate is None else candidate.tokens_per_step,
        "measured_tokens_per_step": method["tokens_per_step"],
        "speed_ratio_of_whole_calls": method["speed_ratio"],
        "num_different": method["num_different"],
        "num_ties": method["num_ties"],
    }
