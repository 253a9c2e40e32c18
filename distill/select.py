"""Choose which answers to train on: every finished one, no loops, few that were cut.

Small models run on and repeat themselves. A loop teaches a drafter nothing but the loop, and a cut answer never shows
it how an answer ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..core.prompts import read_jsonl

FINISHED, CUT, LOOP = "stop", "length", "loop"
MUST_AGREE = ("target", "tokenizer_fingerprint", "chat_template_fingerprint")

NGRAM = 4
LOOP_BELOW = 0.5
"""An answer of which less than this share of its 4-grams are distinct counts as a loop."""

TAIL, TAIL_LOOP_BELOW = 96, 0.25
"""An answer whose last tokens are as repetitive as this has fallen into a loop, and is ended there."""


@dataclass(slots=True)
class Selection:
    """Rows kept, and what became of the rest.

    found, kept: rows and answer tokens. dropped: rows by reason.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    found_rows: int = 0
    found_tokens: int = 0
    kept_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """Return the counts, ready for JSON."""
        return {
            "found_rows": self.found_rows,
            "found_tokens": self.found_tokens,
            "kept_rows": len(self.rows),
            "kept_tokens": self.kept_tokens,
            "kept_cut": sum(row["finish_reason"] == CUT for row in self.rows),
            "dropped": dict(self.dropped),
        }


def read_answers(folders: Sequence[Path]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return a header and the answers of all shards in folders that `headstart distill` wrote.

    Raises ValueError for a folder without shards, a malformed row (naming file and line), and for folders whose answers
    are another model's: their token ids mean other words.
    """
    shards: list[Path] = []
    for folder in folders:
        found = sorted(folder.glob("answers-*.jsonl"))
        if not found:
            raise ValueError(f"{folder} must be a folder of shards (answers-*.jsonl) that `headstart distill` wrote")
        shards += found
    header: dict[str, Any] = {"headstart": "answers", "version": 1}
    seen: dict[str, Any] | None = None
    for place, row in chain.from_iterable(map(read_jsonl, shards)):
        if "headstart" not in row:
            continue
        differing = [key for key in MUST_AGREE if seen is not None and seen.get(key) != row.get(key)]
        if seen is not None and differing:
            key = differing[0]
            raise ValueError(
                f"{place}: all answers must be one model's, but {key} is {row.get(key)!r} here and {seen.get(key)!r} "
                "before; select from them one by one"
            )
        seen = seen or row
    return seen or header, _answers(shards)


def _answers(shards: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for place, row in chain.from_iterable(map(read_jsonl, shards)):
        if "headstart" not in row:
            ids = row.get("answer_ids")
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise ValueError(f"{place}: `answer_ids` must be a list of token ids, found {repr(ids)[:80]}")
            if row.get("finish_reason") not in (FINISHED, CUT, LOOP):
                raise ValueError(
                    f"{place}: `finish_reason` must be {FINISHED}, {CUT} or {LOOP}, found {row.get('finish_reason')!r}"
                )
            yield row


def select(answers: Iterable[dict[str, Any]], cut_share: float = 0.1) -> Selection:
    """Keep every finished answer that is no loop, and cut ones until they are `cut_share` of the rows kept.

    answers: rows as `respond` writes them. Returns the rows in the order they came.
    """
    if not 0 <= cut_share < 1:
        raise ValueError(f"cut_share must be at least 0 and below 1, but is {cut_share}")
    selection, candidates = Selection(), []
    for row in answers:
        selection.found_rows += 1
        selection.found_tokens += len(row["answer_ids"])
        if row["finish_reason"] == LOOP or distinct_share(row["answer_ids"]) < LOOP_BELOW:
            selection.dropped["loop"] += 1
        else:
            candidates.append(row)
    finished = sum(row["finish_reason"] == FINISHED for row in candidates)
    room = int(finished * cut_share / (1 - cut_share))
    for row in candidates:
        if row["finish_reason"] != FINISHED:
            if room == 0:
                selection.dropped["cut"] += 1
                continue
            room -= 1
        selection.rows.append(row)
        selection.kept_tokens += len(row["answer_ids"])
    return selection


def distinct_share(tokens: list[int]) -> float:
    """Return the share of distinct 4-grams among all 4-grams; 1.0 for an answer too short to repeat itself.

    Example: "a b a b a b a b" has 5 4-grams, 2 of them distinct: 0.4.
    """
    grams = [tuple(tokens[i : i + NGRAM]) for i in range(len(tokens) - NGRAM + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def in_a_loop(tokens: list[int]) -> bool:
    """Say whether an answer in the making repeats itself at its end, say one phrase of 24 tokens four times."""
    return len(tokens) >= TAIL and distinct_share(tokens[-TAIL:]) < TAIL_LOOP_BELOW
