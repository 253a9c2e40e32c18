"""Prompts to measure on: rendered once by the target's chat template, balanced over categories, grouped in batches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from ...core.prompts import normalise_row, prompt_part, read_jsonl, render_prompt, row_tools

Item = TypeVar("Item")

SHIPPED = Path(__file__).parents[2] / "distill" / "data"
"""Data that come with the package; read as files, since this package knows nothing of `distill`."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt: its id, what kind it is ("" where its row does not say), and its tokens."""

    id: str
    category: str
    lang: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run and where they came from.

    source: file or name. sha256: of the file, None for prompts that did not come from one. skipped: rows left out
    because prompt and answer together would not fit the target's window.
    """

    prompts: list[BenchPrompt]
    source: str
    sha256: str | None
    skipped: int

    @property
    def tokens_sha256(self) -> str:
        """Hash of the rendered tokens: the same prompts under another template are other prompts."""
        return hashlib.sha256(json.dumps([prompt.ids for prompt in self.prompts]).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of its prompts."""
        categories: dict[str, int] = {}
        for prompt in self.prompts:
            categories[prompt.category] = categories.get(prompt.category, 0) + 1
        return {
            "source": self.source,
            "sha256": self.sha256,
            "tokens_sha256": self.tokens_sha256,
            "num_prompts": len(self.prompts),
            "skipped_too_long": self.skipped,
            "tokens": sum(len(prompt.ids) for prompt in self.prompts),
            "categories": categories,
            "ids": [prompt.id for prompt in self.prompts],
        }


def prompts_from_file(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, num_prompts: int, room: int | None
) -> PromptSet:
    """Read prompts from a .jsonl or .jsonl.gz file; see `select`.

    Raises ValueError for a malformed row (naming file and line), or when no prompt fits.
    """
    path = Path(path)
    check_prompts(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    prompts, skipped = select(read_jsonl(path), tokenizer, num_prompts, room)
    return PromptSet(_some(prompts, str(path), skipped), str(path), digest, skipped)


def check_prompts(path: str | Path | None) -> None:
    """Raise ValueError unless the file, if any is named, is there and its first row is a prompt."""
    if path is None:
        return
    if not Path(path).is_file():
        raise ValueError(f"prompts must be a .jsonl file that exists, but {path} is none (searched from {Path.cwd()})")
    for place, row in read_jsonl(Path(path)):
        prompt_part(normalise_row(row, place), place)
        break


def load_prompts(
    path: str | Path | None, tokenizer: PreTrainedTokenizerBase, num_prompts: int, room: int | None
) -> PromptSet:
    """Read prompts from a file, or take the shipped held-out ones; see `select`. Raises ValueError for none."""
    if path is not None:
        return prompts_from_file(path, tokenizer, num_prompts, room)
    return prompts_from_rows(shipped_held_out(), "the shipped held-out prompts", tokenizer, num_prompts, room)


def shipped_held_out() -> Iterator[dict[str, Any]]:
    """Yield the shipped prompts that no drafter is trained on."""
    for file in sorted(SHIPPED.glob("prompts*.jsonl.gz")):
        for _, row in read_jsonl(file):
            if row["split"] == "held_out":
                yield row


def prompts_from_rows(
    rows: Iterable[Mapping[str, Any]],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    room: int | None,
) -> PromptSet:
    """Take prompts from rows in memory, such as the shipped ones; see `select`."""
    placed = ((f"{name}, row {number}", row) for number, row in enumerate(rows, start=1))
    prompts, skipped = select(placed, tokenizer, num_prompts, room)
    return PromptSet(_some(prompts, name, skipped), name, None, skipped)


def select(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    room: int | None,
) -> tuple[list[BenchPrompt], int]:
    """Take the next row of each category in turn until there are `num_prompts`.

    rows: `(place, row)` in any layout of `core/prompts.py`; of `turns`, the first. room: most tokens a prompt may have.

    Returns the prompts and how many rows were too long. Without categories these are the first rows of the file.
    """
    chosen: list[BenchPrompt] = []
    skipped = 0
    for place, row in in_turn(rows, lambda pair: str(pair[1].get("category") or "")):
        if len(chosen) == num_prompts:
            break
        prompt = _render(place, row, tokenizer, len(chosen) + skipped)
        if room is None or len(prompt.ids) <= room:
            chosen.append(prompt)
        else:
            skipped += 1
    return chosen, skipped


def in_turn(items: Iterable[Item], kind: Callable[[Item], str]) -> list[Item]:
    """Reorder so that each kind has its turn: the first of every kind, then the second of every kind, and so on."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, Item]] = []
    for item in items:
        turns.append((seen[kind(item)], item))
        seen[kind(item)] += 1
    order = list(seen)
    return [item for _, item in sorted(turns, key=lambda turn: (turn[0], order.index(kind(turn[1]))))]


def in_batches(prompts: Sequence[BenchPrompt], batch_size: int) -> list[list[BenchPrompt]]:
    """Group prompts for one call each; above batch size 1 those of one category stand together."""
    ordered = list(prompts)
    if batch_size > 1:
        order = list(dict.fromkeys(prompt.category for prompt in prompts))
        ordered.sort(key=lambda prompt: order.index(prompt.category))
    return [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]


def label(batch: Sequence[BenchPrompt], kind: str) -> str:
    """Return the "category" or "lang" that a batch's prompts share, or "mixed"."""
    found = {getattr(prompt, kind) for prompt in batch}
    return found.pop() if len(found) == 1 else "mixed"


def _render(place: str, row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, number: int) -> BenchPrompt:
    messages = prompt_part(normalise_row(row, place), place)
    try:
        ids = render_prompt(tokenizer, messages, row_tools(row, place))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    name = row.get("id") or row.get("question_id") or f"prompt {number + 1}"
    return BenchPrompt(str(name), str(row.get("category") or ""), str(row.get("lang") or ""), ids)


def _some(prompts: list[BenchPrompt], source: str, skipped: int) -> list[BenchPrompt]:
    if not prompts:
        found = f"all {skipped} are too long for the target's window" if skipped else "there is none"
        raise ValueError(f"{source} must hold a prompt to measure on, but {found}")
    return prompts
