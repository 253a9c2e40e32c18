"""A sweep: one drafter with chains of several lengths or trees of several sizes, all in one interleaved run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from transformers import PreTrainedModel

from ...core.tree import TreeTopology
from ...drafters.base import Drafter
from ..target import Target
from ..tree_search import best_topology, with_topology
from ..tune.acceptance import measure_acceptance
from .bench import BenchSettings, run_bench
from .measure import row_seeds
from .prompts import PromptSet

PARAMETERS = {"draft_length": 1, "nodes": 2}
"""What can be swept, and the smallest value: tokens of a chain without its root, nodes of a tree with its root."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """parameter: one of `PARAMETERS`. values: ascending."""

    parameter: str
    values: tuple[int, ...]


def parse_sweep(text: str) -> Sweep:
    """Read `draft_length=1..8`, `nodes=2..32:2` (from, to, step) or `nodes=4,8,16`.

    Raises ValueError for an unknown name, naming the nearest, and for values that are none.
    """
    name, _, values = text.partition("=")
    if name not in PARAMETERS:
        near = get_close_matches(name, PARAMETERS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"sweep must be over {' or '.join(PARAMETERS)}, but is over {name!r}{hint}")
    found: set[int] = set()
    for part in values.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\.\.(\d+)(?::(\d+))?)?\s*", part)
        if match is None or match[3] == "0":
            raise ValueError(f"sweep values must look like 1..8, 2..32:2 or 4,8,16, but are {values!r} in {text!r}")
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        found |= set(range(first, last + 1, step))
    least = PARAMETERS[name]
    if not found or min(found) < least:
        raise ValueError(f"{name} must be at least {least} in every point of a sweep, but is {values!r}")
    return Sweep(name, tuple(sorted(found)))


def run_sweep(
    model: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    prompts: PromptSet,
    settings: BenchSettings,
    sweep: Sweep,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure every drafter with every value, beside the baseline, and set the formula's speed beside the measured one.

    settings: `cost_contexts` must hold a context; the sizes of the passes are those of the trees.

    Returns the report of `run_bench` with `sweep`: parameter, notes, and a point for each drafter and value.
    Raises ValueError without a drafter, and for drafters that draw their own trees.
    """
    if not drafters:
        raise ValueError("a sweep needs a drafter to draw trees with, but none was named; name one with drafters")
    twins: dict[str, Drafter] = {}
    points: list[dict[str, Any]] = []
    notes: list[str] = []
    for name, drafter in drafters.items():
        for value, topology in _trees(Target(model), drafter, prompts, settings, sweep, progress).items():
            twin = with_topology(drafter, topology)
            tree = twin.topology
            assert tree is not None
            if _value(tree, sweep.parameter) < value:
                notes.append(_stopped(name, tree, value, sweep.parameter))
                break
            method = f"{name} {sweep.parameter}={value}"
            twins[method] = twin
            points.append(
                {"method": method, "drafter": name, "value": value, "nodes": tree.num_nodes, "depth": tree.depth}
            )
    sizes = {1, *(point["nodes"] for point in points)}
    report = run_bench(model, twins, prompts, replace(settings, cost_nodes=tuple(sorted(sizes))), progress)
    for point in points:
        point |= _figures(report, point["method"])
    report["sweep"] = {"parameter": sweep.parameter, "notes": notes, "points": points}
    return report


def _trees(
    target: Target, drafter: Drafter, prompts: PromptSet, settings: BenchSettings, sweep: Sweep, progress: bool
) -> dict[int, TreeTopology]:
    """Return the tree for every value: chains, or of each size the best for what the drafter gets right here."""
    if sweep.parameter == "draft_length":
        return {value: TreeTopology.chain(value) for value in sweep.values}
    ids = [prompt.ids for prompt in prompts.prompts]
    seeds = row_seeds(settings.seed, 0, 0, len(ids))
    table = measure_acceptance(target, drafter, ids, settings.decoding, seeds, progress=progress).table()
    return {value: best_topology(table, value) for value in sweep.values}


def _value(tree: TreeTopology, parameter: str) -> int:
    return tree.depth if parameter == "draft_length" else tree.num_nodes


def _stopped(name: str, tree: TreeTopology, value: int, parameter: str) -> str:
    what = f"{tree.depth} tokens ahead" if parameter == "draft_length" else f"trees of {tree.num_nodes} nodes"
    return f"{name} guesses at most {what}: {parameter}={value} and beyond is left out"


def _figures(report: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what was measured of a point, of decoding alone, and what the formula says."""
    method, explained = report["methods"][name], report["costs"]["explained"].get(name, {})
    return {
        "tokens_per_step": method["tokens_per_step"],
        "measured": method["decode_speed_ratio"],
        "measured_interval": method["decode_speed_ratio_interval"],
        **{key: explained.get(key) for key in ("predicted", "error", "T_1", "T_v", "T_d", "T_o")},
    }
