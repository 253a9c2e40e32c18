"""The report of a benchmark for people: tables in the terminal. What a figure means is in the titles."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .methods import BASELINE

WIDTH = 120


def report_console(stderr: bool) -> Console:
    """Return a console that is wide enough for the tables also where there is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=WIDTH)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Print machine, methods, differences, categories and costs."""
    settings = report["settings"]
    repeats = f"batch size {settings['batch_size']}, repeats {settings['repeats']}, seed {settings['seed']}"
    console.print(f"{headline(report)}, {repeats}", highlight=False)
    console.print(_methods(report))
    for line in [*_trees(report), *_differences(report), *_coverage(report)]:
        console.print(line, highlight=False)
    if report["sweep"] is not None:
        console.print(_sweep(report["sweep"]))
        for note in report["sweep"]["notes"]:
            console.print(note, highlight=False)
    elif any(method["by_category"] for method in report["methods"].values()):
        console.print(_categories(report))
    if report["costs"] is not None:
        console.print(curve_table(report["costs"]["curve"]))
        if report["costs"]["explained"]:
            console.print(_explained(report["costs"]["explained"]))


def headline(report: dict[str, Any]) -> str:
    """Say what was measured, and on what."""
    machine, settings, prompts = report["machine"], report["settings"], report["prompts"]
    decoding = settings["decoding"]
    versions = machine["versions"]
    how = f"temperature {decoding['temperature']}" if decoding["temperature"] else "greedy"
    return (
        f"{settings['target']} in {machine['dtype']} on {machine['accelerator'] or machine['cpu']}, "
        f"{machine['threads']} threads, torch {versions['torch']}, transformers {versions['transformers']}\n"
        f"{prompts['num_prompts']} prompts of {prompts['source']}, {how}, up to {decoding['max_new_tokens']} new "
        "tokens"
    )


def _methods(report: dict[str, Any]) -> Table:
    table = table_of("Speed ratio: seconds per new token of whole calls, baseline over method; median of pairs")
    table.add_column("method")
    for heading in ("speed ratio", "95% interval", "tokens/step", "acceptance by depth", "tokens/s", "different"):
        table.add_column(heading, justify="right")
    for name, method in report["methods"].items():
        interval = method["speed_ratio_interval"]
        table.add_row(
            name,
            number(method["speed_ratio"]),
            "" if name == BASELINE or interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}",
            number(method["tokens_per_step"]),
            " ".join(f"{rate:.2f}" for rate in method["acceptance_by_depth"] or ()),
            f"{method['tokens_per_second']:.1f}",
            _different(name, report),
        )
    return table


def _different(name: str, report: dict[str, Any]) -> str:
    method = report["methods"][name]
    if name == report["settings"]["reference"]:
        return "reference"
    if method["num_different"] is None:
        return "other noise"
    ties = f" ({method['num_ties']} ties)" if method["num_ties"] else ""
    return f"{method['num_different']} of {method['num_prompts']}{ties}"


def _differences(report: dict[str, Any]) -> list[str]:
    """Return a line for each text that differs, and one for texts that repeat themselves."""
    lines = []
    for name, method in report["methods"].items():
        for one in method["differences"] or ():
            verdict = {True: "a tie", False: "NOT a tie", None: "no claim in this dtype"}[one["tie"]]
            lines.append(
                f"{name}: prompt {one['prompt']} differs at token {one['position']}: {one['token']} instead of "
                f"{one['reference']}; the two best scores are {one['gap']:.2g} apart ({verdict})"
            )
        loops, rate = method["loops"]["prompts"], method["tokens_per_step"]
        if loops and name != BASELINE and rate:
            without = method["loops"]["without"]
            lines.append(
                f"{name}: {len(loops)} texts repeat themselves, which is easy to guess; without their batches: speed "
                f"ratio {number(without['speed_ratio'])}, tokens per step {number(without['tokens_per_step'])}"
            )
    return lines


def _trees(report: dict[str, Any]) -> list[str]:
    """Return a line that says what trees each drafter draws; a sweep's table says it point by point."""
    if report["sweep"] is not None:
        return []
    told = [f"{name}: {method['tree']}" for name, method in report["methods"].items() if method["tree"]]
    return [f"Draft trees, nodes with the root: {'. '.join(told)}."] if told else []


