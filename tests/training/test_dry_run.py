"""`--dry_run` runs everything once and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.cli import main as cli
from headstart.training.run import main
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]


def everything_below(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_dry_run_takes_a_step_measures_and_writes_nothing(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    steps: list[int] = []
    step = DrafterTrainer.training_step

    def counted(self: DrafterTrainer, model: Any, inputs: Any, count: Any = None) -> torch.Tensor:
        steps.append(len(inputs["tokens"]))
        return step(self, model, inputs, count)

    monkeypatch.setattr(DrafterTrainer, "training_step", counted)
    before = everything_below(tmp_path)
    flags = ["--dry_run", "--gradient_accumulation_steps", "2", "--save_total_limit", "1", "--num_train_epochs", "9"]
    assert main("medusa", command(*flags)) == 0
    said = capsys.readouterr().out
    assert steps == [4] and everything_below(tmp_path) == before and not (tmp_path / "run").exists()
    assert "steps         18 (9.00 epochs)" in said  # of the run, not of this one
    assert "a checkpoint, 2 of them at most at one time" in said
    assert "one step on the 4 longest rows, up to 20 tokens" in said
    assert "evaluated 4 held-out rows, generated 6 tokens for 1 prompts" in said
    assert "nothing was written" in said and "saved the drafter" not in said


def test_dry_run_does_not_touch_a_run_that_is_there(command: Flags, tmp_path: Path, capsys) -> None:
    assert main("medusa", command("--max_steps", "1")) == 0
    before = {path: path.stat().st_mtime_ns for path in everything_below(tmp_path)}
    assert main("medusa", command("--max_steps", "3", "--dry_run")) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in everything_below(tmp_path)} == before


def test_dry_run_finds_weights_that_one_step_breaks(command: Flags, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def spoiling(self: torch.optim.Optimizer, *_: object, **__: object) -> None:
        self.param_groups[0]["params"][0].data.fill_(float("nan"))

    monkeypatch.setattr(torch.optim.AdamW, "step", spoiling)
    assert main("medusa", command("--dry_run")) == 1
    assert "every weight must be finite" in capsys.readouterr().err


def test_dry_run_of_several_drafters_tries_each(command: Flags, tmp_path: Path, capsys) -> None:
    config = tmp_path / "medusa.yaml"
    config.write_text("num_heads: 2\n", encoding="utf-8")
    other = tmp_path / "medusa_more.yaml"
    other.write_text("num_layers: 2\n", encoding="utf-8")
    before = everything_below(tmp_path)
    words = ["train", "--drafters", f"{config},{other}", *command("--feature_cache_gb", "0.1", "--dry_run")]
    assert cli(words) == 0
    assert capsys.readouterr().out.count("one step on the 4 longest rows") == 2
    assert everything_below(tmp_path) == before


def test_dry_run_of_joint_training_has_the_target_learn(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[bool] = []
    step = DrafterTrainer.training_step

    def noted(self: DrafterTrainer, *args: object) -> torch.Tensor:
        loss = step(self, *args)  # type: ignore[arg-type]
        assert self.joint is not None
        learned.append(self.joint.target_learns)
        return loss

    monkeypatch.setattr(DrafterTrainer, "training_step", noted)
    assert main("medusa", command("--dry_run", "--train_target", "full", "--max_steps", "9")) == 0
    assert learned == [True]
