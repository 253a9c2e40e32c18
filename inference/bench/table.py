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
    console.print(_headline(report), highlight=False)
    console.print(_methods(report))
    for line in _differences(report):
        console.print(line, highlight=False)
    if any(method["by_category"] for method in report["methods"].values()):
        console.print(_categories(report))
    if report["costs"] is not None:
        console.print(_curve(report["costs"]["curve"]))
        if report["costs"]["explained"]:
            console.print(_explained(report["costs"]["explained"]))


def _headline(report: dict[str, Any]) -> str:
    machine, settings, prompts = report["machine"], report["settings"], report["prompts"]
    decoding = settings["decoding"]
    versions = machine["versions"]
    how = f"temperature {decoding['temperature']}" if decoding["temperature"] else "greedy"
    return (
        f"{settings['target']} in {machine['dtype']} on {machine['accelerator'] or machine['cpu']}, "
        f"{machine['threads']} threads, torch {versions['torch']}, transformers {versions['transformers']}\n"
        f"{prompts['num_prompts']} prompts of {prompts['source']}, {how}, up to {decoding['max_new_tokens']} new "
        f"tokens, batch size {settings['batch_size']}, repeats {settings['repeats']}, seed {settings['seed']}"
    )


def _methods(report: dict[str, Any]) -> Table:
    table = _table("Speed ratio: seconds per new token of whole calls, baseline over method; median of pairs")
    table.add_column("method")
    for heading in ("speed ratio", "95% interval", "tokens/step", "acceptance by depth", "tokens/s", "different"):
        table.add_column(heading, justify="right")
    for name, method in report["methods"].items():
        interval = method["speed_ratio_interval"]
        table.add_row(
            name,
            _number(method["speed_ratio"]),
            "" if name == BASELINE or interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}",
            _number(method["tokens_per_step"]),
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
                f"ratio {_number(without['speed_ratio'])}, tokens per step {_number(without['tokens_per_step'])}"
            )
    return lines


def _categories(report: dict[str, Any]) -> Table:
    names = [name for name in report["methods"] if name != BASELINE] or [BASELINE]
    table = _table("By category: speed ratio (tokens per step)")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for category, part in report["methods"][names[0]]["by_category"].items():
        cells = [report["methods"][name]["by_category"][category] for name in names]
        rows = [f"{_number(cell['speed_ratio'])} ({_number(cell['tokens_per_step'])})" for cell in cells]
        table.add_row(category, str(part["num_prompts"]), *rows)
    return table


def _curve(curve: dict[str, Any]) -> Table:
    table = _table(f"Milliseconds of one target pass over n tokens, batch size {curve['batch_size']}")
    for heading in ("context", "generate's step", *(f"n={nodes}" for nodes in curve["nodes"])):
        table.add_column(heading, justify="right")
    for context, step, row in zip(
        curve["contexts"], curve["generate_step_seconds"], curve["forward_seconds"], strict=True
    ):
        table.add_row(str(context), _ms(step), *(_ms(seconds) for seconds in row))
    return table


def _explained(explained: dict[str, Any]) -> Table:
    table = _table("Predicted: tokens per step · T_1 / (T_v + T_d + T_o), times in milliseconds; decoding alone")
    table.add_column("method")
    for heading in ("context", "nodes", "tokens/step", "T_1", "T_v", "T_d", "T_o", "predicted", "measured", "off by"):
        table.add_column(heading, justify="right")
    for name, one in explained.items():
        table.add_row(
            name,
            f"{one['context']:.0f}",
            f"{one['nodes']:.1f}",
            _number(one["tau"]),
            *(_ms(one[key]) for key in ("T_1", "T_v", "T_d", "T_o")),
            _number(one["predicted"]),
            _number(one["measured"]),
            f"{one['error']:+.1%}",
        )
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"
