"""Learning curves: `history.json`, what every log line and evaluation said by step, and its picture `curves.png`.

Both are made from Trainer's own log, which checkpoints keep, so a run that went on has one curve.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..inference.bench.plots import COLOURS, DOTS, blank_figure, require_matplotlib

HISTORY, PICTURE = "history.json", "curves.png"
USAGE = """usage: headstart train --plot FOLDER [FOLDER ...]

Draw the learning curves of a run from its history.json, as curves.png beside it; those of several runs go into one
picture in the working directory.

example:
  headstart train --plot outputs/medusa outputs/hydra"""


def history_of(log: Sequence[dict[str, float]]) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of Trainer's log by kind, figures by depth as lists: "training" and "evaluations".

    Of two evaluations at one step the first stays: at the end the best weights may be measured, which are of another.
    """
    training, evaluations = [], {}
    for line in log:
        own = {name.removeprefix("eval_"): value for name, value in line.items()}
        record = {name: own.pop(name) for name in ("step", "epoch") if name in own}
        if "eval_loss" in line:
            evaluations.setdefault(line["step"], record | _by_depth(own))
        elif "loss" in line or "skipped_steps" in line:
            training.append(record | _by_depth(own))
    return {"training": training, "evaluations": list(evaluations.values())}


def _by_depth(line: dict[str, float]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, value in line.items():
        kind, depth, _ = name.partition("_depth_")
        if depth:
            figures.setdefault(f"{kind}_by_depth", []).append(value)
        else:
            figures[name] = value
    return figures


class CurveWriter(TrainerCallback):
    """Writes history.json at every evaluation, and the picture at the end where matplotlib is installed.

    plot: whether to draw.
    """

    def __init__(self, plot: bool) -> None:
        self.plot = plot

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what is known so far."""
        self._write(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write everything, and draw it."""
        self._write(args, state)
        if args.should_save and self.plot and find_spec("matplotlib") is not None:
            folder = Path(str(args.output_dir))
            draw({folder.name: history_of(state.log_history)}, folder / PICTURE)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        if args.should_save:
            text = json.dumps(history_of(state.log_history), indent=1)
            path = Path(str(args.output_dir)) / HISTORY
            fresh = path.with_name(HISTORY + ".partial")
            fresh.write_text(text + "\n", encoding="utf-8")
            fresh.replace(path)


def read_history(folder: Path) -> dict[str, Any]:
    """Return the history of a run. Raises ValueError where there is none, or a damaged one."""
    path = folder / HISTORY
    if not path.is_file():
        raise ValueError(f"{folder} must be the output_dir of a run, with its {HISTORY}, but there is none")
    try:
        history = json.loads(path.read_text(encoding="utf-8"))
        return {kind: list(history[kind]) for kind in ("training", "evaluations")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be the history of a run, but cannot be read ({error}); delete it") from error


def draw(histories: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the curves of one or several runs by name: loss, accuracy by depth, and true tokens per step."""
    figure = blank_figure(13, 4)
    loss, accuracy, generated = figure.subplots(1, 3)
    for i, (name, history) in enumerate(histories.items()):
        colour = COLOURS[i % len(COLOURS)]
        held_out = history["evaluations"]
        _curve(loss, history["training"], "loss", color=colour, alpha=0.45, linewidth=1)
        _curve(loss, held_out, "loss", color=colour, marker="o", label=name)
        for k in range(max((len(one.get("accuracy_by_depth", ())) for one in held_out), default=0)):
            depth = [one | {"at": one["accuracy_by_depth"][k]} for one in held_out]
            _curve(accuracy, depth, "at", color=colour, marker=".", alpha=1 / (1 + 0.5 * k))
        _curve(generated, held_out, "tokens_per_step", color=colour, marker="o", label=name)
    loss.set(ylabel="loss (line: training, points: held out)")
    accuracy.set(ylabel="held-out accuracy by depth (paler is deeper)", ylim=(0, 1))
    generated.set(ylabel="tokens per step on held-out prompts")
    for axes in (loss, accuracy, generated):
        axes.set_xlabel("step")
        axes.grid(color="0.9")
    if len(histories) > 1:
        figure.legend(*generated.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=DOTS)


def _curve(axes: Any, records: Sequence[dict[str, Any]], name: str, **style: Any) -> None:
    points = [(one["step"], one[name]) for one in records if name in one]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def main(folders: Sequence[str]) -> int:
    """Run `headstart train --plot FOLDER …`; return its exit status."""
    if not folders or folders[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if folders else sys.stderr)
        return 0 if folders else 2
    require_matplotlib()
    histories = {folder: read_history(Path(folder)) for folder in folders}
    path = Path(folders[0]) / PICTURE if len(folders) == 1 else Path(PICTURE)
    draw(histories, path)
    print(path)
    return 0