def _coverage(report: dict[str, Any]) -> list[str]:
    """Return a line for each draft vocabulary: how much of the texts it covers, the least covered category first."""
    names: dict[str, list[str]] = {}
    for name, method in report["methods"].items():
        found = method["draft_vocabulary"]
        if found is not None:
            parts = sorted(found["by_category"].items(), key=lambda part: part[1])
            told = ": " + ", ".join(f"{part} {share:.1%}" for part, share in parts) if parts else ""
            covers = f"{found['size']:,} tokens covers {found['coverage']:.1%} of the target's tokens{told}"
            names.setdefault(covers, []).append(name)
    return [
        f"{same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: the draft vocabulary of {covers}"
        for covers, same in names.items()
    ]


def _categories(report: dict[str, Any]) -> Table:
    names = [name for name in report["methods"] if name != BASELINE] or [BASELINE]
    table = table_of("By category: speed ratio (tokens per step)")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for category, part in report["methods"][names[0]]["by_category"].items():
        cells = [report["methods"][name]["by_category"][category] for name in names]
        rows = [f"{number(cell['speed_ratio'])} ({number(cell['tokens_per_step'])})" for cell in cells]
        table.add_row(category, str(part["num_prompts"]), *rows)
    return table


def curve_table(curve: dict[str, Any]) -> Table:
    """Return a measured cost curve as a table."""
    table = table_of(
        "Milliseconds of one step of generate (T_1) and of one target pass over n tokens (T_v), batch size "
        f"{curve['batch_size']}"
    )
    for heading in ("context", "T_1", *(f"n={nodes}" for nodes in curve["nodes"])):
        table.add_column(heading, justify="right")
    for context, step, row in zip(
        curve["contexts"], curve["generate_step_seconds"], curve["forward_seconds"], strict=True
    ):
        table.add_row(str(context), milliseconds(step), *(milliseconds(seconds) for seconds in row))
    return table


def _explained(explained: dict[str, Any]) -> Table:
    table = table_of("Predicted: tokens per step · T_1 / (T_v + T_d + T_o), times in milliseconds; decoding alone")
    table.add_column("method")
    for heading in ("context", "nodes", "tokens/step", "T_1", "T_v", "T_d", "T_o", "predicted", "measured", "off by"):
        table.add_column(heading, justify="right")
    for name, one in explained.items():
        table.add_row(
            name,
            f"{one['context']:.0f}",
            f"{one['nodes']:.1f}",
            number(one["tau"]),
            *(milliseconds(one[key]) for key in ("T_1", "T_v", "T_d", "T_o")),
            number(one["predicted"]),
            number(one["measured"]),
            f"{one['error']:+.1%}",
        )
    return table


def _sweep(sweep: dict[str, Any]) -> Table:
    table = table_of("Sweep: measured speed ratio of decoding, and tokens per step · T_1 / (T_v + T_d + T_o)")
    table.add_column("drafter")
    for heading in (
        sweep["parameter"],
        "nodes",
        "depth",
        "tokens/step",
        "measured",
        "95% interval",
        "formula",
        "off by",
    ):
        table.add_column(heading, justify="right")
    for point in sweep["points"]:
        interval = point["measured_interval"]
        table.add_row(
            point["drafter"],
            *(str(point[key]) for key in ("value", "nodes", "depth")),
            number(point["tokens_per_step"]),
            number(point["measured"]),
            "" if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}",
            number(point["predicted"]),
            "–" if point["error"] is None else f"{point['error']:+.1%}",
        )
    return table


def table_of(title: str) -> Table:
    """Return an empty table in the style of every report."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def number(value: float | None) -> str:
    """Return a figure with two decimals, a dash where there is none."""
    return "–" if value is None else f"{value:.2f}"


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds."""
    return f"{seconds * 1000:.1f}"
