"""Which rows stand together: an order for training that is the same for any number of processes, and lockstep batches.

Every process runs the same number of batches, and each row counts once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.utils.data import Sampler
from transformers import TrainingArguments

from ..distill.dataset import TokenDataset, TokenRow


class PaddableRows(TokenDataset):
    """Rows to train on; entry ~i is row i without its trained tokens, to fill up a batch without training it twice."""

    def __getitem__(self, index: int) -> TokenRow:
        if index >= 0:
            return self.rows[index]
        row = self.rows[~index]
        return replace(row, loss_mask=np.zeros_like(row.loss_mask))


class StepSampler(Sampler[int]):
    """Draws the rows of each optimizer step; what a step holds does not depend on batches and processes.

    The order depends on the seed and the epoch alone, so a resumed run sees the same rows.

    lengths: tokens of each row. rows_per_step: rows of one optimizer step over all processes.
    rows_per_round: rows of one batch of every process; the last round of an epoch is filled up with entries ~i, see
        `PaddableRows`. 1 leaves it as it is, for one process.
    strategy: "random", "sequential", or "group_by_length": random steps, each sorted by length into its batches, so
        that little is padded.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows_per_step: int,
        seed: int,
        rows_per_round: int = 1,
        strategy: str = "group_by_length",
    ) -> None:
        self.lengths = lengths
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.rows_per_round = rows_per_round
        self.strategy = strategy
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths) + self._missing

    @property
    def _missing(self) -> int:
        return -len(self.lengths) % self.rows_per_round

    def __iter__(self) -> Iterator[int]:
        order = list(range(len(self.lengths)))
        if self.strategy != "sequential":
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        shortest = min(range(len(order)), key=lambda i: self.lengths[i])
        for begin in range(0, len(order), self.rows_per_step):
            step = order[begin : begin + self.rows_per_step]
            yield from sorted(step, key=lambda i: -self.lengths[i]) if self.strategy == "group_by_length" else step
        yield from [~shortest] * self._missing


def step_sampler(lengths: Sequence[int], args: TrainingArguments) -> StepSampler:
    """Return the order of rows that training arguments ask for."""
    rows_per_round = args.train_batch_size * args.world_size
    seed = args.seed if args.data_seed is None else args.data_seed
    return StepSampler(
        lengths,
        rows_per_round * args.gradient_accumulation_steps,
        seed,
        rows_per_round if args.world_size > 1 else 1,
        args.train_sampling_strategy,
    )


def lockstep_batches(
    rows: Sequence[TokenRow], batch_size: int, process: int, processes: int
) -> list[tuple[list[TokenRow], bool]]:
    """Deal rows out to processes so that all run the same number of batches, and each row counts once.

    Returns this process's batches and whether each counts: a process without rows left repeats one that does not.
    """
    ordered = sorted(rows, key=lambda row: -len(row.input_ids))
    batches = [ordered[begin : begin + batch_size] for begin in range(0, len(ordered), batch_size)]
    rounds = -(-len(batches) // processes)
    mine = [r * processes + process for r in range(rounds)]
    return [(batches[i], True) if i < len(batches) else (batches[-1], False) for i in mine]
