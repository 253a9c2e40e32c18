"""Rows of token ids: one in memory, and many in a file that is mapped into memory, for data that memory would not hold.

The file is Arrow's (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format). A row is read when it is asked
for; what stays in memory is 8 bytes for each, its length, and as much again for a part of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

ROWS_PER_BATCH = 256
"""Rows that are written at once: what is held in memory while a file is written."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row to train on.

    input_ids [T] int32: prompt and answer.
    loss_mask [T] bool: True where the token is trained: learn to predict `input_ids[t]`.
    """

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    category: str = ""
    source: str = ""

    @property
    def prompt_length(self) -> int:
        """Tokens before the first trained one: what a held-out row gives the engine to continue."""
        return int(self.loss_mask.argmax())


class RowTable(Sequence[TokenRow]):
    """Rows of a file that `write_rows` has written; each is made anew whenever it is asked for.

    places: which of the file's rows, in this order; None means all.
    lengths [N] int64: tokens of each row.
    """

    def __init__(self, path: Path, places: np.ndarray | None = None) -> None:
        import pyarrow as arrow  # comes with datasets; slow to import

        self.path = path
        reader = arrow.ipc.open_file(arrow.memory_map(str(path)))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        counted = (np.diff(batch["input_ids"].offsets.to_numpy()) for batch in self._batches)
        lengths = np.concatenate([np.zeros(0, np.int64), *counted])
        self.places = np.arange(len(lengths)) if places is None else places
        self.lengths = lengths[self.places].astype(np.int64)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...

    @overload
    def __getitem__(self, index: slice) -> RowTable: ...

    def __getitem__(self, index: int | slice) -> TokenRow | RowTable:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        batch, at = divmod(int(self.places[index]), ROWS_PER_BATCH)
        row = {name: self._batches[batch][name][at] for name in ("id", "category", "source", "input_ids", "loss_mask")}
        ids, mask = (row[name].values.to_numpy(zero_copy_only=False) for name in ("input_ids", "loss_mask"))
        told = [row[name].as_py() for name in ("category", "source")]
        return TokenRow(row["id"].as_py(), ids.copy(), mask.copy(), *told)  # mapped memory cannot be written to

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.places)  # to processes that load data: the file, not what it holds

    def select(self, indices: np.ndarray) -> RowTable:
        """Return some of the rows, in this order."""
        return RowTable(self.path, self.places[indices])

    def ids(self) -> Iterator[str]:
        """Yield the rows' ids without reading anything else of them."""
        for place in self.places:
            batch, at = divmod(int(place), ROWS_PER_BATCH)
            yield self._batches[batch]["id"][at].as_py()


def lengths_of(rows: Sequence[TokenRow]) -> Sequence[int]:
    """Return the tokens of each row."""
    return rows.lengths if isinstance(rows, RowTable) else [len(row.input_ids) for row in rows]  # type: ignore[return-value]


def write_rows(rows: Iterable[TokenRow], path: Path) -> None:
    """Write rows to a file, a few at a time; it is for the caller to see that half a file is not taken for a whole one.

    Raises OSError when the file cannot be written.
    """
    import pyarrow as arrow

    kinds = {"input_ids": arrow.list_(arrow.int32()), "loss_mask": arrow.list_(arrow.bool_())}
    names = ("id", "input_ids", "loss_mask", "category", "source")
    schema = arrow.schema([(name, kinds.get(name, arrow.string())) for name in names])
    left = iter(rows)
    with arrow.OSFile(str(path), "wb") as file, arrow.ipc.new_file(file, schema) as writer:
        while group := list(islice(left, ROWS_PER_BATCH)):
            columns = [arrow.array([getattr(row, name) for row in group], schema.field(name).type) for name in names]
            writer.write_batch(arrow.record_batch(columns, schema=schema))
