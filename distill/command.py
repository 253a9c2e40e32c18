"""`headstart distill`: make answers, choose among them, look at them, store the target's features of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Console

from ..core import hf
from ..core.prompts import normalise_row, prompt_part, row_tools
from ..drafters.registry import AutoDrafter
from ..inference.adapters import fingerprint
from ..inference.attach import attach
from ..inference.engine import SpeculativeEngine
from ..inference.loading import check_name, eos_ids, load_target, load_tokenizer, warn_of_other_text
from ..inference.options import Parser, add_adapter, add_target, real, whole, working
from ..inference.target import Target
from .capture import SHARD_BYTES, bytes_per_token, capture, data_fingerprints, read_layers
from .dataset import load_dataset, read_rows, shipped_prompts
from .inspect import counts_of, inspect
from .remote import FAILED, NO_ROUND_TRIP, OTHER_PROMPT, REFUSED, ending_ids, respond_remotely
from .respond import make_settings, respond, write_lines
from .select import read_answers, select
from .server import KEY_VARIABLE, Server
from .store import make_manifest, target_identity

DESCRIPTION = """Make training data in the target's own words.

  headstart distill          answer prompts with the target, here or on a server, into a folder of shards; run again
                             to resume
  headstart distill select   keep finished answers, drop loops, into one file
  headstart distill inspect  print rows with the trained tokens coloured
  headstart distill capture  store the target's features of rows, for any number of drafters; run again to resume"""

EXAMPLES = [
    "headstart distill --target my-model --out answers --num_prompts 1000",
    "headstart distill --target my-model --out answers --server http://127.0.0.1:8000/v1 --prompts prompts.jsonl",
    "headstart distill select answers --out train.jsonl.gz",
    "headstart distill inspect train.jsonl.gz --target my-model --limit 2",
    "headstart distill capture --target my-model --data train.jsonl.gz --out features --layers final,1,14,26",
]

DROPPED = {
    REFUSED: "refused by the server",
    FAILED: "failed there again and again",
    OTHER_PROMPT: "read there as another number of tokens",
    NO_ROUND_TRIP: "answered with text that its tokens do not give back",
}
"""What the counts of prompts without an answer are called."""


def main(_name: str, argv: list[str]) -> int:
    """Run `distill` or one of its actions."""
    actions = {"select": _select, "inspect": _inspect, "capture": _capture}
    if not argv or argv[0].startswith("-"):
        return _respond(argv)
    if argv[0] in actions:
        return actions[argv[0]](argv[1:])
    near = get_close_matches(argv[0], actions, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(actions)}, or options alone"
    print(f"headstart distill: there is no action {argv[0]!r}; {hint}", file=sys.stderr)
    return 2


def _respond(argv: list[str]) -> int:
    options = _respond_options(argv)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder, but {options.out} is a file; name another place")
    check_name(options.target)
    if options.drafter:
        AutoDrafter.check(options.drafter)
    with working("reading prompts"):
        rows = _prompts(options)
    counts = _ask(options, rows) if options.server else _generate(options, rows)
    others = {key: count for key, count in counts.items() if key in DROPPED}
    told = "".join(f", {count} {DROPPED[key]}" for key, count in others.items())
    _tell(
        counts,
        f"{counts['answered']} answered ({counts['tokens']:,} tokens), {counts['found']} were there already, "
        f"{counts['too_long']} prompts too long{told}; answers are in {options.out}",
        options.json,
    )
    return 0


