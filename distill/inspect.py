"""Show training rows as text with the trained tokens coloured: a wrong mask is seen at once.

Prints, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .dataset import TokenDataset, TokenRow

TRAINED = "bold green"
CONTEXT = "dim"


def inspect(rows: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase, console: Console, limit: int = 3) -> None:
    """Print the first `limit` rows with trained tokens coloured, then the counts of all rows.

    Without colours (a file, a pipe) trained text stands between ⟦ and ⟧.
    """
    colours = console.is_terminal and not console.no_color
    for number, row in enumerate(rows[:limit], start=1):
        trained = int(row.loss_mask.sum())
        about = ", ".join(part for part in (row.category, row.source) if part)
        console.rule(Text(f"row {number}: {row.id}{f' ({about})' if about else ''}"))
        console.print(coloured(row, tokenizer, brackets=not colours), soft_wrap=True)
        console.print(Text(f"{len(row.input_ids):,} tokens, {trained:,} trained", style="italic"))
    tokens = sum(len(row.input_ids) for row in rows)
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    share = f" ({trained / tokens:.0%})" if tokens else ""
    console.rule()
    console.print(Text(f"{len(rows):,} rows, {tokens:,} tokens, {trained:,} trained{share}"))


def counts_of(data: TokenDataset, limit: int) -> dict[str, Any]:
    """Return the counts of all rows, and ids, token ids and mask of the first `limit`, ready for JSON."""
    report = data.report
    shown = [
        {"id": row.id, "input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
        for row in data.rows[:limit]
    ]
    counts = {"rows": report.rows, "tokens": report.tokens, "trained_tokens": report.trained_tokens}
    return {**counts, "truncated": report.truncated, "dropped": dict(report.dropped), "shown": shown}


def coloured(row: TokenRow, tokenizer: PreTrainedTokenizerBase, brackets: bool = False) -> Text:
    """Return the row's text, special tokens spelled out, in one style for trained tokens and one for the rest."""
    text, shown = Text(), ""
    for trained, run in groupby(np.arange(len(row.input_ids)), key=lambda t: bool(row.loss_mask[t])):
        end = int(list(run)[-1]) + 1
        # Decoding the whole front, not the run: some decoders drop a leading space.
        front = str(tokenizer.decode(row.input_ids[:end].tolist(), clean_up_tokenization_spaces=False))
        piece = front[len(shown) :]
        shown = front
        text.append(f"⟦{piece}⟧" if trained and brackets else piece, style=TRAINED if trained else CONTEXT)
    return text
