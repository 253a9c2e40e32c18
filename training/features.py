"""The target's features of a batch: made on the spot, kept in memory for later epochs, or read from a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distill.capture import row_states
from ..distill.dataset import Collator, TokenRow
from ..distill.store import FeatureStore, row_key
from ..drafters.base import DraftBatch, FeatureLayer
from ..inference.target import Target


@dataclass(frozen=True, slots=True)
class KeyedCollator:
    """A collator whose batches also say which rows they hold: row_keys [R] long, a hash of each row's tokens."""

    collator: Collator

    def __call__(self, rows: Sequence[TokenRow | Sequence[TokenRow]]) -> dict[str, Tensor]:
        """Pad rows, or those that share a sequence; see `Collator`. Keys stand in the order of the sequences."""
        each = [one for row in rows for one in ([row] if isinstance(row, TokenRow) else row)]
        return {**self.collator(rows), "row_keys": torch.tensor([row_key(row) for row in each])}


class KeptRows:
    """States of whole rows, each read alone: from memory, else from a store if they are there, else from the target.

    In a batch, rounding would depend on the row's company, so a resumed run, which meets rows in another company for
    the first time, would not equal the uninterrupted one to the bit. Several drafters may share one of these.

    layers: what they read together. capacity_bytes: states of so much memory are kept, on the CPU.
    store: must hold the layers. make: whether the target makes rows that a store lacks; else ValueError is raised.
    told: which rows come from where, for people.
    """

    def __init__(
        self,
        target: Target,
        layers: Sequence[FeatureLayer],
        capacity_bytes: int,
        store: FeatureStore | None = None,
        make: bool = True,
        told: str = "",
    ) -> None:
        self.target, self.store, self.make, self.told = target, store, make, told
        # "final" is always there and once, however often the drafters ask for it.
        self.layers = tuple(dict.fromkeys(("final", *layers))) if store is None else store.layers
        self.capacity_bytes = capacity_bytes
        self.bytes = 0
        self._rows: dict[int, Tensor] = {}

    def states(self, rows: Sequence[Tensor], keys: Sequence[int]) -> list[Tensor]:
        """Return the states [T, layers, D] of each row's tokens [T] long."""
        fresh: dict[int, Tensor] = {}
        for tokens, key in zip(rows, keys, strict=True):
            if key not in self._rows and key not in fresh:
                fresh[key] = self._fresh(tokens, key)
        found = [fresh[key] if key in fresh else self._rows[key].to(rows[0].device) for key in keys]
        for key, value in fresh.items():
            size = value.numel() * value.element_size()
            if self.bytes + size <= self.capacity_bytes:
                self._rows[key] = value.to("cpu", copy=True)
                self.bytes += size
        return found

    def _fresh(self, tokens: Tensor, key: int) -> Tensor:
        if self.store is not None and key in self.store:
            return self.store.row(key).to(tokens.device)
        if self.store is not None and not self.make:
            raise ValueError(
                f"{self.store.folder} must hold every row that is read, but lacks one of {len(tokens):,} tokens; set "
                "missing_features to make"
            )
        return row_states(self.target, tokens, self.layers)


class FeatureSource:
    """Turns a collator's batch into a `DraftBatch`.

    layers: what the drafter reads. capacity_bytes: see `KeptRows`; 0 makes features batch by batch, anew every time.
    kept: rows shared with other drafters, or read from a store; it must hold the layers.
    """

    def __init__(
        self,
        target: Target,
        layers: Sequence[FeatureLayer],
        capacity_bytes: int = 0,
        kept: KeptRows | None = None,
    ) -> None:
        self.target = target
        self.layers = tuple(layers)
        if kept is None and capacity_bytes:
            kept = KeptRows(target, layers, capacity_bytes)
        self.kept = kept
        self._made = tuple(dict.fromkeys(("final", *layers)))

    @property
    def capacity_bytes(self) -> int:
        """Memory for features."""
        return 0 if self.kept is None else self.kept.capacity_bytes

    @property
    def bytes(self) -> int:
        """Memory that features take now."""
        return 0 if self.kept is None else self.kept.bytes

    @property
    def bytes_per_token(self) -> int:
        """Memory that keeping one position takes."""
        made = self._made if self.kept is None else self.kept.layers
        return len(made) * self.target.width * self.target.dtype.itemsize

    def forgetful(self) -> FeatureSource:
        """Return a source that does the same and has kept nothing yet, to measure what a new row costs."""
        if self.kept is None:
            return FeatureSource(self.target, self.layers)
        kept = KeptRows(self.target, self.kept.layers, self.kept.capacity_bytes, self.kept.store)
        return FeatureSource(self.target, self.layers, kept=kept)

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Tensor]) -> DraftBatch:
        """Add features and segments to what the collator made; of kept rows, states stand side by side as they do."""
        if self.kept is None:
            return fresh_batch(self.target, inputs, self.layers)
        tokens, mask = inputs["tokens"], inputs["token_mask"]
        starts = (inputs["positions"][mask] == 0).nonzero()[:, 0].tolist()
        rows = tokens[mask].tensor_split(starts[1:])
        found = torch.cat(self.kept.states(rows, inputs["row_keys"].tolist()))
        states = found.new_zeros(*tokens.shape, *found.shape[1:])
        states[mask] = found
        return _with_states(inputs, states, self.kept.layers, self.layers)


def fresh_batch(target: Target, inputs: dict[str, Tensor], layers: Sequence[FeatureLayer]) -> DraftBatch:
    """Have the target read a collator's batch now, with gradients if they are on. layers: what the drafter reads."""
    made = tuple(dict.fromkeys(("final", *layers)))
    tokens, mask = inputs["tokens"], inputs["token_mask"]
    states = target.encode(tokens, mask, made, inputs["positions"], inputs.get("segments")).features
    return _with_states(inputs, states, made, layers)


def _with_states(
    inputs: dict[str, Tensor], states: Tensor, made: Sequence[FeatureLayer], layers: Sequence[FeatureLayer]
) -> DraftBatch:
    """Put states [B, T, layers made, D], "final" first, in the drafter's order."""
    tokens, segments = inputs["tokens"], inputs.get("segments")
    order = [made.index(layer) for layer in layers]
    features = states[:, :, :1] if order == [0] else states[:, :, order]
    return DraftBatch(
        tokens,
        inputs["token_mask"],
        inputs["loss_mask"],
        inputs["positions"],
        torch.zeros_like(tokens) if segments is None else segments,
        features,
        states[:, :, 0],
    )
