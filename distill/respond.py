"""Answers in the target's own words: prompts in, token ids out, in shards that survive a killed process.

A drafter learns to guess what the target is going to say, so it is trained on what the target did say. Every answer
keeps its provenance: target, dtype, temperature, seed, why it ended. A row's seed depends on its prompt and its
temperature on its place in the list, so an answer does not depend on batch size or on where a run was interrupted.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from tqdm import tqdm
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TemperatureLogitsWarper

from ..core.prompts import (
    Message,
    normalise_row,
    prompt_part,
    read_jsonl,
    render_prompt,
    row_tools,
    template_fingerprint,
    tokenizer_fingerprint,
)
from ..inference.engine import SpeculativeEngine
from ..inference.state import DecodingRules
from .select import in_a_loop

FORMAT_VERSION = 1

LOOK_EVERY = 16
"""Steps between looks for rows that repeat themselves; such an answer is of no use, so its row is ended."""


@dataclass(frozen=True, slots=True)
class ResponseSettings:
    """What decides an answer, and so must be the same when a run is resumed.

    temperatures: dealt out to the prompts in turn; 0 is greedy. max_new_tokens: an answer longer than this is cut.
    """

    target: str
    dtype: str
    max_new_tokens: int
    temperatures: tuple[float, ...]
    seed: int
    tokenizer_fingerprint: str
    chat_template_fingerprint: str

    def header(self) -> dict[str, Any]:
        """Return the first line of every shard."""
        settings = {**asdict(self), "temperatures": list(self.temperatures)}
        return {"headstart": "answers", "version": FORMAT_VERSION, **settings}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt ready to be answered."""

    row: dict[str, Any]
    messages: list[Message]
    ids: list[int]
    temperature: float
    seed: int


def make_settings(
    target: str,
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int = 512,
    temperatures: Sequence[float] = (0.0, 0.8),
    seed: int = 0,
) -> ResponseSettings:
    """Fill in the fingerprints; see `ResponseSettings`."""
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"temperatures must be one or more numbers >= 0, but are {list(temperatures)}")
    fingerprints = tokenizer_fingerprint(tokenizer), template_fingerprint(tokenizer)
    return ResponseSettings(target, dtype, max_new_tokens, tuple(temperatures), seed, *fingerprints)


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
    """Answer every prompt and write shards into `folder`; prompts answered there already are skipped.

    rows: prompts in any accepted layout. engine: with or without a drafter, the answers are the same up to rounding.

    Returns counts: answered now, found, too long. Raises ValueError when `folder` holds answers made otherwise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found, next_shard = _resume(folder, settings)
    todo, too_long = [], 0
    for number, row in enumerate(rows):
        prompt = _prepare(number, row, tokenizer, settings)
        if prompt.row["id"] in found:
            continue
        if len(prompt.ids) > max_prompt_tokens:
            too_long += 1
            continue
        todo.append(prompt)
    bar = tqdm(total=len(todo), desc="answers", unit="row", disable=not progress)
    tokens, start = 0, time.perf_counter()
    for shard, batch in enumerate(_batches(todo, batch_size), start=next_shard):
        answers = _answer(engine, batch, settings, eos_token_ids)
        write_lines(folder / f"answers-{shard:05d}.jsonl", [settings.header(), *answers])
        tokens += sum(len(answer["answer_ids"]) for answer in answers)
        bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} tokens/s")
        bar.update(len(batch))
    bar.close()
    return {"answered": len(todo), "found": len(found), "too_long": too_long, "tokens": tokens}


def read_answers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers of a folder's shards, headers left out."""
    for path in sorted(folder.glob("answers-*.jsonl")):
        for _, row in read_jsonl(path):
            if "headstart" not in row:
                yield row


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a .jsonl or .jsonl.gz file whole or not at all: to a temporary name, flushed to disk, then renamed."""
    temporary = path.with_name(path.name + ".partial")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    with temporary.open("wb") as file:
        # without a time stamp, so that the same rows give the same bytes
        file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _prepare(
    number: int, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, settings: ResponseSettings
) -> Prompt:
    place = f"prompt {number + 1}"
    messages = prompt_part(normalise_row(row, place))
    identity = str(row.get("id") or f"r-{crc32(json.dumps(messages, sort_keys=True).encode()):08x}")
    temperature = settings.temperatures[number % len(settings.temperatures)]
    ids = render_prompt(tokenizer, messages, row_tools(row, place))
    seed = (settings.seed << 32) + crc32(identity.encode())
    return Prompt({**row, "id": identity}, messages, ids, temperature, seed)


def _batches(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Group prompts of one temperature and like length, keeping the order of groups of 16 batches."""
    window = 16 * batch_size
    for begin in range(0, len(prompts), window):
        group = sorted(prompts[begin : begin + window], key=lambda p: (p.temperature, len(p.ids)))
        for temperature in sorted({p.temperature for p in group}):
            same = [p for p in group if p.temperature == temperature]
            for at in range(0, len(same), batch_size):
                yield same[at : at + batch_size]


def _answer(
    engine: SpeculativeEngine, batch: Sequence[Prompt], settings: ResponseSettings, eos_token_ids: Sequence[int]
) -> list[dict[str, Any]]:
    temperature = batch[0].temperature
    processors = LogitsProcessorList()
    if temperature > 0:
        processors.append(TemperatureLogitsWarper(temperature))
    rules = DecodingRules(
        settings.max_new_tokens, eos_token_ids, processors, temperature > 0, seed=[p.seed for p in batch]
    )
    state = engine.prefill([p.ids for p in batch], rules)
    while not state.done:
        engine.step(state)
        if state.stats.target_passes % LOOK_EVERY == 0 and not state.done:
            engine.stop(state, [row for row in state.order if in_a_loop(state.outputs[row])], "loop")
    kept_fields = ("id", "category", "lang", "source", "license")
    return [
        {
            **{key: prompt.row[key] for key in kept_fields if key in prompt.row},
            "messages": prompt.messages,
            "prompt_ids": prompt.ids,
            "answer_ids": answer,
            "finish_reason": reason,
            "temperature": temperature,
            "seed": prompt.seed,
            "target": settings.target,
            "dtype": settings.dtype,
        }
        for prompt, answer, reason in zip(batch, state.outputs, state.finish_reasons, strict=True)
    ]


def _resume(folder: Path, settings: ResponseSettings) -> tuple[set[str], int]:
    """Return the ids answered in the folder and the next shard number; refuse answers made with other settings."""
    found: set[str] = set()
    shards = sorted(folder.glob("answers-*.jsonl"))
    for path in shards:
        for place, row in read_jsonl(path):
            if "headstart" in row:
                differing = [key for key, value in settings.header().items() if row.get(key) != value]
                if differing:
                    told = ", ".join(
                        f"{key}: {row.get(key)!r} there, {settings.header()[key]!r} now" for key in differing
                    )
                    raise ValueError(f"{place}: answers in one folder must be made alike, but differ in {told}; "
                                     "use another folder")  # fmt: skip
            else:
                found.add(row["id"])
    return found, 1 + max((int(path.stem.split("-")[1]) for path in shards), default=-1)
