"""Measure how fast `headstart distill` makes answers, against transformers' `generate` in batches sorted by length.

    python scripts/distill_speed.py --target .cache/smollm2-135m-instruct --out outputs/distill_speed

Both answer the same shipped prompts at the same temperatures, in turns, so that the noise of the machine hits both
alike: whenever a share of our answers is finished, `generate` runs its next batch. Looping answers are not ended early,
so that both do the same work. Counted are tokens of answers up to and including the end-of-sequence token; rendering
prompts is not timed. A killed run goes on where it was: what its open rows had said is made again, on our clock.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from headstart.core.prompts import normalise_row, prompt_part, read_jsonl, render_prompt
from headstart.distill.dataset import shipped_prompts
from headstart.distill.respond import make_settings, respond
from headstart.distill.select import read_answers
from headstart.inference.bench.machine import machine_facts
from headstart.inference.bench.table import report_console
from headstart.inference.clock import synchronise
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.loading import DTYPES, eos_ids, load_target
from headstart.inference.state import DecodingRules, EngineState
from headstart.inference.target import Target

OURS, THEIRS = "headstart distill", "transformers generate"
NOTE_SECONDS = 2.0
"""Our clock is noted this often: what a kill makes us forget of it."""


@dataclass
class Work:
    """What one side did. slot_steps: rows of all passes, one for each row's prompt; held: those of unfinished rows."""

    seconds: float = 0.0
    slot_steps: int = 0
    held: int = 0
    tokens: int = 0
    answers: int = 0


@dataclass
class Prompts:
    """rows as `respond` takes them; ids and temperature of each."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]
    temperatures: list[float]

    def batches(self, size: int) -> list[list[int]]:
        """Return places of prompts in batches of one temperature, sorted by length, the longest first."""
        found = []
        for temperature in sorted(set(self.temperatures)):
            same = [place for place, its in enumerate(self.temperatures) if its == temperature]
            same.sort(key=lambda place: len(self.ids[place]), reverse=True)
            found += [same[at : at + size] for at in range(0, len(same), size)]
        return found


class Journal:
    """A file of what was done, one JSON object a line; the first holds the settings, which must stay the same."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        lines = [row for _, row in read_jsonl(path)] if path.exists() else []
        if lines and lines[0] != settings:
            raise ValueError(f"{path} must come from the same settings, but has {lines[0]}; use another --out")
        self.work = {OURS: Work(), THEIRS: Work()}
        self.batches = 0
        for line in lines[1:]:
            self._add(line["side"], Work(**line["work"]))
        if not lines:
            self._write(settings)

    def note(self, side: str, work: Work) -> None:
        """Add a piece of work."""
        self._add(side, work)
        self._write({"side": side, "work": asdict(work)})

    def _add(self, side: str, work: Work) -> None:
        self.batches += side == THEIRS
        total = self.work[side]
        for name, value in asdict(work).items():
            setattr(total, name, getattr(total, name) + value)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@dataclass
class Turns:
    """Whose turn it is: `generate` runs a batch whenever our share of finished answers has caught up with its own.

    finished: our answers. clock: when our running piece of work began, None while our clock stands.
    """

    model: PreTrainedModel
    prompts: Prompts
    config: dict[str, Any]
    journal: Journal
    batch_size: int
    bar: tqdm
    finished: int = 0
    clock: float | None = None
    piece: Work = field(default_factory=Work)

    def before_pass(self, finished: int) -> None:
        """Let the other side work if it is its turn, then let our clock run. finished: our answers so far."""
        self.bar.update(finished - self.finished)
        self.finished = finished
        if self.clock is not None and self._now() - self.clock > NOTE_SECONDS:
            self.pause()
        batches = self.prompts.batches(self.batch_size)
        while self.journal.batches < len(batches) and (
            self.journal.batches / len(batches) <= finished / len(self.prompts.rows)
        ):
            self.pause()
            self.generate(batches[self.journal.batches])
        if self.clock is None:
            self.clock = self._now()

    def pause(self) -> None:
        """Stop our clock and note what was done since it started."""
        if self.clock is not None:
            self.piece.seconds = self._now() - self.clock
            self.journal.note(OURS, self.piece)
            self.piece, self.clock = Work(), None

    def generate(self, batch: Sequence[int]) -> None:
        """Answer one batch with transformers."""
        pad, temperature = self.config["pad_token_id"], self.prompts.temperatures[batch[0]]
        rows = [self.prompts.ids[place] for place in batch]
        longest = max(map(len, rows))
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(**self.config, **(sampled if temperature > 0 else {"do_sample": False}))
        generate: Any = self.model.generate
        start = self._now()
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=self.model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=self.model.device)
        out = generate(ids, attention_mask=mask, generation_config=config)
        answers = [upto_end(row, self.config["eos_token_id"]) for row in out[:, longest:].tolist()]
        seconds, tokens = self._now() - start, sum(map(len, answers))
        self.journal.note(THEIRS, Work(seconds, out[:, longest:].numel(), tokens, tokens, len(batch)))
        self.bar.update(len(batch))

    def _now(self) -> float:
        synchronise(self.model.device)
        return time.perf_counter()


