"""Print what a decoding step spends its time on: target, drafter, and the engine around them, for one checkpoint.

    python scripts/step_split.py --target .cache/smollm2-135m-instruct --drafter outputs/medusa --dtype bfloat16

Greedy, one prompt at a time, on the shipped held-out prompts, balanced over categories. The last line is the share of a
step that is neither the target's forward pass nor the drafter's own matrix products.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from rich.table import Table

from headstart.core import hf
from headstart.inference.attach import attach
from headstart.inference.bench.machine import machine_facts
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.prompts import prompts_from_rows, shipped_held_out
from headstart.inference.bench.split import StepSplit, split_steps
from headstart.inference.bench.table import report_console
from headstart.inference.loading import DTYPES, eos_ids, load_target


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--drafter", required=True, help="a drafter checkpoint, or a method's name for a fresh one")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default %(default)s")
    parser.add_argument("--num_prompts", type=int, default=12, help="default %(default)s")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args()


def table_of(split: StepSplit, title: str) -> Table:
    """Return the split as a table, milliseconds a step and shares."""
    table = Table(title=title, title_justify="left")
    table.add_column("part of a step")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, seconds in split.parts.items():
        table.add_row(name, f"{seconds / split.steps * 1000:.2f}", f"{seconds / split.total:.1%}")
    table.add_section()
    table.add_row("whole step", f"{split.total / split.steps * 1000:.2f}", "100%")
    return table


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.target, options.dtype)
    fast = attach(model, options.drafter)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    chosen = prompts_from_rows(shipped_held_out(), "the shipped held-out prompts", tokenizer, options.num_prompts, room)
    decoding = Decoding(options.max_new_tokens, tuple(eos_ids(model)))
    split = split_steps(fast.engine.target, fast.drafter, [prompt.ids for prompt in chosen.prompts], decoding)
    machine = machine_facts(fast.engine.target)
    if options.json:
        print(json.dumps({**split.to_dict(), "machine": machine, "prompts": chosen.to_dict()}, ensure_ascii=False))
        return 0
    console = report_console(stderr=False)
    title = (
        f"{split.steps} steps of {split.nodes_per_step:.1f} nodes, {split.tokens_per_step:.2f} tokens each; "
        f"{machine['dtype']}, {machine['accelerator'] or machine['cpu']}, {machine['threads']} threads"
    )
    console.print(table_of(split, title))
    console.print(
        f"neither the target's forward nor the drafter's own matrix products: {split.overhead:.1%} of a step",
        highlight=False,
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"step_split.py: {error}")
