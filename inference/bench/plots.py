"""The report of a benchmark as pictures (PNG). Needs matplotlib, which the extra `demo` installs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .methods import BASELINE

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")
DOTS = 150  # per inch


def require_matplotlib() -> None:
    """Raise ValueError where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib, which is not installed; run `pip install 'headstart[demo]'`")


def write_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what the report holds into the folder; return the files."""
    require_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    if report["sweep"] is not None:
        figures = {"sweep": sweep_figure(report)}
    else:
        figures = {"speed": speed_figure(report), "acceptance": acceptance_figure(report), "costs": cost_figure(report)}
    written = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=DOTS)
            written.append(path)
    return written


def speed_figure(report: dict[str, Any]) -> Any:
    """Draw tokens per step and speed ratio of every method, over all prompts and by category; None without methods."""
    methods = {name: one for name, one in report["methods"].items() if name != BASELINE}
    if not methods:
        return None
    categories = list(next(iter(methods.values()))["by_category"])
    labels = ["all prompts", *categories]
    if len(methods) > len(COLOURS):
        return _speed_table(report, methods, labels)
    figure = blank_figure(9, 1.9 + 0.3 * len(labels) * max(1, 0.6 * len(methods)))
    left, right = figure.subplots(1, 2, sharey=True)
    height = 0.8 / len(methods)
    for i, (name, method) in enumerate(methods.items()):
        style = _style(report, name) | {"linestyle": "none"}
        rows = [k + (i - (len(methods) - 1) / 2) * height for k in range(len(labels))]
        parts = [method, *(method["by_category"].get(category) for category in categories)]
        for axes, key in ((left, "tokens_per_step"), (right, "speed_ratio")):
            points = [(part[key], row) for part, row in zip(parts, rows, strict=True) if part and part[key]]
            if points:
                axes.plot(*zip(*points, strict=True), **style, markersize=5)
        if method["speed_ratio_interval"] is not None:
            right.hlines(rows[0], *method["speed_ratio_interval"], color=style["color"], linewidth=1.5)
        left.plot([], [], label=name, **style)
    left.set_yticks(range(len(labels)), labels)
    left.get_yticklabels()[0].set_fontweight("bold")
    left.invert_yaxis()
    left.set_xlabel("tokens per step")
    right.set_xlabel(f"speed ratio to generate ({_how(report)})")
    left.set_xlim(left=min(1.0, left.get_xlim()[0]))
    right.axvline(1, color="0.4", linewidth=1)
    for axes in (left, right):
        axes.axhline(0.5, color="0.8", linewidth=1)
        axes.grid(axis="x", color="0.9")
    figure.legend(loc="outside upper center", ncols=min(4, len(methods)), frameon=False)
    return figure


def _speed_table(report: dict[str, Any], methods: dict[str, Any], labels: Sequence[str]) -> Any:
    """Draw the same for more methods than dots can tell apart: a number for each method and category, in colour."""
    figure = blank_figure(2.5 + 0.95 * len(methods), 1.6 + 0.28 * len(labels))
    captions = {"tokens_per_step": "tokens per step", "speed_ratio": f"speed ratio to generate ({_how(report)})"}
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (key, caption) in zip(panels, captions.items(), strict=True):
        parts = [[one, *map(one["by_category"].get, labels[1:])] for one in methods.values()]
        numbers = [[part[key] if part and part[key] else math.nan for part in row] for row in zip(*parts, strict=True)]
        axes.imshow(numbers, cmap="YlGn", aspect="auto", vmin=1)
        darkest = 0.65 * max((number for row in numbers for number in row if not math.isnan(number)), default=1) + 0.35
        for y, row in enumerate(numbers):
            for x, number in enumerate(row):
                if not math.isnan(number):
                    colour = "w" if number > darkest else "k"
                    axes.text(x, y, f"{number:.2f}", ha="center", va="center", fontsize=7, color=colour)
        axes.axhline(0.5, color="k", linewidth=1)
        axes.set_xticks(range(len(methods)), methods, rotation=40, ha="right")
        axes.set_yticks(range(len(labels)), labels)
        axes.set_title(caption, fontsize=10)
    panels[0].get_yticklabels()[0].set_fontweight("bold")
    return figure


def acceptance_figure(report: dict[str, Any]) -> Any:
    """Draw the acceptance rate at each depth of every drafter; None where nothing was drafted."""
    drafted = {name: one for name, one in report["methods"].items() if one["acceptance_by_depth"]}
    if not drafted:
        return None
    figure = blank_figure(5.5, 3.6)
    axes = figure.subplots()
    deepest = max(len(one["acceptance_by_depth"]) for one in drafted.values())
    for name, one in drafted.items():
        reached = one["steps"]["reached_by_depth"]
        rates = [rate for rate, count in zip(one["acceptance_by_depth"], reached, strict=True) if count]
        axes.plot(range(1, len(rates) + 1), rates, label=name, **_style(report, name))
    axes.set(xlabel="depth k", ylabel="accepted at depth k / reached depth k − 1", ylim=(0, 1))
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlim(0.75, deepest + 0.25)
    axes.grid(color="0.9")
    axes.legend(frameon=False)
    return figure


def cost_figure(report: dict[str, Any]) -> Any:
    """Draw the time of a target pass over n tokens and where each drafter works on it; None where not measured."""
    if report["costs"] is None:
        return None
    curve, explained = report["costs"]["curve"], report["costs"]["explained"]
    figure = blank_figure(6.5, 4.2)
    axes = figure.subplots()
    for i, context in enumerate(curve["contexts"]):
        colour, dashes = str(0.25 + 0.4 * i / len(curve["contexts"])), ("-", "--", "-.", ":")[i % 4]
        passes = [seconds * 1000 for seconds in curve["forward_seconds"][i]]
        axes.plot(
            curve["nodes"], passes, color=colour, linestyle=dashes, marker=".", label=f"target pass, context {context}"
        )
        step = curve["generate_step_seconds"][i] * 1000
        axes.plot(1, step, color=colour, marker="*", markersize=10, linestyle="none",
                  label=None if i else "one step of transformers' generate")  # fmt: skip
    for name, one in explained.items():
        style = _style(report, name)
        bottom, top = one["T_v_in_run"] * 1000, (one["T_v_in_run"] + one["T_d"] + one["T_o"]) * 1000
        axes.vlines(one["nodes"], bottom, top, color=style["color"], linewidth=1.5)
        axes.plot(one["nodes"], bottom, fillstyle="none", **style)
        axes.plot(
            one["nodes"], top, linestyle="none", **style,
            label=f"{name}: pass (hollow), whole step (filled); {one['tau']:.2f} tokens",
        )  # fmt: skip
    axes.set(xlabel=f"tokens in the pass (batch size {curve['batch_size']})", ylabel=f"milliseconds ({_how(report)})")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="0.9")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def sweep_figure(report: dict[str, Any]) -> Any:
    """Draw the measured speed of every point with the formula's, and tokens per step below; None without points."""
    points = [point for point in report["sweep"]["points"] if point["measured"] and point["predicted"]]
    if not points:
        return None
    parameter = {"draft_length": "draft tokens in a chain", "nodes": "nodes of the tree, root included"}
    figure = blank_figure(6.5, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    names = dict.fromkeys(point["drafter"] for point in points)
    for i, name in enumerate(names):
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        own = [point for point in points if point["drafter"] == name]
        values = [point["value"] for point in own]
        above.plot(
            values,
            [p["measured"] for p in own],
            color=colour,
            marker=marker,
            linestyle="none",
            label=f"{name}, measured",
        )
        for point in own:
            if point["measured_interval"] is not None:
                above.vlines(point["value"], *point["measured_interval"], color=colour, linewidth=1.5)
        formula = [point["predicted"] for point in own]
        above.plot(values, formula, color=colour, linestyle="--", label=f"{name}, formula")
        below.plot(values, [point["tokens_per_step"] for point in own], color=colour, marker=marker)
    above.axhline(1, color="0.4", linewidth=1)
    above.set_ylabel(f"speed ratio of decoding ({_how(report)})")
    below.set_ylabel("tokens per step")
    below.set_ylim(bottom=1)
    below.set_xlabel(parameter[report["sweep"]["parameter"]])
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        axes.grid(color="0.9")
    above.legend(frameon=False)
    return figure


def blank_figure(width: float, height: float) -> Any:
    """Return an empty figure that draws without a display and leaves matplotlib's global state alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a method's colour and marker: the same in every picture of a report."""
    i = [other for other in report["methods"] if other != BASELINE].index(name)
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[(i + i // len(COLOURS)) % len(MARKERS)]}


def _how(report: dict[str, Any]) -> str:
    machine = report["machine"]
    threads = f"{machine['threads']} CPU thread{'s' * (machine['threads'] != 1)}"
    return f"{machine['dtype']}, {machine['accelerator'] or threads}"
