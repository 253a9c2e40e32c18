"""Choose which answers to train on: every finished one, no loops, few that were cut.

Small models run on and repeat themselves. A loop teaches a drafter nothing but the loop, and a cut answer never shows
it how an answer ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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
            "kept_cut": sum(row["finish_reason"] == "length" for row in self.rows),
            "dropped": dict(self.dropped),
        }


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
        if row["finish_reason"] == "loop" or distinct_share(row["answer_ids"]) < LOOP_BELOW:
            selection.dropped["loop"] += 1
        else:
            candidates.append(row)
    finished = sum(row["finish_reason"] == "stop" for row in candidates)
    room = int(finished * cut_share / (1 - cut_share))
    for row in candidates:
        if row["finish_reason"] != "stop":
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
