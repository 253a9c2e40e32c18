"""Hold a drafter to its promise: the same text, token for token.

    python scripts/equality.py --target my-model --drafter my-drafter --prompts prompts.jsonl --out equality.jsonl

In float32 (or float64), with the drafter attached; about an hour for 420 prompts on two cores:

1. every prompt, greedy, in batches of 4, checked by replay: one pass of the target over prompt and answer, in which
   each token must be the argmax;
2. 60 prompts, ten from each group of categories, greedy, against transformers' own `generate`, at batch size 1 and 4;
3. the same 60, sampled (T = 0.8 with top-p 0.9; T = 1), against the plain loop with the same seeds, at batch 1 and 4.

A difference is forgiven, and shown, only as a tie: the two best logits (when sampling: scores with their noise) lie
within 5e-4 (5e-4 / T) of each other, or a token stands at the nucleus' edge. Comparison then ends there. Results are
added to a file after every few prompts, and a second run goes on from it; exit code 1 if a text differs otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from tqdm import tqdm

from headstart.core import hf
from headstart.core.sampling import Sampling
from headstart.inference.attach import attach
from headstart.inference.bench.bench import sampling_of
from headstart.inference.bench.compare import TIE_GAP, Divergence, decision_scores, look_at_divergence
from headstart.inference.bench.measure import row_seeds
from headstart.inference.bench.methods import Autoregressive, Call, Decoding, Engine, padding_id
from headstart.inference.bench.prompts import BenchPrompt, in_turn, prompts_from_file
from headstart.inference.bench.table import report_console
from headstart.inference.loading import eos_ids, load_target
from headstart.inference.plain import plain_generate
from headstart.inference.target import Target

MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
CHUNK = 20  # prompts between two writes
SAMPLED = {"T=0.8, top_p=0.9": (0.8, 0.9), "T=1": (1.0, 1.0)}

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is examined: the target with its drafter, and how texts end."""

    target: Target
    engine: Engine
    greedy: Decoding

    def sampled(self, name: str) -> Decoding:
        """Return how the named kind of sampled text is drawn."""
        temperature, top_p = SAMPLED[name]
        return replace(self.greedy, temperature=temperature, top_p=top_p)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the examinations: its name, its prompts, and what to do with a chunk of them.

    check: gets the prompts of a chunk and the number of the first; returns one row a prompt.
    """

    name: str
    prompts: Sequence[BenchPrompt]
    check: Callable[[Sequence[BenchPrompt], int], Rows]


class Journal:
    """The results file: a header, then one line a chunk, each written whole; a line torn by a crash is cut off."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open or make the file. Raises ValueError when it was made with other settings."""
        self.path, self.done = path, dict[tuple[str, int], Rows]()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = b""
        if path.exists():
            whole = b"".join(line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
            path.write_bytes(whole)
        first, *chunks = [json.loads(line) for line in whole.splitlines()] or [header]
        if first != header:
            changed = ", ".join(key for key in header if first.get(key) != header[key])
            raise ValueError(f"{path} must come from the same run, but differs in {changed}; use another --out")
        if not whole:
            self._append(header)
        for chunk in chunks:
            self.done[chunk["part"], chunk["chunk"]] = chunk["rows"]

    def add(self, part: str, chunk: int, rows: Rows) -> None:
        """Add one chunk."""
        self._append({"part": part, "chunk": chunk, "rows": rows})
        self.done[part, chunk] = rows

    def rows(self, part: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of a part."""
        for (name, _), rows in self.done.items():
            if name == part:
                yield from rows

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--drafter", required=True, help="a drafter checkpoint, or a method's name for a fresh one")
    parser.add_argument("--prompts", required=True, type=Path, help="a .jsonl file with `turns` or `messages`")
    parser.add_argument("--out", required=True, type=Path, help="results, one line a chunk; run again to resume")
    parser.add_argument("--num_prompts", type=int, help="examine only so many of each part; default: all, and 60")
    parser.add_argument("--max_new_tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"), help="default %(default)s")
    return parser.parse_args()


def main() -> int:
    """Examine what is not yet in the results file, then print all of it."""
    options = parse_arguments()
    model, tokenizer = load_target(options.target, options.dtype)
    fast = attach(model, options.drafter)
    target, ends = fast.engine.target, tuple(eos_ids(model))
    greedy = Decoding(options.max_new_tokens, ends, padding_id(model, ends))
    subject = Subject(target, Engine(target, fast.drafter, "drafter"), greedy)
    limit = hf.position_limit(model)
    room = None if limit is None else limit - options.max_new_tokens
    found = prompts_from_file(options.prompts, tokenizer, sys.maxsize, room)
    by_group = in_turn(found.prompts, lambda p: "mt_bench" if p.category in MT_BENCH else p.category)
    every, some = found.prompts[: options.num_prompts], by_group[: min(options.num_prompts or 60, 60)]
    header = {
        "headstart_equality": 1,
        "target": options.target,
        "drafter": options.drafter,
        "weights": fingerprint(fast.drafter),
        "prompts": found.sha256,
        "skipped_too_long": found.skipped,
        "num_prompts": [len(every), len(some)],
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "versions": [torch.__version__, transformers.__version__],
    }
    journal = Journal(options.out, header)
    plan = parts(subject, every, some, journal)
    with tqdm(total=sum(len(part.prompts) for part in plan), unit="prompt", dynamic_ncols=True) as bar:
        for part in plan:
            bar.set_description(part.name)
            for number in range(0, len(part.prompts), CHUNK):
                chunk = part.prompts[number : number + CHUNK]
                if (part.name, number) not in journal.done:
                    journal.add(part.name, number, part.check(chunk, number))
                bar.update(len(chunk))
    return summary(plan, journal)


def fingerprint(module: torch.nn.Module) -> str:
    """Return a hash of all weights, so that results of one drafter are not taken for another's."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def parts(subject: Subject, every: Sequence[BenchPrompt], some: Sequence[BenchPrompt], journal: Journal) -> list[Part]:
    """Return the examinations in order."""
    plan = [Part("greedy, replay, batch 4", every, lambda prompts, first: replay(subject, prompts, first))]

    def against_generate(size: int) -> Callable[[Sequence[BenchPrompt], int], Rows]:
        reference = Autoregressive(subject.target)

        def check(prompts: Sequence[BenchPrompt], first: int) -> Rows:
            theirs = [text for call in run(reference, subject.greedy, prompts, first, size) for text in call.outputs]
            return compare(subject, subject.greedy, prompts, first, size, theirs)

        return check

    def against_plain(name: str, size: int) -> Callable[[Sequence[BenchPrompt], int], Rows]:
        def check(prompts: Sequence[BenchPrompt], first: int) -> Rows:
            theirs = [row["tokens"] for row in journal.done[f"sampled, {name}: plain loop", first]]
            return compare(subject, subject.sampled(name), prompts, first, size, theirs)

        return check

    def plain(name: str) -> Callable[[Sequence[BenchPrompt], int], Rows]:
        return lambda prompts, first: plain_texts(subject, subject.sampled(name), prompts, first)

    plan += [Part(f"greedy, generate, batch {size}", some, against_generate(size)) for size in (1, 4)]
    for name in SAMPLED:
        plan.append(Part(f"sampled, {name}: plain loop", some, plain(name)))
        plan += [Part(f"sampled, {name}, batch {size}", some, against_plain(name, size)) for size in (1, 4)]
    return plan


def run(
    method: Autoregressive | Engine, decoding: Decoding, prompts: Sequence[BenchPrompt], first: int, size: int
) -> Iterator[Call]:
    """Generate for the prompts in batches; the seed of a prompt is its number's."""
    for begin in range(0, len(prompts), size):
        batch = [prompt.ids for prompt in prompts[begin : begin + size]]
        yield method.run(batch, decoding, row_seeds(0, 0, first + begin, len(batch)))


def replay(subject: Subject, prompts: Sequence[BenchPrompt], first: int, size: int = 4) -> Rows:
    """Generate greedily; each token must be the argmax of one pass over prompt and answer."""
    rows: Rows = []
    for call in run(subject.engine, subject.greedy, prompts, first, size):
        for text in call.outputs:
            prompt = prompts[len(rows)]
            found = [divergence.to_dict() for divergence in not_the_argmax(subject, prompt, text)]
            rows.append({"id": prompt.id, "new_tokens": len(text), "differences": found})
        rows[-1] |= {"steps": call.steps, "step_tokens": call.step_tokens}
    return rows


def not_the_argmax(subject: Subject, prompt: BenchPrompt, text: Sequence[int]) -> list[Divergence]:
    """Return every token of the text that is not the best one there, and an end that should not be one."""
    count, ends = len(text), subject.greedy.eos_token_ids
    scores = decision_scores(
        subject.target, [*prompt.ids, *text[:-1]], count, sampling_of(subject.greedy, 0, subject.target)
    )
    values, best = (one.tolist() for one in scores.topk(2, dim=-1))
    found = []
    for place, token in enumerate(text):
        if token != best[place][0]:
            below = values[place][0] - float(scores[place, token])
            gap = values[place][0] - values[place][1]
            pair = (best[place][0], best[place][1])
            found.append(Divergence(prompt.id, place, token, pair[0], gap, pair, below <= TIE_GAP))
    ended = text[-1] in ends
    if any(token in ends for token in text[:-1]) or (not ended and count < subject.greedy.max_new_tokens):
        found.append(Divergence(prompt.id, count, None, None, 0.0, (-1, -1), False))
    return found


def plain_texts(subject: Subject, decoding: Decoding, prompts: Sequence[BenchPrompt], first: int) -> Rows:
    """Return what the plain loop says."""
    seeds = row_seeds(0, 0, first, len(prompts))
    texts = plain_generate(subject.target, [prompt.ids for prompt in prompts], decoding.rules(seeds))
    return [{"id": prompt.id, "tokens": text} for prompt, text in zip(prompts, texts, strict=True)]


def compare(
    subject: Subject,
    decoding: Decoding,
    prompts: Sequence[BenchPrompt],
    first: int,
    size: int,
    references: Sequence[list[int]],
) -> Rows:
    """Generate with the drafter and compare each text with its reference, up to the first divergence."""
    rows: Rows = []
    for call in run(subject.engine, decoding, prompts, first, size):
        for text in call.outputs:
            prompt, reference = prompts[len(rows)], references[len(rows)]
            sampling: Sampling = sampling_of(decoding, row_seeds(0, 0, first + len(rows), 1)[0], subject.target)
            found = look_at_divergence(subject.target, prompt.id, prompt.ids, text, reference, sampling)
            rows.append(
                {"id": prompt.id, "new_tokens": len(text), "differences": [] if found is None else [found.to_dict()]}
            )
        rows[-1] |= {"steps": call.steps, "step_tokens": call.step_tokens}
    return rows


def summary(plan: Sequence[Part], journal: Journal) -> int:
    """Print a line for each part and each difference; return 1 if one is no tie, else 0."""
    table = Table(title="With the drafter: the same text?", title_justify="left")
    table.add_column("part")
    for heading in ("prompts", "tokens", "tokens/step", "the same", "ties", "at the edge", "different"):
        table.add_column(heading, justify="right")
    shown, failures = [], 0
    for part in plan:
        rows = [row for row in journal.rows(part.name) if "differences" in row]
        if not rows:
            continue
        all_found = [one for row in rows for one in row["differences"]]
        different = sum(any(not one["tie"] for one in row["differences"]) for row in rows)
        edge = sum(one["tie"] and one["at_edge"] for one in all_found)
        ties = sum(one["tie"] and not one["at_edge"] for one in all_found)
        steps = sum(row.get("steps") or 0 for row in rows)
        per_step = sum(row.get("step_tokens") or 0 for row in rows) / max(steps, 1)
        same = sum(not row["differences"] for row in rows)
        tokens = sum(row["new_tokens"] for row in rows)
        figures = (len(rows), f"{tokens:,}", f"{per_step:.2f}", same, ties, edge, different)
        table.add_row(part.name, *map(str, figures))
        shown += [(part.name, one) for one in all_found]
        failures += different
    console = report_console(stderr=False)
    console.print(table)
    for name, one in shown:
        kind = "DIFFERENT" if not one["tie"] else "at the nucleus' edge" if one["at_edge"] else "tie"
        console.print(
            f"{name}: prompt {one['prompt']}, token {one['position']}: {one['token']} instead of {one['reference']}, "
            f"the two best scores are {one['gap']:.1e} apart: {kind}",
            highlight=False,
        )
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"equality.py: {error}")
