"""Measure what training several drafters with one pass of the target costs, against the sum of its parts.

    python scripts/shared_pass.py --rows 96

The parts: the target reads every row once, alone; each drafter is trained on features that are in memory already. The
whole: `headstart train --drafters` from nothing. All in one process, in turns, so that a busy machine hits all alike;
the ratio of the whole to the sum of the parts is the median over rounds. Runs are one epoch, without evaluation.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table

from headstart.distill.dataset import load_dataset
from headstart.distill.store import row_key
from headstart.inference.bench.machine import machine_facts
from headstart.inference.bench.table import report_console
from headstart.training.features import KeptRows
from headstart.training.run import Loaded, load, run
from headstart.training.several import Planned, layers_of, read_plans, train_several

ROOT = Path(__file__).resolve().parent.parent
ANSWERS = ROOT / "distill" / "data" / "smollm2_answers.jsonl.gz"
CAPACITY_BYTES = 4 * 10**9


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafters", default="configs/medusa.yaml,configs/hydra_pp.yaml,configs/eagle.yaml",
                        help="as `headstart train --drafters` takes them (default %(default)s)")  # fmt: skip
    parser.add_argument("--rows", type=int, default=96, help="answers to train on (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a piece of work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_all(kept: KeptRows, loaded: Loaded, plans: Sequence[Planned], data: Path) -> None:
    """Have the target read every row, alone, as training does."""
    rows = load_dataset([str(data)], loaded.tokenizer, plans[0].settings.data.max_length, "all").rows
    for row in rows:
        kept.states([torch.from_numpy(row.input_ids).long()], [row_key(row)])


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    with TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        with gzip.open(ANSWERS, "rt", encoding="utf-8") as answers:
            data.write_text("".join(islice(answers, options.rows + 1)), encoding="utf-8")
        flags = ["--train_data", str(data), "--num_train_epochs", "1", "--held_out_fraction", "0",
                 "--eval_strategy", "no", "--save_strategy", "no", "--disable_tqdm", "true"]  # fmt: skip
        report = measure(options, flags, Path(folder), data)
    if options.json:
        print(json.dumps(report))
        return 0
    table = Table(title=f"{options.rows} rows, one epoch; {report['machine']['cpu']}", title_justify="left")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for name, seconds in report["seconds"].items():
        table.add_row(name, f"{seconds:.1f}")
    table.add_section()
    table.add_row("together over the sum of the others", f"{report['ratio']:.3f}")
    report_console(stderr=False).print(table)
    return 0


def measure(options: argparse.Namespace, flags: list[str], folder: Path, data: Path) -> dict[str, Any]:
    """Run parts and whole in turns; return medians."""
    count = 0

    def plans_of(drafters: str) -> list[str]:
        nonlocal count
        count += 1
        return ["--drafters", drafters, *flags, "--output_dir", str(folder / f"run{count}")]

    plans = read_plans(plans_of(options.drafters))
    loaded = load(plans[0].settings)
    layers = layers_of(plans, loaded.target)
    seconds: dict[str, list[float]] = {"target": []}
    for _ in range(options.rounds):
        kept = KeptRows(loaded.target, layers, CAPACITY_BYTES)
        seconds["target"].append(timed(lambda kept=kept: read_all(kept, loaded, plans, data)))
        for file in options.drafters.split(","):
            words = plans_of(file)
            filled = replace(loaded, kept=kept)
            seconds.setdefault(Path(file).stem, []).append(timed(lambda w=words, f=filled: train_with(w, f)))
        words = plans_of(options.drafters)
        seconds.setdefault("together", []).append(timed(lambda w=words: train_several(w, loaded)))
    ratios = [
        whole / sum(seconds[name][i] for name in seconds if name != "together")
        for i, whole in enumerate(seconds["together"])
    ]
    return {
        "machine": machine_facts(loaded.target),
        "rows": options.rows,
        "seconds": {name: median(values) for name, values in seconds.items()},
        "ratio": median(ratios),
        "ratios": ratios,
    }


def train_with(words: Sequence[str], loaded: Loaded) -> None:
    """Train on features that are there."""
    for plan in read_plans(words):
        run(plan.method, plan.argv, loaded)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"shared_pass.py: {error}")
