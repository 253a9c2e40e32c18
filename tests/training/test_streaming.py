"""Training on rows that stay on the disk is training on rows in memory, to the bit, without holding them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback

from headstart.distill.dataset import Collator, TokenDataset, TokenRow, split_held_out
from headstart.distill.row_cache import load_mapped
from headstart.drafters.registry import new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training.arguments import DrafterTrainingArguments, EvaluationArguments
from headstart.training.curves import read_history
from headstart.training.run import run
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]
LOSSES = ("step", "loss", "grad_norm", "accuracy_by_depth", "tokens_per_step")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize("packing", [[], ["--packing"]], ids=["padded", "packed"])
def test_streamed_run_equals_the_one_in_memory_to_the_bit(
    command: Flags, tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: list[str]
) -> None:
    flags = ["--draft_vocab_size", "24", "--num_train_epochs", "1", *packing]
    held, streamed = (
        run("medusa", command(*flags, *more, output=tmp_path / name))
        for name, more in (("held", []), ("streamed", ["--streaming"]))
    )
    assert "tokenised rows written in" in capsys.readouterr().out
    one, other = (load_file(folder / "model.safetensors") for folder in (held, streamed))
    assert all(torch.equal(one[name], other[name]) for name in one)
    lines = [[{k: line[k] for k in LOSSES if k in line} for line in lines_of(folder)] for folder in (held, streamed)]
    assert lines[0] == lines[1] and any("tokens_per_step" in line for line in lines[0])
    run("medusa", command(*flags, "--max_steps", "6", output=streamed))  # the same data, so it goes on in memory
    assert "with other settings (max_steps, streaming)" in capsys.readouterr().out


def lines_of(folder: Path) -> list[dict[str, Any]]:
    history = read_history(folder)
    return [*history["training"], *history["evaluations"]]


class Counted(TrainerCallback):
    """Counts the rows that are in memory after each step."""

    def __init__(self) -> None:
        self.most = 0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.most = max(self.most, sum(type(one) is TokenRow for one in gc.get_objects()))


def test_no_more_rows_are_in_memory_than_a_step_takes(target_folder: Path, answers_file: Path, tmp_path: Path) -> None:
    target = Target(load_target(str(target_folder))[0])
    rows, _ = load_mapped([str(answers_file)], AutoTokenizer.from_pretrained(target_folder))
    train, held_out = (TokenDataset(part, rows.report) for part in split_held_out(rows.rows, 0.2))
    args = DrafterTrainingArguments(
        output_dir=str(tmp_path / "run"), report_to="none", disable_tqdm=True, use_cpu=True, max_steps=8,
        per_device_train_batch_size=2, eval_strategy="steps", eval_steps=4, save_strategy="no",
    )  # fmt: skip
    counted, drafter = Counted(), new_drafter("medusa", target, num_heads=2)
    gc.collect()
    before = sum(type(one) is TokenRow for one in gc.get_objects())
    trainer = DrafterTrainer(
        drafter, target, args, Collator(2), train, held_out, EvaluationArguments(2, 6, 8), [2], callbacks=[counted]
    )
    trainer.train()
    assert trainer.figures is not None and counted.most - before <= 4 < len(train)
