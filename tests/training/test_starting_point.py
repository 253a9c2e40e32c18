"""A run that starts from a drafter has its weights and its vocabulary, and refuses what it cannot start from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headstart import AutoDrafter
from headstart.training.run import main, run

Flags = Callable[..., list[str]]


@pytest.fixture
def start(command: Flags, tmp_path: Path) -> Path:
    """A drafter with a draft vocabulary, as a first run leaves it."""
    return run("medusa", command("--draft_vocab_size", "24", "--num_train_epochs", "1", output=tmp_path / "start"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_run_begins_with_the_weights_and_the_vocabulary_of_the_other(command, start, capsys):
    still = run("medusa", command("--start_from", str(start), "--learning_rate", "0"))
    before, after = weights(start), weights(still)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    config = AutoDrafter.from_pretrained(still).config
    assert config.draft_vocab_size == 24 and config.training_data["started_from"] == "start"
    assert json.loads((still / "run.json").read_text(encoding="utf-8"))["identity"]["start_from"] == str(start)


def test_run_goes_on_learning_with_another_loss(command, start):
    further = run("medusa", command("--start_from", str(start), "--loss", "ce", "--draft_vocab_size", "24"))
    before, after = weights(start), weights(further)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert AutoDrafter.from_pretrained(further).config.loss == "ce"


def test_target_joins_a_trained_drafter(command, start, tmp_path, capsys):
    joint = ["--start_from", str(start), "--train_target", "lora", "--lora_r", "2", "--drafter_only_steps", "0"]
    folder = run("medusa", command(*joint, output=tmp_path / "joint"))
    assert AutoDrafter.from_pretrained(folder).config.adapted_target is not None
    assert main("medusa", command("--start_from", str(folder), output=tmp_path / "third")) == 1
    assert "was trained with a target that changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "flags", "told"),
    [
        ("hydra", [], "start_from must be a drafter of method hydra"),
        ("medusa", ["--draft_vocab_size", "20"], "draft_vocab_size must be that of start_from, 24, but is 20"),
        ("medusa", ["--num_heads", "1"], "must have the weights of start_from, but"),
        ("medusa", ["--num_layers", "3"], "take the settings of its config.json"),
    ],
)
def test_what_a_run_cannot_start_from_is_told(command, start, capsys, tmp_path, method, flags, told):
    assert main(method, command("--start_from", str(start), *flags)) == 1
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_another_start_is_another_run(command, start, tmp_path, capsys):
    run("medusa", command("--draft_vocab_size", "24"))
    assert main("medusa", command("--start_from", str(start))) == 1
    assert "holds another run" in capsys.readouterr().err


def test_missing_start_is_told_before_anything_is_written(command, tmp_path, capsys):
    assert main("medusa", command("--start_from", str(tmp_path / "nowhere"))) == 1
    assert "nowhere" in capsys.readouterr().err and not (tmp_path / "run").exists()
