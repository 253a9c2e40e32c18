"""Rows to train a drafter on: token ids, and which of them are the assistant's own.

Two kinds of rows, told apart by their fields: answers of the target (`prompt_ids`, `answer_ids`; the answer is trained)
and conversations (anything `core/prompts.py` accepts; the assistant's turns are trained). Features are not made here,
and nothing here knows a drafter. Rows are kept in memory as int32 and bool arrays, about 5 bytes a token; those of
`row_cache.py` stay on the disk.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from ..core.prompts import normalise_row, read_jsonl, render_conversation, row_tools, tokenizer_fingerprint
from ..core.shapes import rounded_up
from .table import RowTable, TokenRow, lengths_of

DATA_FILES = (".jsonl", ".jsonl.gz", ".parquet")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
ANSWERS_VERSION = 1
SHIPPED = Path(__file__).parent / "data"


@dataclass(slots=True)
class DatasetReport:
    """What was read: rows and tokens kept, trained tokens among them, and rows dropped by reason.

    left_out: trained turns of which the chat template does not show all.
    """

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    answers: int = 0
    truncated: int = 0
    left_out: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    headers: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        """Give the counts in one line."""
        kinds = f"{self.answers:,} answers of a target, {self.rows - self.answers:,} conversations"
        lost = "".join(f"; dropped {count:,}: {reason}" for reason, count in self.dropped.items())
        cut = f"; {self.truncated:,} rows cut" if self.truncated else ""
        if self.left_out:
            cut += f"; of {self.left_out:,} turns the chat template leaves out reasoning, or words beside tool calls"
        return f"{self.rows:,} rows ({kinds}), {self.tokens:,} tokens, {self.trained_tokens:,} trained{cut}{lost}"


class TokenDataset(Dataset[TokenRow]):
    """Rows and the report of how they came about."""

    def __init__(self, rows: Sequence[TokenRow], report: DatasetReport):
        self.rows, self.report = rows, report

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each row."""
        return lengths_of(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> TokenRow:
        return self.rows[index]


def load_dataset(
    source: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 2048,
    train_on: Literal["all", "last"] = "all",
    template_options: Mapping[str, Any] | None = None,
    first: int | None = None,
) -> TokenDataset:
    """Read training rows from files, folders of shards, or Hugging Face data sets named with a "/".

    max_length: longer rows keep their front; a row left without a trained token is dropped and counted.
    train_on, template_options: for conversations, see `render_conversation`. first: only so many lines of each source.
    Raises ValueError for a malformed row (naming file and line), for answers made with another tokenizer, and when no
    row with a trained token remains.
    """
    report = DatasetReport()
    rows = list(token_rows(source, tokenizer, report, max_length, train_on, template_options, first))
    return TokenDataset(rows, report)


def token_rows(
    source: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    report: DatasetReport,
    max_length: int = 2048,
    train_on: Literal["all", "last"] = "all",
    template_options: Mapping[str, Any] | None = None,
    first: int | None = None,
) -> Iterator[TokenRow]:
    """Yield the rows of `load_dataset` one after the other, and count them in the report."""
    sources = [source] if isinstance(source, str | Path) else list(source)
    for place, row in (pair for one in sources for pair in islice(read_rows(one), first)):
        if row.get("headstart") == "answers":
            _check_header(row, tokenizer, place)
            report.headers.append(row)
            continue
        is_answer = row.get("answer_ids") is not None
        if is_answer:
            ids, mask = _answer_tokens(row, len(tokenizer), place)
            left_out = 0
        else:
            ids, mask, left_out = _conversation_tokens(row, tokenizer, train_on, template_options, place)
        if not mask[:max_length].any():
            report.dropped[_why_untrained(mask, max_length)] += 1
            continue
        report.truncated += len(ids) > max_length
        ids, mask = ids[:max_length], mask[:max_length]
        report.rows += 1
        report.answers += is_answer
        report.tokens += len(ids)
        report.trained_tokens += int(mask.sum())
        report.left_out += left_out
        yield TokenRow(_row_id(row, ids), ids, mask, str(row.get("category") or ""), str(row.get("source") or ""))
    if not report.rows:
        dropped = ", ".join(f"{count} dropped: {reason}" for reason, count in report.dropped.items()) or "no row at all"
        raise ValueError(
            f"{', '.join(map(str, sources))}: a data set must hold a row with a trained token (an assistant turn or "
            f"answer_ids), found {dropped}; make answers with `headstart distill`"
        )


def read_rows(source: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(place, row)` from a .jsonl, .jsonl.gz or .parquet file, a folder of them, or a Hub data set.

    Only a name of the form `owner/name` that is no path here goes to the Hub; its train split is read.
    Raises ValueError when the source is none of these, or a line is malformed.
    """
    path = Path(source)
    if path.is_dir():
        shards = sorted(file for file in path.iterdir() if file.name.endswith(DATA_FILES))
        if not shards:
            raise ValueError(f"{path}: a data folder must hold files ending in {', '.join(DATA_FILES)}, found none")
        for shard in shards:
            yield from read_rows(shard)
    elif path.is_file():
        if not path.name.endswith(DATA_FILES):
            raise ValueError(f"{path}: a data file must end in {', '.join(DATA_FILES)}; rename or convert it")
        yield from _read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path)
    elif HUB_NAME.fullmatch(str(source)) and not str(source).endswith(DATA_FILES):
        import datasets  # slow to import, and only needed here

        for number, row in enumerate(datasets.load_dataset(str(source), split="train"), start=1):
            yield f"{source}, row {number}", dict(row)
    else:
        raise ValueError(
            f"{source}: a data source must be a file or folder that exists, or a Hugging Face data set named "
            f"owner/name; found neither (searched from {Path.cwd()})"
        )


def shipped_prompts(
    split: Literal["train", "held_out"] | None = None, share_alike: bool = True
) -> list[dict[str, Any]]:
    """Return the prompts that come with the package, ordered so that every prefix is balanced over the categories.

    split: only these rows. share_alike: with the file under share-alike licences, the only source of translation, QA,
        rewriting and extraction prompts. Each row has id, source, category, lang, license, split and messages; see
        `distill/data/SOURCES.md`.
    """
    names = ["prompts.jsonl.gz", "prompts_sharealike.jsonl.gz"][: 1 + share_alike]
    files = [[row for _, row in read_jsonl(SHIPPED / name) if split in (None, row["split"])] for name in names]
    merged = sorted(((i + 0.5) / len(rows), f, i) for f, rows in enumerate(files) for i in range(len(rows)))
    rows = [files[f][i] for _, f, i in merged]
    total, seen, keyed = Counter(row["category"] for row in rows), Counter(), []
    for i, row in enumerate(rows):
        keyed.append(((seen[row["category"]] + 0.5) / total[row["category"]], i))
        seen[row["category"]] += 1
    return [rows[i] for _, i in sorted(keyed)]


def split_held_out(rows: Sequence[TokenRow], held_out_fraction: float) -> tuple[Sequence[TokenRow], Sequence[TokenRow]]:
    """Split rows into those to train on and those held out, by a hash of their ids.

    A row stays on its side when others come or go, and several answers to one prompt stay together. At least one row is
    held out when the fraction is above 0 and there are two different ids.
    """
    if not 0 <= held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be at least 0 and below 1, found {held_out_fraction}")
    ids = rows.ids() if isinstance(rows, RowTable) else (row.id for row in rows)
    place = np.fromiter((int(hashlib.sha256(id.encode()).hexdigest()[:12], 16) / 16**12 for id in ids), np.float64)
    held = place < held_out_fraction
    if held_out_fraction and len(place) and not held.any() and place.min() < place.max():
        held = place == place.min()
    if isinstance(rows, RowTable):
        return rows.select(np.flatnonzero(~held)), rows.select(np.flatnonzero(held))
    apart: tuple[list[TokenRow], list[TokenRow]] = [], []
    for row, is_held in zip(rows, held, strict=True):
        apart[int(is_held)].append(row)
    return apart


def token_frequencies(rows: Sequence[TokenRow], vocab_size: int) -> Tensor:
    """Count how often each token is trained: [V] long, for choosing a draft vocabulary."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row.input_ids[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


@dataclass(frozen=True, slots=True)
class Collator:
    """Rows in, one right-padded batch out; the fields are those of `DraftBatch`, features aside.

    even: pad to widths that come again, see `core/shapes.py`.
    """

    pad_id: int
    even: bool = False

    def __call__(self, rows: Sequence[TokenRow | Sequence[TokenRow]]) -> dict[str, Tensor]:
        """Pad on the right to the longest, or a little more. Several rows in the place of one share a sequence.

        Returns:
            tokens [B, T] long: `pad_id` in the padding.
            token_mask [B, T] bool: False in the padding.
            loss_mask [B, T] bool: learn to predict `tokens[t]`.
            positions [B, T] long: 0, 1, 2, … in every row; in the padding none that is not in the batch.
            segments [B, T] long: which row of its sequence a token belongs to; only where rows share one.
        """
        sequences = [found for row in rows if (found := [row] if isinstance(row, TokenRow) else list(row))]
        longest = max(sum(len(row.input_ids) for row in sequence) for sequence in sequences)
        shape = (len(sequences), rounded_up(longest) if self.even else longest)
        tokens = torch.full(shape, self.pad_id, dtype=torch.long)
        token_mask, loss_mask = (torch.zeros(shape, dtype=torch.bool) for _ in range(2))
        positions, segments = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        for i, sequence in enumerate(sequences):
            start = 0
            for number, row in enumerate(sequence):
                part = slice(start, start + len(row.input_ids))
                tokens[i, part] = torch.from_numpy(row.input_ids.astype(np.int64))
                token_mask[i, part] = True
                loss_mask[i, part] = torch.from_numpy(row.loss_mask)
                positions[i, part] = torch.arange(len(row.input_ids))
                segments[i, start:] = number
                start = part.stop
        batch = {"tokens": tokens, "token_mask": token_mask, "loss_mask": loss_mask, "positions": positions}
        return batch | {"segments": segments} if any(len(sequence) > 1 for sequence in sequences) else batch


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow.parquet  # comes with datasets; slow to import

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} must be a whole parquet file, but after row {number} cannot be read ({error}); copy it again"
        ) from error


def _check_header(header: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, place: str) -> None:
    if header.get("version") != ANSWERS_VERSION:
        raise ValueError(
            f"{place}: answers must be of version {ANSWERS_VERSION}, but are of version {header.get('version')!r}; "
            "update headstart, or make them again"
        )
    made_with = header.get("tokenizer_fingerprint")
    if made_with is not None and made_with != (found := tokenizer_fingerprint(tokenizer)):
        raise ValueError(
            f"{place}: answers must be token ids of the target's tokenizer ({found}), but these were made with "
            f"another ({made_with}, target {header.get('target')}); make answers with this target: `headstart distill`"
        )


def _answer_tokens(row: Mapping[str, Any], vocab_size: int, place: str) -> tuple[np.ndarray, np.ndarray]:
    prompt = _id_array(row.get("prompt_ids"), "prompt_ids", vocab_size, place)
    answer = _id_array(row["answer_ids"], "answer_ids", vocab_size, place)
    return np.concatenate([prompt, answer]), np.arange(len(prompt) + len(answer)) >= len(prompt)


def _id_array(values: Any, name: str, vocab_size: int, place: str) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{place}: `{name}` must be a list of token ids, found {repr(values)[:80]}")
    if values and not 0 <= min(values) <= max(values) < vocab_size:
        wrong = next(value for value in values if not 0 <= value < vocab_size)
        raise ValueError(f"{place}: `{name}` must lie below the tokenizer's size {vocab_size}, found {wrong}")
    return np.array(values, dtype=np.int32)


def _conversation_tokens(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    train_on: Literal["all", "last"],
    template_options: Mapping[str, Any] | None,
    place: str,
) -> tuple[np.ndarray, np.ndarray, int]:
    messages = normalise_row(row, place)
    try:
        rendered = render_conversation(tokenizer, messages, train_on, row_tools(row, place), template_options)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return np.array(rendered.input_ids, dtype=np.int32), np.array(rendered.loss_mask, dtype=bool), rendered.left_out


def _why_untrained(mask: np.ndarray, max_length: int) -> str:
    if not mask.any():
        return "no trained token (no assistant turn, or an empty answer)"
    return f"no trained token among the first {max_length} (max_length)"


def _row_id(row: Mapping[str, Any], ids: np.ndarray) -> str:
    return str(row["id"]) if row.get("id") is not None else hashlib.sha256(ids.tobytes()).hexdigest()[:16]
