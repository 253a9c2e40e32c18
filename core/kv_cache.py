"""RaggedCache: a transformers cache plus which columns hold committed tokens and at which positions.

Rows accept different numbers of nodes. A commit gathers each row's path, pads to the longest and marks the padding
columns invalid; masks hide those columns and positions come from row lengths, so rows are never realigned. Batch size 1
has no holes. The same class serves the target and drafters with a cache of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

SPARE_COLUMNS = 256
"""Columns a buffer grows by at least, so that appending a block copies only the block."""


class BufferedLayer(DynamicLayer):
    """One layer's keys and values in buffers with spare columns; transformers sees the filled part only."""

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Append key_states and value_states [B, heads, N, width]; return all filled columns."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._buffers = [key_states[:, :, :0], value_states[:, :, :0]]
            self.keys, self.values = self._buffers
        start = self.keys.shape[2]
        stop = start + key_states.shape[2]
        if stop > self._buffers[0].shape[2]:
            self._grow(start, stop + max(SPARE_COLUMNS, stop // 4))
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, start, stop - start).copy_(new)
        self._show(stop)
        return self.keys, self.values

    def keep(self, start: int, columns: Tensor, flat: dict[tuple[Any, ...], Tensor]) -> None:
        """Replace everything from column `start` on by the given columns of it.

        columns [B, A] long: counted from `start`, in the order to keep. flat: indices already made for these columns,
        by the shape they are for; layers of one shape share them.
        """
        (batch, heads, capacity, _), width = self._buffers[0].shape, columns.shape[1]
        shape = (heads, capacity, self._buffers[0].device)
        if shape not in flat:
            first = torch.arange(batch * heads, device=columns.device).view(batch, heads, 1) * capacity + start
            flat[shape] = (first + columns[:, None]).flatten().to(shape[-1])
        for buffer in self._buffers:  # whole rows at a time: gather goes by elements
            kept = buffer.view(-1, buffer.shape[3]).index_select(0, flat[shape])
            buffer.narrow(2, start, width).copy_(kept.view(batch, heads, width, -1))
        self._show(start + width)

    def drop_from(self, start: int) -> None:
        """Forget every column from `start` on."""
        self._show(start)

    def replace_rows(self, rows: Tensor, other: BufferedLayer) -> None:
        """Overwrite `rows` [R] long with the other layer's rows, from column 0 on; columns are added where it has more.

        What a row keeps of its predecessor, or gains without having filled it, is for masks to hide; it is finite.
        """
        filled, new = self.keys.shape[2], other.keys.shape[2]
        if new > self._buffers[0].shape[2]:
            self._grow(filled, new + max(SPARE_COLUMNS, new // 4))
        for buffer, incoming in zip(self._buffers, (other.keys, other.values), strict=True):
            buffer[:, :, filled:new] = 0
            buffer[rows.to(buffer.device), :, :new] = incoming
        self._show(max(filled, new))

    def take_rows(self, rows: Tensor) -> None:
        """Keep the given rows [R] long, in that order."""
        rows = rows.to(self.keys.device)
        filled = self.keys.shape[2]
        self._buffers = [buffer.index_select(0, rows) for buffer in self._buffers]
        self._show(filled)

    def _grow(self, filled: int, capacity: int) -> None:
        for i, old in enumerate(self._buffers):
            self._buffers[i] = old.new_empty(*old.shape[:2], capacity, old.shape[3])
            self._buffers[i][:, :, :filled] = old[:, :, :filled]

    def _show(self, filled: int) -> None:
        self.keys, self.values = (buffer.narrow(2, 0, filled) for buffer in self._buffers)


class RaggedCache:
    """Keys and values of committed tokens, with holes allowed.

    kv: the cache object that models take.
    valid [B, L] bool: columns that hold a committed token.
    positions [B, L] long: position of that token in its row; meaningless where not valid.
    L counts committed columns only; a block just run through the model lies behind them until `commit`.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.kv = Cache(layer_class_to_replicate=BufferedLayer)
        self.valid = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        self.positions = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self._full = True

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.valid.shape[0]

    @property
    def columns(self) -> int:
        """Number of columns L, holes included."""
        return self.valid.shape[1]

    def commit(self, nodes: Tensor, lengths: Tensor) -> None:
        """Keep the accepted nodes of the block that was run last; drop the rest.

        nodes [B, A] long: accepted path, root first, any value in the padding. lengths [B] long: nodes to keep in
        each row, 0 for rows that take no part.

        Example: a row with 7 committed tokens and path [0, 1, 5] keeps block columns 0, 1 and 5 as its positions
        7, 8 and 9.
        """
        inside = torch.arange(nodes.shape[1], device=nodes.device)[None, :] < lengths[:, None]
        nodes = nodes.masked_fill(~inside, 0)
        flat: dict[tuple[Any, ...], Tensor] = {}
        for layer in self._layers():
            layer.keep(self.columns, nodes, flat)
        self._append(inside, lengths)

    def commit_first(self, width: int, lengths: Tensor) -> None:
        """Keep the first `width` columns of the block where they lie, lengths [B] long of them in each row."""
        inside = torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]
        for layer in self._layers():
            layer.drop_from(self.columns + width)
        self._append(inside, lengths)

    def _append(self, inside: Tensor, lengths: Tensor) -> None:
        new_positions = self.lengths[:, None] + torch.arange(inside.shape[1], device=inside.device)
        self.valid = torch.cat([self.valid, inside], dim=1)
        self.positions = torch.cat([self.positions, new_positions], dim=1)
        self.lengths = self.lengths + lengths
        self._full = self._full and self.batch_size == 1

    def drop_block(self) -> None:
        """Forget the block that was run last: nothing of it was accepted."""
        for layer in self._layers():
            layer.drop_from(self.columns)

    def compact(self, threshold: float = 1.0) -> bool:
        """Remove holes if the longest row fills less than `threshold` of the columns; say whether anything was moved.

        Rows stay ragged: afterwards L is the longest row, and shorter rows have their holes at the end. Costs a host
        sync where there may be holes; a single row has none and pays nothing.
        """
        if self._full:
            return False
        longest = int(self.lengths.max())
        if longest >= threshold * self.columns:
            return False
        order = (~self.valid).to(torch.int8).argsort(dim=1, stable=True)[:, :longest]
        flat: dict[tuple[Any, ...], Tensor] = {}
        for layer in self._layers():
            layer.keep(0, order, flat)
        self.valid = self.valid.gather(1, order)
        self.positions = self.positions.gather(1, order)
        return True

    def take_rows(self, rows: Tensor) -> None:
        """Keep the given rows [R] long, in that order."""
        for layer in self._layers():
            layer.take_rows(rows)
        self.valid, self.positions, self.lengths = self.valid[rows], self.positions[rows], self.lengths[rows]

    def replace_rows(self, rows: Tensor, other: RaggedCache) -> None:
        """Give `rows` [R] long over to the other cache's rows; both are committed."""
        for mine, theirs in zip(self._layers(), other._layers(), strict=True):
            mine.replace_rows(rows, theirs)
        columns = max(self.columns, other.columns)
        self.valid = _widened(self.valid, columns).index_copy(0, rows, _widened(other.valid, columns))
        self.positions = _widened(self.positions, columns).index_copy(0, rows, _widened(other.positions, columns))
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)
        self._full = False

    def _layers(self) -> list[BufferedLayer]:
        return self.kv.layers  # type: ignore[return-value]


def _widened(table: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(table, (0, columns - table.shape[1]))
