"""Compare how a drafter may guess sampled text: top-k, shared noise, draws with the classic rule, typical acceptance.

    python scripts/proposals.py --target .cache/smollm2-135m-instruct --drafter outputs/medusa --num_prompts 40

The same trees and prompts (the shipped held-out ones, balanced over categories) for every way; tokens per step with a
95% interval over prompts, acceptance by depth, and milliseconds a step, in one interleaved run. The text follows the
target token for token with the same seed ("text"), or its law ("law"), or neither ("lossy").
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.table import Table
from tqdm import tqdm

from headstart.core import hf
from headstart.inference.attach import attach
from headstart.inference.bench.machine import machine_facts
from headstart.inference.bench.measure import row_seeds
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.prompts import prompts_from_rows, shipped_held_out
from headstart.inference.bench.table import report_console
from headstart.inference.engine import ACCEPTANCE, SpeculativeEngine
from headstart.inference.loading import DTYPES, eos_ids, load_target
from headstart.inference.stats import GenerationStats

WAYS = (
    ("lossless", "top_k"),
    ("lossless", "shared_noise"),
    ("lossless", "sampled"),
    ("speculative_sampling", "sampled"),
    ("speculative_sampling", "sampled_iid"),
    ("typical", "top_k"),
)
FOLLOWS = {"lossless": "text", "speculative_sampling": "law", "typical": "lossy"}


@dataclass
class Way:
    """One way to guess and accept: its engine, and what it did by prompt."""

    acceptance: str
    proposal: str
    engine: SpeculativeEngine
    calls: list[GenerationStats] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return its figures, ready for JSON."""
        merged = GenerationStats(lossless=ACCEPTANCE[self.acceptance].lossless)
        for call in self.calls:
            merged.merge(call)
        return {
            "acceptance": self.acceptance,
            "proposal": self.proposal,
            "follows": FOLLOWS[self.acceptance],
            "tokens_per_step": merged.tokens_per_step,
            "interval": self._interval(),
            "acceptance_by_depth": merged.acceptance_by_depth,
            "milliseconds_per_step": sum(merged.seconds.values()) / merged.target_passes * 1000,
            "tokens": merged.tokens,
        }

    def _interval(self) -> list[float]:
        counts = np.array([[call.tokens, call.row_steps] for call in self.calls], dtype=float)
        drawn = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
        sums = counts[drawn].sum(1)
        return [float(value) for value in np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--drafter", required=True, help="a drafter checkpoint, or a method's name for a fresh one")
    parser.add_argument("--temperature", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--top_p", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default %(default)s")
    parser.add_argument("--num_prompts", type=int, default=40, help="default %(default)s")
    parser.add_argument("--max_new_tokens", type=int, default=96, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--chain", type=int, help="use a chain of so many draft tokens in place of the drafter's tree")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args()


def table_of(figures: list[dict[str, Any]], title: str) -> Table:
    """Return the comparison as a table."""
    table = Table(title=title, title_justify="left")
    for name in ("acceptance", "proposal", "follows", "tokens/step", "95%", "by depth", "ms/step"):
        table.add_column(name, justify="left" if name in ("acceptance", "proposal", "follows") else "right")
    for way in figures:
        low, high = way["interval"]
        rates = " ".join(f"{rate:.2f}".removeprefix("0") for rate in way["acceptance_by_depth"])
        table.add_row(
            way["acceptance"], way["proposal"], way["follows"], f"{way['tokens_per_step']:.2f}",
            f"{low:.2f}-{high:.2f}", rates, f"{way['milliseconds_per_step']:.1f}",
        )  # fmt: skip
    return table


def main() -> int:
    """Run every way on every prompt and print the table."""
    options = parse_arguments()
    model, tokenizer = load_target(options.target, options.dtype)
    fast = attach(model, options.drafter)
    if options.chain:
        fast.drafter.set_topology([[0] * (depth + 1) for depth in range(options.chain)])
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    chosen = prompts_from_rows(shipped_held_out(), "the shipped held-out prompts", tokenizer, options.num_prompts, room)
    decoding = Decoding(
        options.max_new_tokens, tuple(eos_ids(model)), temperature=options.temperature, top_p=options.top_p
    )
    target = fast.engine.target
    ways = [Way(a, p, SpeculativeEngine(target, fast.drafter, acceptance=a, proposal=p)) for a, p in WAYS]
    for number, prompt in enumerate(tqdm(chosen.prompts, desc="prompts", unit="prompt")):
        seeds = row_seeds(options.seed, 0, number, 1)
        turn = number % len(ways)
        for way in ways[turn:] + ways[:turn]:
            way.calls.append(way.engine.generate([prompt.ids], decoding.rules(seeds)).stats)
    figures = [way.to_dict() for way in ways]
    machine = machine_facts(target)
    if options.json:
        print(json.dumps({"ways": figures, "machine": machine, "prompts": chosen.to_dict()}, ensure_ascii=False))
        return 0
    where = f"{machine['dtype']}, {machine['accelerator'] or machine['cpu']}, {machine['threads']} threads"
    title = f"T = {options.temperature}, top_p = {options.top_p}, {len(chosen.prompts)} prompts; {where}"
    report_console(stderr=False).print(table_of(figures, title))
    return 0


if __name__ == "__main__":
    try:
        torch.set_grad_enabled(False)
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"proposals.py: {error}")
