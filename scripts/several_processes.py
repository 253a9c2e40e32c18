"""Show that two processes train what one trains: loss curves, a kill in the middle, the weights at the end.

    python scripts/several_processes.py --target .cache/smollm2-135m-instruct --out outputs/several_processes

The same run is made by one process and by two under `accelerate launch`, on the CPU: data-parallel, with DeepSpeed's
ZeRO-2, and with ZeRO-3, which cuts up the target too. Those of two processes get SIGKILL half-way, all at once and as
soon as a checkpoint is there, and the same command goes on. What two processes do in a step, one does in twice as many
batches; so losses and weights must agree but for the order of additions. Everything is float32, for then nothing else
can hide in the differences. Runs that are finished are not made again: remove the folder to start over.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from safetensors.torch import load_file

from headstart.inference.bench.plots import COLOURS, DOTS, MARKERS, blank_figure, require_matplotlib
from headstart.inference.bench.table import report_console
from headstart.training.checkpoints import find_newest

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = ROOT / "distill" / "data" / "smollm2_answers.jsonl.gz"
PROCESSES = 2
ALONE = "one process"
WAYS = {"two processes": "cpu_2proc", "ZeRO-2": "cpu_2proc_zero2", "ZeRO-3": "cpu_2proc_zero3"}
"""Way of training -> file of configs/accelerate/ without its ending."""


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="the model: a folder or a Hub id")
    add(
        "--data", default=str(ANSWERS), help="answers, as `headstart distill select` writes them; default: shipped ones"
    )
    add("--family", default="medusa", help="a file of configs/ without its ending (default %(default)s)")
    add("--ways", default=",".join(WAYS), help="which to compare with one process (default %(default)s)")
    add("--steps", type=int, default=40, help="optimizer steps (default %(default)s)")
    add("--rows", type=int, default=2, help="rows of a batch; a step has twice as many (default %(default)s)")
    add("--max_length", type=int, default=256, help="default %(default)s")
    add("--draft_vocab_size", type=int, default=4096, help="default %(default)s")
    add("--out", required=True, type=Path, help="folder for the runs, the figures and the plot")
    return parser.parse_args()


def command(options: argparse.Namespace, way: str, folder: Path) -> list[str]:
    """Return the command of a run: the entry script, under the launcher if it has several processes."""
    method = options.family.partition("_")[0]
    script = str(ROOT / "training" / f"train_{method}.py")
    flags: dict[str, Any] = {
        "config": ROOT / "configs" / f"{options.family}.yaml", "target": options.target, "train_data": options.data,
        "target_dtype": "float32", "bf16": False, "feature_cache_gb": 0, "max_length": options.max_length,
        "draft_vocab_size": options.draft_vocab_size, "max_steps": options.steps, "save_strategy": "steps",
        "save_steps": max(options.steps // 2, 1), "eval_strategy": "no", "eval_prompts": 0, "held_out_fraction": 0.01,
        "logging_steps": 1, "plot": False, "disable_tqdm": True, "report_to": "none", "use_cpu": True,
        "per_device_train_batch_size": options.rows, "output_dir": folder,
        "gradient_accumulation_steps": PROCESSES if way == ALONE else 1,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    if way == ALONE:
        return [sys.executable, script, *words]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    return [*launcher, "--config_file", str(ROOT / "configs" / "accelerate" / f"{WAYS[way]}.yaml"), script, *words]


def train(options: argparse.Namespace, way: str) -> dict[str, Any]:
    """Make a run, killed half-way if it has several processes; return its losses, and after which step it went on."""
    folder = options.out / way.lower().replace(" ", "_")
    known, words, went_on_after = folder.with_suffix(".json"), command(options, way, folder), None
    if known.exists():
        run = json.loads(known.read_text(encoding="utf-8"))
        if run["command"] != words:
            raise ValueError(f"{known} is of a run with other settings; take another --out, or remove the folder")
        return run
    # One thread for each process, the single one too: another number would add up in another order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with folder.with_suffix(".log").open("w", encoding="utf-8") as log:
        told: dict[str, Any] = {"stdout": log, "stderr": log, "env": environment}
        if way != ALONE:
            went_on_after = kill_halfway(words, folder, told)
        done = subprocess.run(words, **told, check=False)
        if done.returncode:
            raise ValueError(f"{way}: the run failed with status {done.returncode}; see {log.name}")
    history = json.loads((folder / "history.json").read_text(encoding="utf-8"))
    run = {
        "command": words,
        "losses": [line["loss"] for line in history["training"]],
        "went_on_after": went_on_after,
        "weights": str(folder / "model.safetensors"),
    }
    known.write_text(json.dumps(run, indent=1), encoding="utf-8")
    return run


def kill_halfway(words: list[str], folder: Path, told: dict[str, Any]) -> int:
    """Start a run and kill the launcher and all that it started once a checkpoint is there; return its step."""
    life = subprocess.Popen(words, **told, start_new_session=True)
    try:
        while life.poll() is None and find_newest(folder).newest is None:
            time.sleep(0.05)
        if life.returncode is not None:
            raise ValueError(f"the run ended with status {life.returncode} before it could be killed; see its log")
    finally:
        if life.returncode is None:
            os.killpg(life.pid, signal.SIGKILL)
            life.wait()
    newest = find_newest(folder).newest
    assert newest is not None
    return int(newest.name.partition("-")[2])


def compare(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each way how far losses and weights are from those of one process."""
    alone = load_file(runs[ALONE]["weights"])
    largest = max(float(value.abs().max()) for value in alone.values() if value.is_floating_point())
    figures = []
    for way, run in runs.items():
        weights = load_file(run["weights"])
        if weights.keys() != alone.keys():
            raise ValueError(f"{way} saved other tensors than one process: {sorted(weights.keys() ^ alone.keys())}")
        losses = list(zip(run["losses"], runs[ALONE]["losses"], strict=True))
        figures.append(
            {
                "way": way,
                "went_on_after": run["went_on_after"],
                "first_loss": run["losses"][0],
                "last_loss": run["losses"][-1],
                "losses_differ": max(abs(one - other) / other for one, other in losses),
                "weights_differ": max(float((weights[name] - value).abs().max()) for name, value in alone.items()),
                "largest_weight": largest,
            }
        )
    return figures


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the losses by step, and how far each way is from one process; where there is no point they are equal."""
    figure = blank_figure(9, 3.4)
    left, right = figure.subplots(1, 2)
    alone = runs[ALONE]["losses"]
    for (way, run), colour, width, marker in zip(runs.items(), COLOURS, (6, 4, 2.5, 1), MARKERS, strict=False):
        steps = range(1, len(alone) + 1)
        left.plot(steps, run["losses"], label=way, color=colour, linewidth=width)
        if way != ALONE:
            away = [abs(one - other) / other or None for one, other in zip(run["losses"], alone, strict=True)]
            right.plot(steps, away, label=way, color=colour, linestyle="none", marker=marker, markersize=4)
            for axes in (left, right):
                axes.axvline(run["went_on_after"] + 0.5, color="0.7", linestyle=":")
    left.set(xlabel="step", ylabel="loss", title="loss of a step; dotted: killed, then gone on")
    furthest = max(
        abs(one / other - 1) for run in runs.values() for one, other in zip(run["losses"], alone, strict=True)
    )
    right.set(ylim=(1e-8, max(1e-5, 2 * furthest)))  # a logarithmic axis without a point needs limits
    right.set(xlabel="step", yscale="log", xlim=left.get_xlim(), title="relative difference (no point: equal)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=DOTS)


def table_of(figures: list[dict[str, Any]], steps: int) -> Table:
    """Return the figures as a table."""
    table = Table(title=f"{steps} steps; largest differences from one process", title_justify="left")
    for name in (
        "",
        "killed, went on after",
        "first loss",
        "last loss",
        "losses differ",
        "weights differ",
        "of at most",
    ):
        table.add_column(name, justify="right" if name else "left")
    for one in figures:
        killed = "" if one["went_on_after"] is None else f"step {one['went_on_after']}"
        losses = [f"{one['first_loss']:.4f}", f"{one['last_loss']:.4f}", f"{one['losses_differ']:.1e}"]
        table.add_row(one["way"], killed, *losses, f"{one['weights_differ']:.1e}", f"{one['largest_weight']:.2f}")
    return table


def main() -> int:
    """Make the runs, print the table and draw the plot."""
    options = parse_arguments()
    require_matplotlib()
    ways = [ALONE, *options.ways.split(",")]
    if unknown := [way for way in ways[1:] if way not in WAYS]:
        raise ValueError(f"--ways must be some of {', '.join(WAYS)}, but has {', '.join(unknown)}")
    options.out.mkdir(parents=True, exist_ok=True)
    runs = {}
    for way in ways:
        print(f"{way} ...", file=sys.stderr, flush=True)
        runs[way] = train(options, way)
    figures = compare(runs)
    (options.out / "figures.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(runs, options.out / "losses.png")
    report_console(stderr=False).print(table_of(figures, options.steps))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"several_processes.py: {error}")
