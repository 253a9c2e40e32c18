"""Train drafters on more and more of the same answers, and plot what the data is worth.

    python scripts/scaling.py --target .cache/smollm2-135m-instruct --features outputs/families/features \
        --families hydra_pp,eagle --data answers.jsonl.gz --out outputs/scaling

For each size the first rows with so many answer tokens are taken, so that a smaller set lies within every larger one;
the rows held out are the same for all. Small sets are read more often: epochs grow with the square root of what they
lack, as a user would do it. Tokens per step are those of greedy text for held-out prompts with the best static tree of
`--tree_nodes`. Flags that are not known here go to `headstart train`. Runs that are finished are not made again, and an
interrupted one goes on: run it again with more sizes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from headstart.distill.dataset import TokenRow, load_dataset, split_held_out
from headstart.inference.bench.table import report_console
from headstart.inference.loading import load_tokenizer
from headstart.training.several import method_of

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Subset:
    """The first rows of the data with at least `tokens` answer tokens, in a file."""

    tokens: int
    rows: int
    file: Path


def parse_arguments() -> argparse.Namespace:
    """Read the command line; flags for `headstart train` are in `rest`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="the model: a folder or a Hub id")
    add("--data", required=True, nargs="+", help="answers, as `headstart distill select` writes them")
    add("--features", help="a store of `headstart distill capture` over the data; default: made in each run")
    add("--families", default="hydra_pp,eagle", help="names of files in configs/ (default %(default)s)")
    add("--sizes", type=int, nargs="+", default=[10_000, 30_000, 100_000, 300_000], help="answer tokens")
    add("--epochs", type=int, default=4, help="of the largest size (default %(default)s)")
    add("--draft_vocab_size", type=int, default=8192, help="default %(default)s")
    add("--tree_nodes", type=int, default=12, help="default %(default)s")
    add("--eval_prompts", type=int, default=40, help="default %(default)s")
    add("--out", required=True, type=Path, help="folder for the drafters, the figures and the plot")
    options, rest = parser.parse_known_args()
    return argparse.Namespace(**vars(options), rest=rest)


def write_subsets(options: argparse.Namespace) -> tuple[list[Subset], Path]:
    """Write the rows of every size, and those held out, as files that `headstart train` reads."""
    tokenizer = load_tokenizer(options.target)
    rows = load_dataset(options.data, tokenizer, 768, "all").rows
    train, held_out = split_held_out(rows, 0.04)
    # Files are ordered by where they come from: by the hash of their ids, every prefix is a fair sample.
    train = sorted(train, key=lambda row: (row.id[::-1], len(row.input_ids)))
    options.out.mkdir(parents=True, exist_ok=True)
    subsets = []
    for size in sorted(options.sizes):
        tokens, count = 0, 0
        while tokens < size and count < len(train):
            tokens += int(train[count].loss_mask.sum())
            count += 1
        if tokens < size:
            raise ValueError(f"sizes must not exceed the data's {tokens:,} answer tokens, but one is {size:,}")
        subsets.append(Subset(tokens, count, write_rows(options.out / f"train-{size}.jsonl", train[:count])))
    return subsets, write_rows(options.out / "held_out.jsonl", held_out)


def write_rows(path: Path, rows: Sequence[TokenRow]) -> Path:
    """Write rows as prompt and answer ids."""
    lines = [
        {"id": row.id, "category": row.category, "prompt_ids": row.input_ids[: row.prompt_length].tolist(),
         "answer_ids": row.input_ids[row.prompt_length :].tolist()}
        for row in rows
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def train(options: argparse.Namespace, family: str, subset: Subset, largest: Subset, held_out: Path) -> dict[str, Any]:
    """Train one drafter on one subset; return its figures."""
    epochs = round(options.epochs * (largest.tokens / subset.tokens) ** 0.5)
    folder = options.out / f"{family}-{subset.file.stem.removeprefix('train-')}"
    flags = {
        "config": ROOT / "configs" / f"{family}.yaml",
        "target": options.target,
        "train_data": subset.file,
        "eval_data": held_out,
        "eval_strategy": "no",
        "eval_prompts": options.eval_prompts,
        "draft_vocab_size": options.draft_vocab_size,
        "tree_nodes": options.tree_nodes,
        "num_train_epochs": epochs,
        "output_dir": folder,
        **({"features": options.features} if options.features else {}),
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))] + options.rest
    subprocess.run([sys.executable, "-m", "headstart.cli", "train", method_of(f"{family}.yaml"), *words], check=True)
    measured = json.loads((folder / "run.json").read_text(encoding="utf-8"))["measured"]
    return {"family": family, "tokens": subset.tokens, "rows": subset.rows, "epochs": epochs, **measured}


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot tokens per step over answer tokens, a line for each family."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for family in dict.fromkeys(run["family"] for run in runs):
        mine = [run for run in runs if run["family"] == family]
        axes.plot([run["tokens"] for run in mine], [run["generation"]["tokens_per_step"] for run in mine], "o-",
                  label=family)  # fmt: skip
    axes.set_xscale("log")
    sizes = sorted({run["tokens"] for run in runs})
    axes.set_xticks(sizes, [f"{size / 1000:,.0f}k" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("answer tokens trained on")
    axes.set_ylabel("tokens per step, held-out prompts")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Train what is missing, print the table, write figures and plot."""
    options = parse_arguments()
    subsets, held_out = write_subsets(options)
    runs = [
        train(options, family, subset, subsets[-1], held_out)
        for family in options.families.split(",")
        for subset in subsets
    ]
    (options.out / "scaling.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    draw(runs, options.out / "scaling.png")
    table = Table(title="tokens per step by answer tokens trained on", title_justify="left")
    for name in ("family", "answer tokens", "rows", "epochs", "tokens per step", "acceptance by depth"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for run in runs:
        acceptance = " ".join(f"{rate:.2f}".lstrip("0") for rate in run["generation"]["acceptance_by_depth"])
        table.add_row(run["family"], f"{run['tokens']:,}", str(run["rows"]), str(run["epochs"]),
                      f"{run['generation']['tokens_per_step']:.2f}", acceptance)  # fmt: skip
    report_console(stderr=False).print(table)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"scaling.py: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"scaling.py: {' '.join(map(str, error.cmd))} ended with status {error.returncode}")
