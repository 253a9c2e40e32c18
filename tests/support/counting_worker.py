"""Counts the module calls of a loss in however many processes it was started; see tests/drafters/test_lockstep."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tiny_batches import batch_of, scrambled
from tiny_targets import VOCAB, tiny_target
from torch import nn

from headstart.drafters import losses
from headstart.drafters.base import DraftBatch, Drafter
from headstart.drafters.registry import METHODS, new_drafter
from headstart.inference.target import Target
from headstart.training.processes import join_processes

LABELS_A_CHUNK = 2


def calls_of(drafter: Drafter, target: Target, batch: DraftBatch) -> int:
    """Return how many module calls the loss makes and, in training, its backward pass."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    modules = {*drafter.modules(), *target.model.modules()}
    handles = [module.register_forward_hook(count) for module in modules if isinstance(module, nn.Module)]
    loss = drafter(batch, target).loss
    assert loss is not None
    if drafter.training:
        loss.backward()
    for handle in handles:
        handle.remove()
    return calls[0]


def main(folder: str) -> None:
    """Give the first process four long rows, the second a short one; write what each has called, by method and mode."""
    join_processes()
    rank = torch.distributed.get_rank()
    target, found = tiny_target("llama"), {}
    for method in sorted(METHODS):
        drafter = scrambled(new_drafter(method, target))
        losses.CHUNK_BYTES = LABELS_A_CHUNK * 4 * VOCAB * drafter.draft_depth
        batch = batch_of(target, drafter, rows=1, length=3) if rank else batch_of(target, drafter)
        for training in (True, False):
            found[f"{method}, training={training}"] = calls_of(drafter.train(training), target, batch)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
