"""Answers in the target's own words: prompts in, token ids out, in shards that survive a killed process.

A drafter learns to guess what the target is going to say, so it is trained on what the target did say. Every answer
keeps its provenance: target, dtype, temperature, seed, why it ended. A row's seed depends on its id and its temperature
on its place in the list, so an answer does not depend on batch size or on where a run was interrupted (in float32 and
float64; in bfloat16 passes of other shapes round otherwise).

Who makes the answers is of no concern to `write_answers`: an engine here, or a server in `remote.py`.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TemperatureLogitsWarper

from ..core import hf
from ..core.prompts import (
    Message,
    normalise_row,
    prompt_part,
    render_prompt,
    row_tools,
    template_fingerprint,
    tokenizer_fingerprint,
)
from ..inference.engine import SpeculativeEngine
from ..inference.state import DecodingRules
from .shards import Shards, alone_in
from .shards import write_lines as write_lines  # where its other callers know it from
from .slots import Answer, answer_all
from .stopping import StopSignals

FORMAT_VERSION = 1

TOO_LONG = "too_long"
"""Why a prompt gets no answer, as it is counted."""

WINDOW = 64
"""Batches of prompts that are sorted by temperature and length: many, so that slots seldom run empty at the end of one
temperature; not all, so that a run that is stopped half-way has answers of every kind."""


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """What decides an answer, and so must be the same when a run is resumed.

    temperatures: dealt out to the prompts in turn; 0 is greedy. max_new_tokens: an answer longer than this is cut.
    stop_loops: answers that repeat themselves are ended; only measurements of speed have a use for False.
    server: how a server was asked, None where no server was. adapter: fingerprint of one that the target carried.
    """

    target: str
    dtype: str
    max_new_tokens: int
    temperatures: tuple[float, ...]
    seed: int
    tokenizer_fingerprint: str
    chat_template_fingerprint: str
    stop_loops: bool = True
    server: dict[str, Any] | None = None
    adapter: str | None = None

    def header(self) -> dict[str, Any]:
        """Return the first line of every shard."""
        settings = {**asdict(self), "temperatures": list(self.temperatures)}
        if self.stop_loops:  # the rule, of which only exceptions are told
            del settings["stop_loops"]
        for name in ("server", "adapter"):
            if settings[name] is None:
                del settings[name]
        return {"headstart": "answers", "version": FORMAT_VERSION, **settings}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt ready to be answered."""

    row: dict[str, Any]
    messages: list[Message]
    ids: list[int]
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a moment of a run brought.

    answers: to be written, in this order. rows, tokens: prompts that have ended and tokens that were said, for the bar.
    dropped: why each prompt ended that gets no answer.
    """

    answers: list[tuple[Prompt, Answer]]
    rows: int
    tokens: int
    dropped: Sequence[str] = ()


Steps = Callable[[list[Prompt], Callable[[], bool]], Iterator[Step]]
"""Makes answers to prompts; ends early, with what is finished, once the function that it is given says True."""


def make_settings(
    target: str,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int = 512,
    temperatures: Sequence[float] = (0.0, 0.8),
    seed: int = 0,
    stop_loops: bool = True,
    server: dict[str, Any] | None = None,
    adapter: str | None = None,
) -> ResponseSettings:
    """Fill in the fingerprints; see `ResponseSettings`."""
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures must be one or more numbers >= 0, but are {list(temperatures)}")
    fingerprints = tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)
    sampling = max_new_tokens, tuple(temperatures), seed
    return ResponseSettings(target, dtype, *sampling, *fingerprints, stop_loops, server, adapter)


def respond(
    engine: SpeculativeEngine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    settings: ResponseSettings,
    eos_token_ids: Sequence[int],
    batch_size: int = 32,
    max_prompt_tokens: int = 1536,
    progress: bool = True,
) -> dict[str, int]:
    """Answer every prompt with an engine; see `write_answers`.

    engine: with or without a drafter, the answers are the same up to rounding. batch_size: answers in the making at a
    time.
    """

    def steps(prompts: list[Prompt], stopped: Callable[[], bool]) -> Iterator[Step]:
        for queue in _queues(prompts, batch_size):
            rules = _rules(queue[0].temperature, settings, eos_token_ids)
            ids, seeds = [prompt.ids for prompt in queue], [prompt.seed for prompt in queue]
            for step in answer_all(engine, ids, rules, seeds, batch_size, settings.stop_loops):
                answers = [(queue[answer.prompt], answer) for answer in step.answers]
                yield Step(answers, len(answers), step.tokens)
                if stopped():
                    return

    longest = _longest(engine, settings, max_prompt_tokens)
    return write_answers(steps, tokenizer, rows, folder, settings, batch_size, longest, progress)


def write_answers(
    steps: Steps,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    settings: ResponseSettings,
    shard_size: int,
    longest: int,
    progress: bool = True,
) -> dict[str, int]:
    """Have every prompt answered and write shards into `folder`; prompts answered there already are skipped.

    rows: prompts in any accepted layout; of several with one id the first is answered. longest: tokens of a prompt
    above which it is passed over.

    Ctrl-C and SIGTERM are heard after a step: what is finished is written, how to go on is said on standard error, and
    KeyboardInterrupt (or SystemExit, after SIGTERM) is raised.

    Returns counts: answered now, found, too long, repeated ids, tokens, and by reason what else got no answer. Raises
    ValueError when `folder` holds answers made otherwise or is being written by another process, OSError when the disk
    takes no more.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder), StopSignals() as stop, Shards(folder, settings.header(), shard_size) as shards:
        todo, skipped = _todo(rows, tokenizer, settings, shards.found, longest)
        tokens, dropped = 0, Counter({TOO_LONG: skipped[TOO_LONG]})
        with _Bar(len(todo), skipped["done"], progress) as bar:
            for step in steps(todo, lambda: stop.asked is not None):
                shards.add([_row(prompt, answer, settings) for prompt, answer in step.answers])
                tokens += sum(len(answer.tokens) for _, answer in step.answers)
                dropped.update(step.dropped)
                bar.show(step.rows, step.tokens)
        shards.flush()
        if stop.asked is not None:
            told = f"stopped: {shards.written} of {len(todo)} answers were made and are safe in {folder}"
            print(f"{told}; the same command goes on from there", file=sys.stderr)
            stop.end()
        counts = {"answered": shards.written, "found": len(shards.found), **dropped}
        return {**counts, "repeated": skipped["repeated"], "tokens": tokens}


