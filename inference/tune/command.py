"""`headstart tune`: find the fastest tree for a target, a drafter and this machine, prove it and keep it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...core import hf
from ..attach import attach
from ..bench.command import whole_numbers, write_json
from ..bench.methods import Decoding, padding_id
from ..bench.prompts import PromptSet, load_prompts
from ..bench.table import report_console
from ..loading import DTYPES, eos_ids, load_target, warn_of_other_text
from ..target import Target
from .report import print_tuning
from .run import TuneSettings, run_tune
from .store import Tuning, save_tuning

DESCRIPTION = """Measure what a forward pass, drafting and the engine cost on this machine, and what this drafter gets
right; choose the tree that is fastest for it, measure it beside the drafter's own, and keep it in the drafter's folder,
where `attach`, `generate` and `bench` find it. The text does not depend on the tree."""

EXAMPLE = """example:
  headstart tune --target my-model --drafter my-drafter --dtype bfloat16"""


def main(name: str, argv: Sequence[str]) -> int:
    """Run `headstart tune`."""
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
    add("--drafter", required=True, help="a drafter's folder; the tree is kept there")
    add("--prompts", metavar="FILE.jsonl", help="rows with `messages` or `turns` (the first); default: shipped ones")
    add("--num_prompts", type=int, default=24, help="to count acceptance on, balanced (default %(default)s)")
    add("--proof_prompts", type=int, default=12, help="others, to measure speed on (default %(default)s)")
    add("--max_new_tokens", type=int, default=128, help="longest answer (default %(default)s)")
    add("--batch_sizes", default="1", help="a tree for each, separated by commas (default %(default)s)")
    add("--contexts", default="128,512", help="tokens before the measured passes (default %(default)s)")
    add("--rounds", type=int, default=15, help="repetitions of every cost (default %(default)s)")
    add("--dtype", default="auto", choices=DTYPES, help="of target and drafter; default: the checkpoint's own")
    add("--device", help="default: the first GPU, if there is one")
    add("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    add("--top_p", type=float, default=1.0, help="when sampling (default %(default)s)")
    add("--top_k", type=int, default=0, help="when sampling; 0 looks at every token (default %(default)s)")
    add("--seed", type=int, default=0, help="of sampled text and of the intervals (default %(default)s)")
    add("--json", nargs="?", const="-", metavar="OUT", help="write the report as JSON to a file, or to standard output")
    add("--dry_run", action="store_true", help="measure and report, but keep nothing")


def run(options: argparse.Namespace) -> int:
    """Measure, print, keep; with `--json` alone, standard output carries nothing else."""
    batch_sizes = whole_numbers("batch_sizes", options.batch_sizes)
    contexts = whole_numbers("contexts", options.contexts)
    if options.num_prompts < 1 or options.proof_prompts < 1:
        raise ValueError(
            "num_prompts and proof_prompts must be at least 1, but are "
            f"{options.num_prompts} and {options.proof_prompts}"
        )
    if not options.dry_run:
        _check_folder(options.drafter)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
    ends = tuple(eos_ids(model))
    decoding = Decoding(
        options.max_new_tokens, ends, padding_id(model, ends), options.temperature, options.top_k, options.top_p
    )
    settings = TuneSettings(decoding, batch_sizes, contexts, options.rounds, options.seed)
    drafter = attach(model, options.drafter, tuned=False).drafter
    warn_of_other_text(drafter, tokenizer)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    loaded = load_prompts(options.prompts, tokenizer, options.num_prompts + options.proof_prompts, room)
    report = run_tune(model, drafter, *divided(loaded, options.num_prompts), settings)
    console = report_console(stderr=options.json == "-")
    print_tuning(report, console)
    report["kept"] = [] if options.dry_run else keep(report, options.drafter, Target(model), settings)
    for path in dict.fromkeys(report["kept"]):
        console.print(f"kept in {path}", highlight=False)
    if options.json is not None:
        write_json(report, options.json)
    return 0


def divided(prompts: PromptSet, count: int) -> tuple[PromptSet, PromptSet]:
    """Return the first `count` prompts to tune on and the others as proof; where there are no others, the same."""
    first, others = prompts.prompts[:count], prompts.prompts[count:]
    return replace(prompts, prompts=first), replace(prompts, prompts=others or first)


def keep(report: dict[str, Any], folder: str, target: Target, settings: TuneSettings) -> list[str]:
    """Store the chosen tree of each batch size; return the files, one an entry."""
    kept = []
    for batch in report["batches"]:
        chosen = batch["chosen"]
        expected = {key: chosen[key] for key in ("nodes", "depth", "tokens_per_step", "expected_speedup")}
        measured = next(iter(batch["proof"].values()))  # the chosen tree's: it stands first
        tuning = Tuning(batch["batch_size"], settings.decoding.temperature, chosen["topology"], expected, measured)
        kept.append(str(save_tuning(folder, target, tuning)))
    return kept


def _check_folder(drafter: str) -> None:
    """Raise ValueError, before the long run, where the result could not be kept."""
    if not Path(drafter).is_dir():
        raise ValueError(
            f"drafter must be a folder to keep the tree in, but {drafter!r} is none; download it, or add --dry_run"
        )
    if not os.access(drafter, os.W_OK):
        raise ValueError(f"the tree is kept in the drafter's folder, but {drafter} cannot be written; add --dry_run")
