"""`headstart distill`: make answers, choose among them, look at them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from ..core import hf
from ..inference.attach import attach
from ..inference.engine import SpeculativeEngine
from ..inference.loading import DTYPES, check_name, eos_ids, load_target
from ..inference.target import Target
from .dataset import load_dataset, read_rows, shipped_prompts
from .inspect import inspect
from .respond import make_settings, read_answers, respond, write_lines
from .select import select

DESCRIPTION = """Make training data in the target's own words.

  headstart distill          answer prompts with the target, into a folder of shards; run again to resume
  headstart distill select   keep finished answers, drop loops, into one file
  headstart distill inspect  print rows with the trained tokens coloured"""

EXAMPLES = """examples:
  headstart distill --target my-model --out answers --num_prompts 1000
  headstart distill select answers --out train.jsonl.gz
  headstart distill inspect train.jsonl.gz --target my-model --limit 2"""


def main(_name: str, argv: list[str]) -> int:
    """Run `distill`, `distill select` or `distill inspect`."""
    actions = {"select": _select, "inspect": _inspect}
    if argv and argv[0] in actions:
        return actions[argv[0]](argv[1:])
    return _respond(argv)


def _parser(action: str, description: str) -> argparse.ArgumentParser:
    prog = f"headstart distill {action}".strip()
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, epilog=EXAMPLES, formatter_class=formatter)


def _respond(argv: list[str]) -> int:
    parser = _parser("", DESCRIPTION)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--target_revision", help="branch, tag or commit on the Hub")
    parser.add_argument(
        "--out", required=True, type=Path, help="folder for the shards; found answers are not made again"
    )
    parser.add_argument(
        "--prompts", help="jsonl or parquet file, folder, or Hub data set; default: the shipped prompts"
    )
    parser.add_argument(
        "--no_share_alike", action="store_true", help="leave out shipped prompts under share-alike terms"
    )
    parser.add_argument("--num_prompts", type=int, help="use only the first so many")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="longest answer (default %(default)s)")
    parser.add_argument("--max_prompt_tokens", type=int, default=1536, help="skip longer prompts (default %(default)s)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8],
                        help="dealt out in turn; 0 is greedy (default: half greedy, half at 0.8)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--batch_size", type=int, default=32, help="rows at a time (default %(default)s)")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--drafter", help="speed it up with a drafter you already have")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args(argv)
    if options.prompts:
        rows = [row for _, row in read_rows(options.prompts)]
    else:
        rows = shipped_prompts("train", share_alike=not options.no_share_alike)
    rows = rows[: options.num_prompts]
    if not rows:
        raise ValueError(f"{options.prompts or 'the shipped prompts'}: prompts must hold at least one row, found none")
    model, tokenizer = load_target(options.target, options.dtype, options.target_revision)
    engine = attach(model, options.drafter).engine if options.drafter else SpeculativeEngine(Target(model))
    dtype = str(model.dtype).removeprefix("torch.")
    limit, longest = hf.position_limit(model), options.max_prompt_tokens
    if limit is not None:
        longest = min(longest, limit - options.max_new_tokens)
        if longest < 1:
            raise ValueError(
                f"max_new_tokens must leave room for a prompt in the target's window of {limit}, but is "
                f"{options.max_new_tokens}; lower it"
            )
    settings = make_settings(
        options.target, dtype, tokenizer, options.max_new_tokens, options.temperatures, options.seed
    )
    counts = respond(engine, tokenizer, rows, options.out, settings, eos_ids(model), options.batch_size, longest)
    _tell(
        counts,
        f"{counts['answered']} answered ({counts['tokens']:,} tokens), {counts['found']} were there already, "
        f"{counts['too_long']} prompts too long; answers are in {options.out}",
        options.json,
    )
    return 0


def _select(argv: list[str]) -> int:
    parser = _parser("select", "Keep every finished answer, drop loops, keep a few that were cut.")
    parser.add_argument("folder", type=Path, nargs="+", help="folders that `headstart distill` wrote")
    parser.add_argument("--out", required=True, type=Path, help="file to write, .jsonl or .jsonl.gz")
    parser.add_argument("--cut_share", type=float, default=0.1, help="cut answers among the rows (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args(argv)
    for folder in options.folder:
        if not folder.is_dir():
            raise ValueError(f"{folder} must be a folder that `headstart distill` wrote, but is none")
    headers = [row for folder in options.folder for _, row in read_rows(folder) if "headstart" in row]
    selection = select((row for folder in options.folder for row in read_answers(folder)), options.cut_share)
    if not selection.rows:
        raise ValueError(f"no answer is left of {selection.found_rows} found; raise --max_new_tokens or --cut_share")
    header = {**headers[0], "selection": selection.report()} if headers else {"headstart": "answers", "version": 1}
    write_lines(options.out, [header, *selection.rows])
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
    parser = _parser("inspect", "Print training rows with the trained tokens coloured.")
    parser.add_argument("data", help="jsonl or parquet file, folder, or Hub data set")
    parser.add_argument("--target", required=True, help="the model whose tokenizer and template to use")
    parser.add_argument("--limit", type=int, default=3, help="rows to print (default %(default)s)")
    parser.add_argument("--max_length", type=int, default=2048, help="cut rows to this length (default %(default)s)")
    parser.add_argument("--train_on", default="all", choices=("all", "last"), help="which turns (default %(default)s)")
    options = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(check_name(options.target))
    data = load_dataset(options.data, tokenizer, options.max_length, options.train_on)
    inspect(data.rows, tokenizer, Console(), options.limit)
    return 0


def _tell(counts: dict[str, Any], sentence: str, as_json: bool) -> None:
    print(json.dumps(counts) if as_json else sentence, file=sys.stdout)