class _Bar:
    """Rows done of all, tokens a second and the time left, on standard error, about once a second."""

    def __init__(self, todo: int, done: int, shown: bool) -> None:
        # of rows, which end in bursts, the average over the whole run tells more than the last second
        self._bar = tqdm(total=todo + done, initial=done, desc="answers", unit="row", disable=not shown, smoothing=0)
        self._start = self._shown = time.perf_counter()
        self._rows = self._tokens = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        self._bar.close()

    def show(self, rows: int, tokens: int) -> None:
        """Note what a step brought."""
        self._rows += rows
        self._tokens += tokens
        if time.perf_counter() - self._shown >= 1:
            self._show()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        self._bar.set_postfix_str(f"{self._tokens / (self._shown - self._start):.0f} tokens/s", refresh=False)
        self._bar.update(self._rows)
        self._rows = 0


def _longest(engine: SpeculativeEngine, settings: ResponseSettings, most: int) -> int:
    """Return the longest prompt to answer: all rows must stay below a switch of rotary embeddings."""
    switch = hf.rope_switch(engine.target.model)
    return most if switch is None else min(most, switch - settings.max_new_tokens)


def _todo(
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    settings: ResponseSettings,
    found: set[str],
    longest: int,
) -> tuple[list[Prompt], dict[str, int]]:
    """Return the prompts to answer, and how many of the others are done, too long, or repeat an id."""
    todo, skipped = [], {"done": 0, TOO_LONG: 0, "repeated": 0}
    seen: dict[str, str] = {}
    unlike = 0
    for number, row in enumerate(rows):
        place = f"prompt {number + 1}"
        messages = prompt_part(normalise_row(row, place))
        digest = sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]
        identity = str(row.get("id") or f"r-{digest}")
        if identity in seen:
            skipped["repeated"] += 1
            unlike += seen[identity] != digest
            continue
        seen[identity] = digest
        if identity in found:
            skipped["done"] += 1
            continue
        ids = render_prompt(tokenizer, messages, row_tools(row, place))
        if len(ids) > longest:
            skipped[TOO_LONG] += 1
            continue
        temperature = settings.temperatures[number % len(settings.temperatures)]
        seed = (settings.seed << 32) + crc32(identity.encode())
        todo.append(Prompt({**row, "id": identity}, messages, ids, temperature, seed))
    if unlike:
        warnings.warn(
            f"every prompt must have an id of its own, but {unlike} have that of an earlier prompt with another text "
            "and are not answered; give them other ids, or none",
            stacklevel=4,  # whoever called `respond` or `respond_remotely`
        )
    return todo, skipped


def _queues(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Group prompts of one temperature, the longest first: what does not fit into memory fails at the beginning."""
    for begin in range(0, len(prompts), WINDOW * batch_size):
        window = prompts[begin : begin + WINDOW * batch_size]
        for temperature in sorted({prompt.temperature for prompt in window}):
            same = [prompt for prompt in window if prompt.temperature == temperature]
            yield sorted(same, key=lambda prompt: len(prompt.ids), reverse=True)


def _rules(temperature: float, settings: ResponseSettings, eos_token_ids: Sequence[int]) -> DecodingRules:
    processors = LogitsProcessorList()
    if temperature > 0:
        processors.append(TemperatureLogitsWarper(temperature))
    return DecodingRules(settings.max_new_tokens, eos_token_ids, processors, temperature > 0)


def _row(prompt: Prompt, answer: Answer, settings: ResponseSettings) -> dict[str, Any]:
    kept_fields = ("id", "category", "lang", "source", "license")
    return {
        **{key: prompt.row[key] for key in kept_fields if key in prompt.row},
        "messages": prompt.messages,
        "prompt_ids": prompt.ids,
        "answer_ids": answer.tokens,
        "finish_reason": answer.reason,
        "temperature": prompt.temperature,
        "seed": prompt.seed,
        "target": settings.target,
        "dtype": settings.dtype,
    }
