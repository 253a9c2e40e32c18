"""The target's features of a batch: made on the spot, and kept in memory for later epochs where asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..distill.dataset import Collator, TokenRow
from ..drafters.base import DraftBatch, FeatureLayer
from ..inference.target import Target


@dataclass(frozen=True, slots=True)
class KeyedCollator:
    """A collator whose batches also say which rows they hold: row_keys [B] long, a hash of each row's tokens."""

    collator: Collator

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, Tensor]:
        """Pad rows; see `Collator`."""
        return {**self.collator(rows), "row_keys": torch.tensor([row_key(row) for row in rows])}


def row_key(row: TokenRow) -> int:
    """Return 64 bits that tell a row's tokens from those of others."""
    return int.from_bytes(hashlib.sha256(row.input_ids.tobytes()).digest()[:8], "big", signed=True)


class FeatureSource:
    """Turns a collator's batch into a `DraftBatch`.

    layers: what the drafter reads. capacity_bytes: features of so much memory are kept, on the CPU; 0 keeps none.

    With a memory the target reads every row alone. In a batch, rounding would depend on the row's company, so a resumed
    run, which meets rows in another company for the first time, would not equal the uninterrupted one to the bit.
    """

    def __init__(self, target: Target, layers: Sequence[FeatureLayer], capacity_bytes: int = 0) -> None:
        self.target = target
        self.layers = tuple(layers)
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self._rows: dict[int, Tensor] = {}
        # "final" is always made and kept once, however often the drafter asks for it.
        self._blocks = tuple(dict.fromkeys(layer for layer in self.layers if layer != "final"))
        kept = ("final", *self._blocks)
        self._order = [kept.index(layer) for layer in self.layers]

    @property
    def bytes_per_token(self) -> int:
        """Memory that keeping one position takes."""
        return (1 + len(self._blocks)) * self.target.width * self.target.dtype.itemsize

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor]) -> DraftBatch:
        """Add features and segments to what the collator made; packed rows (with segments) are never kept."""
        tokens, segments = inputs["tokens"], inputs.get("segments")
        mask, positions = inputs["token_mask"], inputs["positions"]
        if self.capacity_bytes and segments is None:
            states = self._kept(tokens, mask, positions, inputs["row_keys"].tolist())
        else:
            states = self._encode(tokens, mask, positions, segments)
        if segments is None:
            segments = torch.zeros_like(tokens)
        features = states[:, :, :1] if self._order == [0] else states[:, :, self._order]
        return DraftBatch(tokens, mask, inputs["loss_mask"], positions, segments, features, states[:, :, 0])

    def _encode(self, tokens: Tensor, mask: Tensor, positions: Tensor, segments: Tensor | None) -> Tensor:
        """Return [B, T, 1 + blocks, D]: the final state, then each block the drafter asks for."""
        out = self.target.encode(tokens, mask, self._blocks, positions, segments)
        return torch.cat([out.final[:, :, None], out.features], dim=2) if self._blocks else out.final[:, :, None]

    def _kept(self, tokens: Tensor, mask: Tensor, positions: Tensor, keys: list[int]) -> Tensor:
        lengths = mask.sum(1).tolist()
        fresh: dict[int, Tensor] = {}
        for i, key in enumerate(keys):
            if key not in self._rows and key not in fresh:
                here = slice(i, i + 1), slice(lengths[i])
                fresh[key] = self._encode(tokens[here], mask[here], positions[here], None)[0]
        rows = [fresh[key] if key in fresh else self._rows[key].to(tokens.device) for key in keys]
        for key, value in fresh.items():
            size = value.numel() * value.element_size()
            if self.bytes + size <= self.capacity_bytes:
                self._rows[key] = value.to("cpu", copy=True)
                self.bytes += size
        padded = pad_sequence(rows, batch_first=True)
        return torch.nn.functional.pad(padded, (0, 0, 0, 0, 0, tokens.shape[1] - padded.shape[1]))
