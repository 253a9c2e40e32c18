"""`headstart bench`: every drafter and the model alone, on the same prompts, in one run."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from ...core import hf
from ...drafters.base import Drafter
from ...drafters.registry import AutoDrafter
from ..attach import attach
from ..loading import check_name, eos_ids, load_target, warn_of_other_text
from ..options import Parser, add_adapter, add_measured, add_target, check_writable, whole, wholes, working, write_json
from ..target import Target
from ..tune.store import nearest, tunings_of
from .bench import BenchSettings, run_bench
from .methods import Decoding, padding_id
from .prompts import check_prompts, load_prompts
from .sweep import parse_sweep, run_sweep
from .table import print_report, report_console

DESCRIPTION = """Compare drafters with the model alone (transformers' own generate): speed, tokens per step, acceptance
by depth, and whether the text is the same. All take turns on every prompt, so that a busy machine hits all alike."""

EXAMPLES = [
    "headstart bench --target my-model --drafters my-drafter,another --dtype bfloat16 --plots plots",
    "headstart bench --target my-model --drafters my-drafter --temperature 0.8 --json bench.json",
    "headstart bench --target my-model --drafters my-drafter --costs --batch_size 4",
    "headstart bench --target my-model --drafters my-drafter --sweep draft_length=1..8 --plots plots",
]


def main(name: str, argv: Sequence[str]) -> int:
    """Measure, print the tables, write JSON and plots; with `--json` alone, standard output carries nothing else."""
    options = _parse(name, argv)
    settings, sweep = _settings(options), None if options.sweep is None else parse_sweep(options.sweep)
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with working(f"loading {options.target}", options.target):
        model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
    with working("loading drafters"):
        kind = (options.batch_size, options.temperature)
        drafters = load_drafters(model, options.drafters, options.apply_adapter, options.trees, *kind)
    ends = tuple(eos_ids(model))
    decoding = replace(settings.decoding, eos_token_ids=ends, pad_token_id=padding_id(model, ends))
    settings = replace(settings, decoding=decoding)
    for drafter in drafters.values():
        warn_of_other_text(drafter, tokenizer)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    with working("reading prompts"):
        prompts = load_prompts(options.prompts, tokenizer, options.num_prompts, room)
    if sweep is None:
        report = run_bench(model, drafters, prompts, settings)
    else:
        report = run_sweep(model, drafters, prompts, settings, sweep)
    print_report(report, report_console(stderr=options.json == "-"))
    _write(report, options)
    return 0


def _parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(f"headstart {name}", DESCRIPTION, EXAMPLES)
    add_target(parser)
    group = parser.add_argument_group("methods, beside the model alone")
    group.add_argument("--drafters", default="", metavar="A,B",
                       help="drafter checkpoints (folders, Hub ids), separated by commas")  # fmt: skip
    add_adapter(group)
    group.add_argument("--prompt_lookup", action="store_true", help="transformers' prompt lookup of 3 tokens")
    group.add_argument("--no_drafter", action="store_true", help="this engine without a drafter")
    group.add_argument("--max_nodes", type=whole(1), metavar="N",
                       help="most nodes of a draft tree, its root included; default: the drafter's own")  # fmt: skip
    group.add_argument("--trees", choices=("tuned", "own", "both"), default="tuned",
                       help="those that `headstart tune` kept for this machine, the drafters' own, or both "
                       "for drafters that were tuned (default %(default)s)")  # fmt: skip
    group.add_argument("--sweep", metavar="NAME=VALUES",
                       help="the same drafters with chains (draft_length=1..8) or trees of several sizes (nodes=4,8,16 "
                       "or nodes=2..32:2), with the speed that the measured costs predict")  # fmt: skip
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", metavar="FILE.jsonl",
                       help="rows with `messages` or `turns` (the first); default: shipped ones")  # fmt: skip
    group.add_argument("--num_prompts", type=whole(1), default=40, metavar="N",
                       help="taken from each category in turn (default %(default)s)")  # fmt: skip
    group = parser.add_argument_group("measuring")
    group.add_argument("--batch_size", type=whole(1), default=1, metavar="N",
                       help="prompts at a time (default %(default)s)")  # fmt: skip
    group.add_argument("--repeats", type=whole(1), default=1, metavar="N",
                       help="how often every prompt is measured (default %(default)s)")  # fmt: skip
    group.add_argument("--warm_up", type=whole(0), default=1, metavar="N",
                       help="short runs before the clock counts (default %(default)s)")  # fmt: skip
    group.add_argument("--threads", type=whole(1), metavar="N", help="CPU threads; default: PyTorch's choice")
    group.add_argument("--costs", action="store_true",
                       help="also what a forward pass costs, the speed that predicts, and, on a GPU, the true time of "
                       "each phase")  # fmt: skip
    group.add_argument("--cost_contexts", type=wholes(1), default=(128, 512), metavar="N,N",
                       help="tokens before the passes of --costs and --sweep (default 128,512)")  # fmt: skip
    group = add_measured(parser)
    group.add_argument("--plots", type=Path, metavar="FOLDER", help="write plots as PNG there (needs the demo extra)")
    return parser.read(argv)


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError for what can be told before anything is loaded, and not after a long run."""
    if options.plots is not None:
        from .plots import require_matplotlib

        require_matplotlib()
        check_writable(options.plots, folder=True)
    if options.json is not None:
        check_writable(options.json)
    if options.sweep is not None and not places_in(options.drafters):
        raise ValueError("a sweep needs a drafter to draw trees with, but none was named; name one with --drafters")
    check_name(options.target)
    for place in places_in(options.drafters):
        AutoDrafter.check(place)
    check_prompts(options.prompts)


def places_in(names: str) -> list[str]:
    """Return the names of a list that commas separate."""
    return [place for part in names.split(",") if (place := part.strip())]


def load_drafters(
    model: PreTrainedModel,
    names: str,
    apply_adapter: bool = False,
    trees: str = "tuned",
    batch_size: int = 1,
    temperature: float = 0.0,
) -> dict[str, Drafter]:
    """Load the drafters named in a comma-separated list; each is reported by the last part of its name.

    trees: "tuned" takes the tree that was kept for this machine and the most similar calls; "own" none; "both" adds
    to a drafter that was tuned its twin with its own tree.
    """
    drafters: dict[str, Drafter] = {}
    for place in places_in(names):
        short = Path(place).name or place
        while short in drafters:
            short = f"{short}'"
        drafter = attach(model, place, tuned=False, apply_adapter=apply_adapter).drafter
        kept = tunings_of(place, Target(model)) if trees != "own" and Path(place).is_dir() else []
        tuning = nearest(kept, batch_size, temperature)
        if tuning is not None and trees == "both":
            drafters[f"{short} (own tree)"] = copy.deepcopy(drafter)
        if tuning is not None:
            drafter.set_topology(tuning.topology)
        drafters[short] = drafter
    return drafters


def _settings(options: argparse.Namespace) -> BenchSettings:
    """Return the settings; the ids that end and pad a text are the target's, which is not there yet."""
    decoding = Decoding(
        options.max_new_tokens, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
    )
    return BenchSettings(
        decoding,
        options.batch_size,
        options.repeats,
        options.warm_up,
        options.seed,
        options.prompt_lookup,
        options.no_drafter,
        options.max_nodes,
        options.cost_contexts if options.costs or options.sweep is not None else (),
    )


def _write(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write plots, then JSON: where the JSON is, everything is."""
    if options.plots is not None:
        from .plots import write_plots

        for path in write_plots(report, options.plots):
            Console(stderr=True).print(f"wrote {path}", style="dim", highlight=False)
    if options.json is not None:
        write_json(report, options.json)
