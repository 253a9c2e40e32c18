"""Which rows stand together: an order with little padding for training, and batches in lockstep for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from ..distill.dataset import TokenRow


class StepGroupedSampler(Sampler[int]):
    """Draws each optimizer step's rows at random and sorts them by length, so that its batches are padded little.

    Every step is a random sample of the data, whatever the lengths, and does not depend on how the step is cut into
    batches and processes. The order depends on the seed and the epoch alone, so a resumed run sees the same rows.

    lengths: tokens of each row. rows_per_step: rows of one optimizer step over all processes.
    """

    def __init__(self, lengths: Sequence[int], rows_per_step: int, seed: int) -> None:
        self.lengths = lengths
        self.rows_per_step = rows_per_step
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order; called by the data loader before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        for begin in range(0, len(order), self.rows_per_step):
            yield from sorted(order[begin : begin + self.rows_per_step], key=lambda i: -self.lengths[i])


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
