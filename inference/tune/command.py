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
from ...drafters.registry import AutoDrafter
from ..attach import attach
from ..bench.methods import Decoding, padding_id
from ..bench.prompts import PromptSet, check_prompts, load_prompts
from ..bench.table import report_console
from ..loading import check_name, eos_ids, load_target, warn_of_other_text
from ..options import Parser, add_adapter, add_measured, add_target, check_writable, whole, wholes, working, write_json
from ..target import Target
from .report import print_tuning
from .run import TuneSettings, run_tune
from .store import Tuning, save_tuning

DESCRIPTION = """Measure what a forward pass, drafting and the engine cost on this machine, and what this drafter gets
right; choose the tree that is fastest for it, measure it beside the drafter's own, and keep it in the drafter's folder,
where `attach`, `generate` and `bench` find it. The text does not depend on the tree."""

EXAMPLES = [
    "headstart tune --target my-model --drafter my-drafter --dtype bfloat16",
    "headstart tune --target my-model --drafter my-drafter --batch_sizes 1,8 --temperature 0.8",
    "headstart tune --target my-model --drafter my-drafter --dry_run --json tuning.json",
]


def main(name: str, argv: Sequence[str]) -> int:
    """Measure, print, keep; with `--json` alone, standard output carries nothing else."""
    options = _parse(name, argv)
    settings = _settings(options)
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with working(f"loading {options.target}", options.target):
        model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
    with working(f"loading {options.drafter}", options.drafter):
        drafter = attach(model, options.drafter, tuned=False, apply_adapter=options.apply_adapter).drafter
    ends = tuple(eos_ids(model))
    decoding = replace(settings.decoding, eos_token_ids=ends, pad_token_id=padding_id(model, ends))
    settings = replace(settings, decoding=decoding)
    warn_of_other_text(drafter, tokenizer)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    with working("reading prompts"):
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


def _parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(f"headstart {name}", DESCRIPTION, EXAMPLES)
    add_target(parser)
    group = parser.add_argument_group("drafter")
    group.add_argument("--drafter", required=True, metavar="FOLDER", help="a drafter's folder; the tree is kept there")
    add_adapter(group)
    group.add_argument("--dry_run", action="store_true", help="measure and report, but keep nothing")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="FILE.jsonl",
                       help="rows with `messages` or `turns` (the first); default: shipped ones")  # fmt: skip
    group.add_argument("--num_prompts", type=whole(1), default=24, metavar="N",
                       help="to count acceptance on, balanced (default %(default)s)")  # fmt: skip
    group.add_argument("--proof_prompts", type=whole(1), default=12, metavar="N",
                       help="others, to measure speed on (default %(default)s)")  # fmt: skip
    group = parser.add_argument_group("measuring")
    group.add_argument("--batch_sizes", type=wholes(1), default=(1,), metavar="N,N", help="a tree for each (default 1)")
    group.add_argument("--contexts", type=wholes(1), default=(128, 512), metavar="N,N",
                       help="tokens before the measured passes (default 128,512)")  # fmt: skip
    group.add_argument("--rounds", type=whole(1), default=15, metavar="N",
                       help="repetitions of every cost (default %(default)s)")  # fmt: skip
    group.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads; default: PyTorch's choice")
    add_measured(parser)
    return parser.read(argv)


def _settings(options: argparse.Namespace) -> TuneSettings:
    """Return the settings; the ids that end and pad a text are the target's, which is not there yet."""
    decoding = Decoding(
        options.max_new_tokens, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    return TuneSettings(decoding, options.batch_sizes, options.contexts, options.rounds, options.seed)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for what can be told before anything is loaded, and not after a long run."""
    if options.json is not None:
        check_writable(options.json)
    check_name(options.target)
    if not options.dry_run:
        _check_folder(options.drafter)
    AutoDrafter.check(options.drafter)
    check_prompts(options.prompts)


def divided(prompts: PromptSet, count: int) -> tuple[PromptSet, PromptSet]:
    """Return the first `count` prompts to tune on and the others as proof; where there are no others, the same."""
    first, others = prompts.prompts[:count], prompts.prompts[count:]
    return replace(prompts, prompts=first), replace(prompts, prompts=others or first)


def keep(report: dict[str, Any], folder: str, target: Target, settings: TuneSettings) -> list[str]:
    """Store the chosen tree of each batch size; return the files, one an entry.

    A static tree takes the place of beams or of a dynamic tree only where it was measured to be no slower.
    """
    kept = []
    for batch in report["batches"]:
        if batch["own_is_faster"]:
            continue
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