class WatchedEngine(SpeculativeEngine):
    """Counts rows of its passes and hands over to the other side between them."""

    def __init__(self, target: Target, turns: Turns, found: int) -> None:
        super().__init__(target)
        self.turns, self.before, self.here = turns, found, 0

    def prefill(self, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> EngineState:
        """Count the prompts' own passes."""
        self.turns.before_pass(self.before + self.here)
        self.turns.piece.slot_steps += len(prompts)
        self.turns.piece.held += len(prompts)
        return super().prefill(prompts, rules)

    def step(self, state: EngineState) -> None:
        """Count rows, and those that go on."""
        self.turns.before_pass(self.before + self.here)
        self.turns.piece.slot_steps += len(state.order)
        self.turns.piece.held += len(state.unfinished)
        unfinished = len(state.unfinished)
        super().step(state)
        self.here += unfinished - len(state.unfinished)


def upto_end(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """Cut behind the first end-of-sequence token."""
    return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in eos), len(tokens))]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--out", required=True, type=Path, help="folder for our answers and the journal")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default %(default)s")
    parser.add_argument("--num_prompts", type=int, default=300, help="default %(default)s")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="default %(default)s")
    parser.add_argument("--batch_size", type=int, default=32, help="default %(default)s")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="default 0 0.8")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser.parse_args()


def report(work: dict[str, Work], title: str) -> Table:
    """Return both sides and their ratio as a table."""
    table = Table(title=title, title_justify="left")
    for name in ("", "tokens/s", "tokens", "mean answer", "rows that go on", "ms a row and pass"):
        table.add_column(name, justify="left" if not name else "right")
    for side, done in work.items():
        table.add_row(
            side,
            f"{done.tokens / done.seconds:.1f}",
            f"{done.tokens:,}",
            f"{done.tokens / done.answers:.0f}",
            f"{done.held / done.slot_steps:.1%}",
            f"{done.seconds / done.slot_steps * 1000:.2f}",
        )
    ours, theirs = work[OURS], work[THEIRS]
    table.add_section()
    shares = (ours.held / ours.slot_steps) / (theirs.held / theirs.slot_steps)
    costs = (theirs.seconds / theirs.slot_steps) / (ours.seconds / ours.slot_steps)
    speed = (ours.tokens / ours.seconds) / (theirs.tokens / theirs.seconds)
    table.add_row("ratio, ours over theirs", f"{speed:.2f}", "", "", f"× {shares:.2f}", f"× {costs:.2f}")
    return table


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_target(options.target, options.dtype)
    rows = shipped_prompts("train")
    rows = rows[:: max(1, len(rows) // options.num_prompts)][: options.num_prompts]
    ids = [render_prompt(tokenizer, prompt_part(normalise_row(row, row["id"]))) for row in rows]
    temperatures = [options.temperatures[place % len(options.temperatures)] for place in range(len(rows))]
    prompts = Prompts(rows, ids, temperatures)
    dtype = str(model.dtype).removeprefix("torch.")
    settings = make_settings(
        options.target, dtype, tokenizer, options.max_new_tokens, options.temperatures, stop_loops=False
    )
    options.out.mkdir(parents=True, exist_ok=True)
    told = {**settings.header(), "num_prompts": len(rows), "batch_size": options.batch_size}
    journal, folder = Journal(options.out / "journal.jsonl", told), options.out / "answers"
    eos = eos_ids(model)
    config = {"max_new_tokens": options.max_new_tokens, "eos_token_id": eos, "pad_token_id": eos[0]}
    torch.manual_seed(0)
    found = len(answers_in(folder))
    bar = tqdm(total=2 * len(rows), initial=found + journal.work[THEIRS].answers, desc="answers", unit="row")
    turns = Turns(model, prompts, config, journal, options.batch_size, bar, found)
    engine = WatchedEngine(Target(model), turns, found)
    try:
        respond(engine, tokenizer, rows, folder, settings, eos, options.batch_size, max(map(len, ids)), progress=False)
    finally:
        turns.pause()
    turns.before_pass(len(rows))
    bar.close()
    answers = answers_in(folder)
    ours = journal.work[OURS]
    ours.tokens, ours.answers = sum(len(row["answer_ids"]) for row in answers), len(answers)
    machine = machine_facts(engine.target)
    if options.json:
        print(json.dumps({**told, "machine": machine, "work": {side: asdict(w) for side, w in journal.work.items()}}))
        return 0
    title = (
        f"{len(rows)} prompts, at most {options.max_new_tokens} new tokens, {options.batch_size} rows at a time; "
        f"{machine['dtype']}, {machine['accelerator'] or machine['cpu']}, {machine['threads']} threads"
    )
    report_console(stderr=False).print(report(journal.work, title))
    return 0


def answers_in(folder: Path) -> list[dict[str, Any]]:
    """Return our answers; none where there is no folder yet."""
    return list(read_answers([folder])[1]) if any(folder.glob("answers-*.jsonl")) else []


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"distill_speed.py: {error}")
