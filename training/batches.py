"""Which rows stand together: an order for training that is the same for any number of processes, and lockstep batches.

Every process runs the same number of batches, and each row counts once. Where rows are packed, those of a step share
the sequences of its batches; which rows make a step, and in how many batches, stays the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments

from ..core.shapes import rounded_up
from ..distill.dataset import TokenDataset, TokenRow

Entry = int | tuple[int, ...]
"""What a sequence of a batch holds: a row, or the rows that share it (none: the batch has a sequence less)."""


class PaddableRows(TokenDataset):
    """Rows to train on; entry ~i is row i without its trained tokens, to fill up a batch without training it twice.

    sampler: draws their order.
    """

    sampler: StepSampler | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; accelerate's loaders call it.

        They find a sampler only behind two wrappers, and it stands behind three where one of several processes goes on
        within an epoch: it would draw the first epoch's order again.
        """
        if self.sampler is not None:
            self.sampler.set_epoch(epoch)

    def __getitem__(self, entry: Entry) -> TokenRow | list[TokenRow]:
        if not isinstance(entry, int):
            return [self._row(index) for index in entry]
        return self._row(entry)

    def _row(self, index: int) -> TokenRow:
        if index >= 0:
            return self.rows[index]
        row = self.rows[~index]
        return replace(row, loss_mask=np.zeros_like(row.loss_mask))


class StepSampler(Sampler[Entry]):
    """Draws the rows of each optimizer step; what a step holds does not depend on batches and processes.

    The order depends on the seed and the epoch alone, so a resumed run sees the same rows.

    lengths: tokens of each row. rows_per_step: rows of one optimizer step over all processes.
    rows_per_round: rows of one batch of every process; the last round of an epoch is filled up with entries ~i, see
        `PaddableRows`. 1 leaves it as it is, for one process.
    strategy: "random", "sequential", or "group_by_length": random steps, each sorted by length into its batches, so
        that little is padded.
    batch_size, packed_length: rows of a batch, and the tokens that a sequence may hold of several rows; see `packed`.
        None leaves each row a sequence of its own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows_per_step: int,
        seed: int,
        rows_per_round: int = 1,
        strategy: str = "group_by_length",
        batch_size: int = 1,
        packed_length: int | None = None,
    ) -> None:
        self.lengths = lengths
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.rows_per_round = rows_per_round
        self.strategy = strategy
        self.batch_size = batch_size
        self.packed_length = packed_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) + self._missing

    @property
    def _missing(self) -> int:
        return -len(self.lengths) % self.rows_per_round

    def __iter__(self) -> Iterator[Entry]:
        for step in self._steps():
            if self.packed_length is not None:
                yield from packed(step, self.lengths, self.batch_size, self.packed_length)
            elif self.strategy == "group_by_length":
                yield from sorted(step, key=lambda i: (i < 0, -self.lengths[i]))
            else:
                yield from step

    def _steps(self) -> Iterator[list[int]]:
        """Yield the rows of each step; the last one has the entries ~i that fill up its last round."""
        order = list(range(len(self.lengths)))
        if self.strategy != "sequential":
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        shortest = min(range(len(order)), key=lambda i: self.lengths[i])
        for begin in range(0, len(order), self.rows_per_step):
            step = order[begin : begin + self.rows_per_step]
            yield step if begin + self.rows_per_step < len(order) else step + [~shortest] * self._missing


def step_sampler(lengths: Sequence[int], args: TrainingArguments, packed_length: int | None = None) -> StepSampler:
    """Return the order of rows that training arguments ask for. packed_length: see `StepSampler`."""
    rows_per_round = args.train_batch_size * args.world_size
    seed = args.seed if args.data_seed is None else args.data_seed
    return StepSampler(
        lengths,
        rows_per_round * args.gradient_accumulation_steps,
        seed,
        rows_per_round if args.world_size > 1 else 1,
        args.train_sampling_strategy,
        args.train_batch_size,
        packed_length,
    )


def packed(
    step: Sequence[int], lengths: Sequence[int], batch_size: int, packed_length: int
) -> Iterator[tuple[int, ...]]:
    """Deal the rows of a step out to the sequences of its batches, so that as few positions as possible are padding.

    Every batch has the same number of sequences, up to `batch_size`. They are filled from the longest row on, each row
    going where the fewest tokens are, so they become about equally long; of the numbers that leave no sequence with
    more than `packed_length` tokens the one with the fewest positions is taken, of equals the one with the shortest
    sequences (attention costs their square). One row a sequence is among the choices: packing never costs positions.

    step: rows, and after them entries ~i without trained tokens, of which as many stay as batches would be empty.

    Yields as many entries as the step has, empty ones included, so that neither the number of batches nor the place in
    an epoch depends on packing.
    """
    rows = sorted((i for i in step if i >= 0), key=lambda i: -lengths[i])
    sizes = [min(batch_size, len(step) - begin) for begin in range(0, len(step), batch_size)]
    rows += [i for i in step if i < 0][: max(0, len(sizes) - len(rows))]
    best: tuple[int, list[list[Filled]]] | None = None
    for most in range(1, batch_size + 1):
        places = _shared_out([min(most, size) for size in sizes], len(rows))
        sequences = _filled(rows, lengths, sum(places))
        if sequences[0][0] > packed_length and len(sequences) < len(rows):
            continue
        left = iter(sequences)
        batches = [list(islice(left, count)) for count in places]
        positions = sum(len(batch) * rounded_up(batch[0][0]) for batch in batches)
        if best is None or positions <= best[0]:
            best = positions, batches
    assert best is not None, "one row a sequence is always possible"
    for size, batch in zip(sizes, best[1], strict=True):
        yield from (tuple(sequence) for _, sequence in batch)
        yield from [()] * (size - len(batch))


def _shared_out(places: list[int], rows: int) -> list[int]:
    """Take places away from the batches that have the most until there are no more than rows."""
    places = list(places)
    for _ in range(sum(places) - rows):
        places[places.index(max(places))] -= 1
    return places


Filled = tuple[int, list[int]]
"""How many tokens a sequence holds, and of which rows."""


def _filled(rows: Sequence[int], lengths: Sequence[int], count: int) -> list[Filled]:
    """Put rows, the longest first, one after the other where the fewest tokens are; return the fullest first."""
    heap: list[tuple[int, int]] = [(0, place) for place in range(count)]
    sequences: list[list[int]] = [[] for _ in range(count)]
    for i in rows:
        total, place = heap[0]
        heapq.heapreplace(heap, (total + int(lengths[i if i >= 0 else ~i]), place))
        sequences[place].append(i)
    return [(total, sequences[place]) for total, place in sorted(heap, key=lambda pair: (-pair[0], pair[1]))]


def lockstep_batches(
    lengths: Sequence[int], batch_size: int, process: int, processes: int
) -> list[tuple[list[int], bool]]:
    """Deal rows out to processes so that all run the same number of batches, and each row counts once.

    lengths: tokens of each row. Returns this process's batches and whether each counts: a process without rows left
    repeats one that does not.
    """
    ordered = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches = [ordered[begin : begin + batch_size] for begin in range(0, len(ordered), batch_size)]
    rounds = -(-len(batches) // processes)
    mine = [r * processes + process for r in range(rounds)]
    return [(batches[i], True) if i < len(batches) else (batches[-1], False) for i in mine]
