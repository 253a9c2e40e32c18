"""The floor of a step: the products of a pass, each once however the loss cuts it, and called again; and its script."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headstart.core.shapes import rounded_up
from headstart.distill.dataset import TokenDataset
from headstart.drafters import losses
from headstart.training.command_line import parse
from headstart.training.floor import Call, Products, again, products_of
from headstart.training.run import build, load, make_trainer, read_rows
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "throughput.py"
HEADS, WIDTH, VOCABULARY = 2, 16, 48


@pytest.fixture
def trainer(command: Flags) -> DrafterTrainer:
    settings = parse("medusa", command())
    loaded = load(settings)
    rows = read_rows(settings, loaded.tokenizer)
    drafter = build(settings, loaded.target, loaded.tokenizer, rows, None)
    return make_trainer(settings, drafter, loaded.target, rows, loaded.tokenizer, loaded.eos)


def batch_of(trainer: DrafterTrainer) -> dict[str, Tensor]:
    trainer.drafter.train()
    assert isinstance(trainer.train_dataset, TokenDataset)
    return trainer.collator(trainer.train_dataset.rows)


def multiplications(calls: Sequence[Call]) -> int:
    """Count those of matrix products without a batch dimension."""
    assert all(call.function.name() in ("aten::mm", "aten::addmm") for call in calls)
    return sum(prod(call.args[-2].shape) * call.args[-1].shape[1] for call in calls)


@pytest.mark.parametrize("chunk_bytes", [losses.CHUNK_BYTES, 8_000], ids=["whole", "in chunks"])
def test_products_are_those_of_the_equations_and_none_twice(
    trainer: DrafterTrainer, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    inputs = batch_of(trainer)
    labels = rounded_up(int(inputs["loss_mask"].sum()))
    # Of a head: forward, the gradient of what it reads and that of its weights; the states need none.
    heads = HEADS * (3 * WIDTH * VOCABULARY + 2 * WIDTH * WIDTH)
    law = WIDTH * VOCABULARY
    calls = products_of(trainer, inputs)
    assert multiplications(calls) == labels * (heads + law)
    assert (len(calls) > 5 * HEADS + 1) == (chunk_bytes == 8_000)


def test_noting_leaves_gradients_and_random_numbers_as_they_were(trainer: DrafterTrainer) -> None:
    before = torch.get_rng_state()
    products_of(trainer, batch_of(trainer))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in trainer.drafter.parameters())


def test_products_are_called_again_in_their_order_on_tensors_alike(trainer: DrafterTrainer) -> None:
    calls = products_of(trainer, batch_of(trainer))
    run = again(calls)
    with torch.no_grad(), Products() as noted:
        run()
    assert len(noted.calls) == len(calls)
    for one, other in zip(calls, noted.calls, strict=True):
        assert one.function is other.function
        assert [(place.shape, place.stride, place.dtype) for place in one.args] == [
            (place.shape, place.stride, place.dtype) for place in other.args
        ]


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_attention_counts_both_ways(command: Flags, method: str) -> None:
    flags = command()
    at = flags.index("--num_heads")
    settings = parse(method, [*flags[:at], *flags[at + 2 :]])
    loaded = load(settings)
    rows = read_rows(settings, loaded.tokenizer)
    drafter = build(settings, loaded.target, loaded.tokenizer, rows, None)
    trainer = make_trainer(settings, drafter, loaded.target, rows, loaded.tokenizer, loaded.eos)
    calls = products_of(trainer, batch_of(trainer))
    names = [call.function.name() for call in calls]
    kernels = [name for name in names if "scaled_dot_product" in name]
    backward = [name for name in kernels if "backward" in name]
    assert backward and len(kernels) == 2 * len(backward)
    again(calls)()


@pytest.mark.slow
def test_script_measures_a_family_from_the_fly_and_says_where_time_goes(
    target_folder: Path, answers_file: Path
) -> None:
    flags = ["--families", "medusa", "--target", str(target_folder), "--dtype", "float32", "--device", "cpu"]
    flags += ["--steps", "2", "--rounds", "2", "--json", "--", "--train_data", str(answers_file)]
    flags += ["--draft_vocab_size", "24", "--gradient_accumulation_steps", "2"]
    done = subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert 0 < found["share_least"] <= found["share"] <= found["share_most"] < 1.5
    assert sum(found["parts"].values()) == pytest.approx(1) and all(share > 0 for share in found["parts"].values())
    assert 0 < found["floor_target"] < 1 and found["peak_bytes"] > 10**7
    assert found["share"] == pytest.approx(found["tokens_per_second"] / found["floor_tokens_per_second"], rel=0.9)
