"""What a draft vocabulary covers of these texts: the share of the target's tokens that can be guessed at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .measure import Round
from .prompts import BenchPrompt


def coverage_report(
    token_ids: Tensor, name: str, rounds: Sequence[Round], batches: Sequence[Sequence[BenchPrompt]]
) -> dict[str, Any]:
    """Return the covered share of what a method emitted, over all texts, by category and by language.

    token_ids [Vd] long: the draft vocabulary. Every emitted token is the target's own; ends of sequence count.

    Example: vocabulary {5, 6} and the texts [5, 7] and [6, 6] give 0.75.
    """
    known = set(token_ids.tolist())
    texts = [
        (prompt, output)
        for one in rounds
        for prompt, output in zip(batches[one.batch], one.calls[name].outputs, strict=True)
    ]

    def share(kind: str | None, part: str) -> float:
        tokens = [t for prompt, output in texts if kind is None or getattr(prompt, kind) == part for t in output]
        return sum(token in known for token in tokens) / len(tokens)

    def by(kind: str) -> dict[str, float]:
        parts = dict.fromkeys(getattr(prompt, kind) for prompt, _ in texts)
        return {part: share(kind, part) for part in parts if part}

    return {
        "size": len(known),
        "coverage": share(None, ""),
        "by_category": by("category"),
        "by_lang": by("lang"),
    }
