"""A tuning for people: curve, acceptance, what each size is expected to bring, the choice, and whether it came true."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench.table import curve_table, headline, milliseconds, number, table_of

RANKS_SHOWN = 8
UNSTEADY = 0.15
"""Share of a pass's time from which on the differences between neighbouring sizes may drown."""


def print_tuning(report: dict[str, Any], console: Console) -> None:
    """Print acceptance, then for each batch size costs, candidates, the choice and its proof."""
    sizes = ", ".join(str(size) for size in report["settings"]["batch_sizes"])
    console.print(f"{headline(report)}, batch size {sizes}, seed {report['settings']['seed']}", highlight=False)
    console.print(_acceptance(report["acceptance"]))
    for batch in report["batches"]:
        console.print(curve_table(batch["curve"]))
        costs = ", ".join(
            f"{milliseconds(seconds)} at depth {depth}"
            for depth, seconds in enumerate(batch["draft_seconds_by_depth"], start=1)
        )
        unsteady = _unsteadiness(batch["curve"])
        if unsteady > UNSTEADY:
            console.print(
                f"The machine is busy: passes of the same size differ by {unsteady:.0%} either way, "
                "so the choice may be chance; tune again when it is quiet.",
                style="yellow",
                highlight=False,
            )
        console.print(
            f"Drafting takes {costs} ms; the engine besides {milliseconds(batch['other_seconds'])} ms a step.\n",
            highlight=False,
        )
        console.print(_candidates(batch))
        console.print(f"Batch size {batch['batch_size']}: {batch['reason']}\n", highlight=False)
        console.print(_proof(batch, report))
        console.print(f"The drafter's own: {batch['own_tree']}.", highlight=False)
        if batch["own_is_faster"]:
            console.print("It was measured faster than the best static tree, which is not kept.", highlight=False)


def _unsteadiness(curve: dict[str, Any]) -> float:
    """Return half the distance between the quartiles of a pass over its median, at the worst measured point."""
    points = zip(curve["forward_half_quartile_distance"], curve["forward_seconds"], strict=True)
    return max(spread / seconds for row in points for spread, seconds in zip(*row, strict=True))


def _acceptance(acceptance: dict[str, Any]) -> Table:
    table = table_of(
        f"Acceptance at {acceptance['positions']} positions: how often the candidate of each rank was right where its "
        "parent was"
    )
    ranks = range(min(RANKS_SHOWN, len(acceptance["table"][0])))
    for heading in ("depth", "reached", *(f"rank {rank}" for rank in ranks)):
        table.add_column(heading, justify="right")
    for depth, (shares, reached) in enumerate(zip(acceptance["table"], acceptance["reached"], strict=True), start=1):
        cells = [f"{shares[rank]:.3f}" if reached[rank] else "–" for rank in ranks]
        table.add_row(str(depth), str(reached[0]), *cells)
    return table


def _candidates(batch: dict[str, Any]) -> Table:
    table = table_of("Expected speed-up of decoding: tokens per step · T_1 / (T_v + T_d + T_o), times in milliseconds")
    table.add_column("tree")
    for heading in ("nodes", "depth", "tokens/step", "by table", "T_v", "T_d", "T_o", "expected"):
        table.add_column(heading, justify="right")
    rows = [("chosen" if one["nodes"] == batch["chosen"]["nodes"] else "", one) for one in batch["candidates"]]
    if batch["own"] is not None:
        rows.append(("the drafter's own", batch["own"]))
    for name, one in rows:
        table.add_row(
            name,
            str(one["nodes"]),
            str(one["depth"]),
            number(one["tokens_per_step"]),
            number(one["tokens_per_step_by_table"]),
            *(milliseconds(one[key]) for key in ("T_v", "T_d", "T_o")),
            number(one["expected_speedup"]),
            style="bold" if name == "chosen" else None,
        )
    return table


def _proof(batch: dict[str, Any], report: dict[str, Any]) -> Table:
    which = "other prompts" if report["proof_is_new"] else "the same prompts"
    table = table_of(
        f"Measured on {report['proof_prompts']['num_prompts']} prompts ({which}), all in turn, decoding alone"
    )
    table.add_column("tree")
    for heading in ("expected", "measured", "95% interval", "off by", "tokens/step expected", "measured", "different"):
        table.add_column(heading, justify="right")
    for name, one in batch["proof"].items():
        interval = one["measured_interval"]
        table.add_row(
            name,
            number(one["expected_speedup"]),
            number(one["measured_speedup"]),
            "" if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}",
            "–" if one["deviation"] is None else f"{one['deviation']:+.1%}",
            number(one["expected_tokens_per_step"]),
            number(one["measured_tokens_per_step"]),
            str(one["num_different"]),
        )
    return table
