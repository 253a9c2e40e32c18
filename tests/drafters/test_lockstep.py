"""Every process makes as many module calls as the others, whatever its rows hold: under ZeRO-3 others would wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import two_processes as several
from tiny_batches import batch_of, scrambled
from tiny_targets import tiny_target

from headstart.drafters.base import DraftBatch
from headstart.drafters.modules import BLOCKS
from headstart.drafters.registry import METHODS, new_drafter

WORKER = several.ROOT / "tests" / "support" / "counting_worker.py"


@pytest.mark.distributed
def test_losses_make_as_many_module_calls_in_every_process(tmp_path: Path) -> None:
    if torch.accelerator.is_available():
        pytest.skip("these processes are for CPUs")
    done = several.launched("ddp", WORKER, str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert len(first) == 2 * len(METHODS)
    assert first == second


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_row_shorter_than_the_blocks_of_later_steps_costs_what_it_costs_with_padding(method: str) -> None:
    target = tiny_target("llama")
    drafter = scrambled(new_drafter(method, target))
    short = batch_of(target, drafter, rows=1, length=BLOCKS - 1)
    more = (0, 2 * BLOCKS)
    padded = DraftBatch(
        F.pad(short.tokens, more),
        F.pad(short.token_mask, more),
        F.pad(short.loss_mask, more),
        F.pad(short.positions, more),
        F.pad(short.segments, more),
        F.pad(short.features, (0, 0, 0, 0, *more)),
        F.pad(short.final, (0, 0, *more)),
    )
    found, wanted = drafter(short, target).sums, drafter(padded, target).sums
    torch.testing.assert_close(found, wanted)
    assert bool(found.any())