def _generate(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Load the target and have it answer."""
    with working(f"loading {options.target}", options.target):
        model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
        fast = attach(model, options.drafter, apply_adapter=options.apply_adapter) if options.drafter else None
    if fast is not None:
        warn_of_other_text(fast.drafter, tokenizer)
    engine = fast.engine if fast is not None else SpeculativeEngine(Target(model))
    dtype = str(model.dtype).removeprefix("torch.")
    limit, longest = hf.position_limit(model), options.max_prompt_tokens
    if limit is not None:
        longest = min(longest, limit - options.max_new_tokens)
        if longest < 1:
            raise ValueError(
                f"max_new_tokens must leave room for a prompt in the target's window of {limit}, but is "
                f"{options.max_new_tokens}; lower it"
            )
    adapter = fingerprint(model).adapter if options.apply_adapter else None
    sampling = options.max_new_tokens, options.temperatures, options.seed
    settings = make_settings(options.target, dtype, tokenizer, *sampling, adapter=adapter)
    return respond(engine, tokenizer, rows, options.out, settings, eos_ids(model), options.batch_size or 32, longest)


def _ask(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, int]:
    """Have a server answer; of the target only the tokenizer is loaded."""
    name = check_name(options.target)
    with working("asking the server"):
        tokenizer = load_tokenizer(name, options.target_revision)
        server = Server(options.server, options.server_model, options.target, tokenizer)
    with server:
        settings = make_settings(
            options.target,
            "as served",
            tokenizer,
            options.max_new_tokens,
            options.temperatures,
            options.seed,
            server=server.description(),
        )
        eos = ending_ids(name, options.target_revision, tokenizer)
        in_flight = options.requests_in_flight or 64
        return respond_remotely(server, rows, options.out, settings, eos, in_flight, options.max_prompt_tokens)


def _respond_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser("headstart distill", DESCRIPTION, EXAMPLES)
    add_target(parser)
    group = parser.add_argument_group("drafter")
    group.add_argument("--drafter", metavar="NAME", help="speed it up with a drafter you already have")
    add_adapter(group)
    group.add_argument("--batch_size", type=whole(1), metavar="N", help="rows at a time (default 32)")
    group = parser.add_argument_group(
        "server", f"instead of loading the target; a key is taken from the variable {KEY_VARIABLE}"
    )
    group.add_argument("--server", metavar="URL", help="OpenAI-compatible, as http://127.0.0.1:8000/v1")
    group.add_argument("--server_model", metavar="NAME", help="what it calls the model (default: the only one)")
    group.add_argument("--requests_in_flight", type=whole(1), metavar="N", help="requests at a time (default 64)")
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts", metavar="DATA", help="jsonl or parquet file, folder, or Hub data set; default: the shipped ones"
    )
    group.add_argument(
        "--no_share_alike", action="store_true", help="leave out shipped prompts under share-alike terms"
    )
    group.add_argument("--num_prompts", type=whole(1), metavar="N", help="use only the first so many")
    group.add_argument("--max_prompt_tokens", type=whole(1), default=1536, metavar="N",
                       help="skip longer prompts (default %(default)s)")  # fmt: skip
    group = parser.add_argument_group("answers")
    group.add_argument("--max_new_tokens", type=whole(1), default=512, metavar="N",
                       help="longest answer (default %(default)s)")  # fmt: skip
    group.add_argument("--temperatures", type=real(), nargs="+", default=[0.0, 0.8], metavar="T",
                       help="dealt out in turn; 0 is greedy (default: half greedy, half at 0.8)")  # fmt: skip
    group.add_argument("--seed", type=whole(0), default=0, help="default %(default)s")
    group = parser.add_argument_group("output")
    group.add_argument(
        "--out", required=True, type=Path, metavar="FOLDER", help="for the shards; found answers are not made again"
    )
    group.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.read(argv)
    local = {"--drafter": options.drafter, "--batch_size": options.batch_size, "--device": options.device}
    local["--apply_adapter"] = options.apply_adapter or None
    local["--dtype"] = None if options.dtype == "auto" else options.dtype
    remote = {"--server_model": options.server_model, "--requests_in_flight": options.requests_in_flight}
    idle = [name for name, value in (local if options.server else remote).items() if value is not None]
    if idle:
        parser.error(f"{idle[0]} has no effect {'with' if options.server else 'without'} --server; leave it out")
    if options.apply_adapter and options.drafter is None:
        parser.error("--apply_adapter puts on the adapter of a drafter, but there is no --drafter; name it")
    return options


def _prompts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows to answer; a malformed one is named by file and line before anything is loaded."""
    if not options.prompts:
        return shipped_prompts("train", share_alike=not options.no_share_alike)[: options.num_prompts]
    rows: list[dict[str, Any]] = []
    for place, row in read_rows(options.prompts):
        if "headstart" in row:  # the header of a shard of answers, whose prompts may be answered again
            continue
        prompt_part(normalise_row(row, place), place)
        row_tools(row, place)
        rows.append(row)
        if len(rows) == options.num_prompts:
            break
    if not rows:
        raise ValueError(f"{options.prompts}: prompts must hold at least one row, but there is none")
    return rows


def _select(argv: list[str]) -> int:
    parser = Parser(
        "headstart distill select", "Keep every finished answer, drop loops, keep a few that were cut.", EXAMPLES[2:3]
    )
    parser.add_argument("folder", type=Path, nargs="+", help="folders that `headstart distill` wrote")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="to write: .jsonl or .jsonl.gz")
    parser.add_argument("--cut_share", type=real(0, 0.99), default=0.1, metavar="S",
                        help="share of answers that were cut among the rows kept (default %(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.read(argv)
    if not options.out.name.endswith((".jsonl", ".jsonl.gz")) or options.out.is_dir():
        raise ValueError(f"--out must be a file ending in .jsonl or .jsonl.gz, but is {options.out}")
    with working("reading answers"):
        header, answers = read_answers(options.folder)
        selection = select(answers, options.cut_share)
    if not selection.rows:
        raise ValueError(f"no answer is left of {selection.found_rows} found; raise --max_new_tokens or --cut_share")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_lines(options.out, [{**header, "selection": selection.report()}, *selection.rows])
    report = selection.report()
    dropped = ", ".join(f"{n} as {why}" for why, n in report["dropped"].items()) or "none"
    _tell(
        report,
        f"kept {report['kept_rows']:,} of {report['found_rows']:,} answers ({report['kept_tokens']:,} of "
        f"{report['found_tokens']:,} tokens), {report['kept_cut']} of them cut; dropped {dropped}; wrote {options.out}",
        options.json,
    )
    return 0


def _inspect(argv: list[str]) -> int:
    parser = Parser(
        "headstart distill inspect",
        "Print training rows with the trained tokens coloured; without colours they stand between ⟦ and ⟧.",
        EXAMPLES[3:4],
    )
    parser.add_argument("data", help="jsonl or parquet file, folder, or Hub data set")
    parser.add_argument("--target", required=True, metavar="NAME", help="the model whose tokenizer and template to use")
    parser.add_argument("--limit", type=whole(0), default=3, metavar="N", help="rows to print (default %(default)s)")
    parser.add_argument("--max_length", type=whole(1), default=2048, metavar="N",
                        help="cut rows to this length (default %(default)s)")  # fmt: skip
    parser.add_argument("--train_on", default="all", choices=("all", "last"), help="which turns (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the counts and the first rows as JSON")
    options = parser.read(argv)
    with working("reading rows"):
        tokenizer = load_tokenizer(check_name(options.target))
        data = load_dataset(options.data, tokenizer, options.max_length, options.train_on)
    if options.json:
        print(json.dumps(counts_of(data, options.limit)))
    else:
        inspect(data.rows, tokenizer, Console(), options.limit)
    return 0


def _capture(argv: list[str]) -> int:
    options = _capture_options(argv)
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder, but {options.out} is a file; name another place")
    layers = read_layers(options.layers)
    with working("reading rows"):
        tokenizer = load_tokenizer(check_name(options.target), options.target_revision)
        data = load_dataset(options.data, tokenizer, options.max_length, options.train_on)
    with working(f"loading {options.target}", options.target):
        target = Target(load_target(options.target, options.dtype, options.target_revision, options.device)[0])
    limit = hf.position_limit(target.model)
    if limit is not None and limit < options.max_length:  # as training does
        data = load_dataset(options.data, tokenizer, limit, options.train_on)
    manifest = make_manifest(
        target_identity(target, tokenizer, options.target, options.target_revision),
        layers,
        data.rows,
        SHARD_BYTES // bytes_per_token(target, layers),
        max_length=min(options.max_length, limit or options.max_length),
        train_on=options.train_on,
        data=data_fingerprints(options.data),
    )
    start = time.perf_counter()
    tokens = capture(target, data.rows, options.out, manifest, progress=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in options.out.iterdir())
    counts = {name: manifest[name] for name in ("rows", "tokens", "layers")}
    _tell(
        {**counts, "tokens_read": tokens, "seconds": seconds, "bytes": size, "out": str(options.out)},
        f"{tokens:,} tokens read in {seconds:.1f} seconds; the features are in {options.out} ({size / 1e9:.3f} GB)",
        options.json,
    )
    return 0


def _capture_options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        "headstart distill capture",
        "Store the target's features of training rows, for `features: FOLDER` of any number of drafters.",
        EXAMPLES[4:],
    )
    add_target(parser)
    parser.add_argument("--data", required=True, nargs="+", metavar="DATA",
                        help="what to train on: jsonl or parquet files, folders, or Hub data sets")  # fmt: skip
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="for the store; whole shards stay")
    parser.add_argument("--layers", default="final", metavar="LAYERS",
                        help="block numbers from 0 up, separated by commas; `final`, which losses need, is always in "
                        "(default %(default)s)")  # fmt: skip
    parser.add_argument("--max_length", type=whole(2), default=2048, metavar="N",
                        help="cut rows to this length, as in training (default %(default)s)")  # fmt: skip
    parser.add_argument("--train_on", default="all", choices=("all", "last"), help="which turns (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    return parser.read(argv)


def _tell(counts: dict[str, Any], sentence: str, as_json: bool) -> None:
    print(json.dumps(counts) if as_json else sentence, file=sys.stdout)
