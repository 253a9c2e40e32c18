"""`headstart bench`: every drafter and the model alone, on the same prompts, in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ...core import hf
from ...drafters.base import Drafter
from ..attach import attach
from ..loading import DTYPES, eos_ids, load_target, warn_of_other_text
from .bench import BenchSettings, run_bench
from .methods import Decoding, padding_id
from .prompts import load_prompts
from .sweep import parse_sweep, run_sweep
from .table import print_report, report_console

DESCRIPTION = """Compare drafters with the model alone (transformers' own generate): speed, tokens per step, acceptance
by depth, and whether the text is the same. All take turns on every prompt, so that a busy machine hits all alike."""

EXAMPLE = """example:
  headstart bench --target my-model --drafters my-drafter,another --num_prompts 40 --dtype bfloat16 --plots plots"""


def main(name: str, argv: Sequence[str]) -> int:
    """Run `headstart bench`."""
    parser = argparse.ArgumentParser(
        prog=f"headstart {name}",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(argv))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--target", required=True, help="the model: a folder or a Hub id")
    add("--target_revision", help="branch, tag or commit on the Hub")
    add("--drafters", default="", metavar="A,B", help="drafter checkpoints (folders, Hub ids), separated by commas")
    add("--prompts", metavar="FILE.jsonl", help="rows with `messages` or `turns` (the first); default: shipped ones")
    add("--num_prompts", type=int, default=40, help="taken from each category in turn (default %(default)s)")
    add("--max_new_tokens", type=int, default=128, help="longest answer (default %(default)s)")
    add("--dtype", default="auto", choices=DTYPES, help="of target and drafters; default: the checkpoint's own")
    add("--device", help="default: the first GPU, if there is one")
    add("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    add("--batch_size", type=int, default=1, help="prompts at a time (default %(default)s)")
    add("--repeats", type=int, default=1, help="how often every prompt is measured (default %(default)s)")
    add("--warm_up", type=int, default=1, help="short runs before the clock counts (default %(default)s)")
    add("--seed", type=int, default=0, help="of sampled text and of the intervals (default %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    add("--top_p", type=float, default=1.0, help="when sampling (default %(default)s)")
    add("--top_k", type=int, default=0, help="when sampling; 0 looks at every token (default %(default)s)")
    add("--max_nodes", type=int, help="bound on nodes of a draft tree, its root included; default: the drafter's own")
    add("--prompt_lookup", action="store_true", help="also measure transformers' prompt lookup of 3 tokens")
    add("--no_drafter", action="store_true", help="also measure this engine without a drafter")
    add("--costs", action="store_true", help="also measure what a forward pass costs, the speed that predicts, and, "
        "on a GPU, the true time of each phase")  # fmt: skip
    add("--cost_contexts", default="128,512", help="tokens before the measured passes (default %(default)s)")
    add("--sweep", metavar="NAME=VALUES", help="the same drafters with chains (draft_length=1..8) or trees of several "
        "sizes (nodes=2..32:2, nodes=4,8,16), with the speed that the measured costs predict")  # fmt: skip
    add("--plots", type=Path, metavar="FOLDER", help="write plots as PNG there (needs the demo extra)")
    add("--json", nargs="?", const="-", metavar="OUT", help="write the report as JSON to a file, or to standard output")


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, write JSON and plots; with `--json` alone, standard output carries nothing else."""
    if options.plots is not None:
        from .plots import require_matplotlib

        require_matplotlib()  # before the long run, not after it
    sweep = None if options.sweep is None else parse_sweep(options.sweep)
    if options.num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, but is {options.num_prompts}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
    ends = tuple(eos_ids(model))
    settings = _settings(options, Decoding(
        options.max_new_tokens, ends, padding_id(model, ends), options.temperature, options.top_k, options.top_p
    ))  # fmt: skip
    drafters = load_drafters(model, options.drafters)
    for drafter in drafters.values():
        warn_of_other_text(drafter, tokenizer)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    prompts = load_prompts(options.prompts, tokenizer, options.num_prompts, room)
    if sweep is None:
        report = run_bench(model, drafters, prompts, settings)
    else:
        report = run_sweep(model, drafters, prompts, settings, sweep)
    print_report(report, report_console(stderr=options.json == "-"))
    _write(report, options)
    return 0


def load_drafters(model: PreTrainedModel, names: str) -> dict[str, Drafter]:
    """Load the drafters named in a comma-separated list; each is reported by the last part of its name."""
    drafters: dict[str, Drafter] = {}
    for place in filter(None, (part.strip() for part in names.split(","))):
        short = Path(place).name or place
        while short in drafters:
            short = f"{short}'"
        drafters[short] = attach(model, place).drafter
    return drafters


def whole_numbers(name: str, text: str) -> tuple[int, ...]:
    """Read an option like "128,512". Raises ValueError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be whole numbers separated by commas, but is {text!r}") from None


def _settings(options: argparse.Namespace, decoding: Decoding) -> BenchSettings:
    contexts: tuple[int, ...] = ()
    if options.costs or options.sweep is not None:
        contexts = whole_numbers("cost_contexts", options.cost_contexts)
    return BenchSettings(
        decoding,
        options.batch_size,
        options.repeats,
        options.warm_up,
        options.seed,
        options.prompt_lookup,
        options.no_drafter,
        options.max_nodes,
        contexts,
    )


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write plots, then JSON: where the JSON is, everything is."""
    if options.plots is not None:
        from .plots import write_plots

        for path in write_plots(report, options.plots):
            Console(stderr=True).print(f"wrote {path}", style="dim", highlight=False)
    if options.json is not None:
        write_json(report, options.json)


def write_json(report: dict[str, Any], place: str) -> None:
    """Write a report to a file, whole or not at all; "-" is standard output."""
    text = json.dumps(report, ensure_ascii=False, indent=1)
    if place == "-":
        print(text)
        return
    out = Path(place)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(out)
