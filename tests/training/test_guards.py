"""A stop signal saves; numbers that are none stop the run before anything is saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.training.checkpoints import find_newest
from headstart.training.guards import EXIT_STOPPED
from headstart.training.run import main, run
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]
NO_EVALUATION = ["--eval_strategy", "no", "--eval_prompts", "0"]


def test_sigterm_saves_a_checkpoint_and_leaves_with_a_status_of_its_own(
    command: Flags, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*NO_EVALUATION, "--max_steps", "6", "--save_strategy", "epoch"]
    whole = load_file(run("medusa", command(*flags, output=tmp_path / "whole")) / "model.safetensors")
    step = DrafterTrainer.training_step
    handler = signal.getsignal(signal.SIGTERM)

    def told_to_stop(self: DrafterTrainer, *args: Any) -> torch.Tensor:
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(DrafterTrainer, "training_step", told_to_stop)
        assert main("medusa", command(*flags)) == EXIT_STOPPED == 75
    assert "stopped by SIGTERM after step 2, saved as checkpoint-2" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is handler
    assert find_newest(tmp_path / "run").newest == tmp_path / "run" / "checkpoint-2"
    assert main("medusa", command(*flags)) == 0
    resumed = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def broken_in_step(number: int, what: str) -> Callable[..., Any]:
    """Return a training step that spoils the loss, a gradient or a weight of one step."""
    compute_loss = DrafterTrainer.compute_loss

    def spoiled(self: DrafterTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, model, *args, **kwargs)
        if self.state.global_step + 1 == number and what == "loss":
            return loss * float("nan")
        if self.state.global_step + 1 == number:
            model.logit_scale.log.register_hook(lambda grad: grad * float("inf"))
        return loss

    return spoiled


@pytest.mark.parametrize(
    "what, told", [("loss", "the loss must be finite, but is nan"), ("gradient", "the norm of the gradient must be")]
)
@pytest.mark.parametrize("clipping", ["1.0", "0"])
def test_number_that_is_none_names_step_rows_and_places_and_saves_nothing(
    command: Flags, answers_file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, what: str, told: str,
    clipping: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(DrafterTrainer, "compute_loss", broken_in_step(2, what))
    flags = [*NO_EVALUATION, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "1"]
    flags += ["--per_device_train_batch_size", "1", "--max_grad_norm", clipping]
    assert main("medusa", command(*flags)) == 1
    error = capsys.readouterr().err
    assert told in error and "in step 2 (rows r" in error and "lower learning_rate" in error
    row = int(error.partition("(rows r")[2].partition(")")[0])
    assert f"the rows stand in {answers_file}, line {row + 1}" in error
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]
    assert find_newest(tmp_path / "run").newest is not None


def test_weights_that_are_no_numbers_are_not_saved(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = DrafterTrainer.training_step

    def spoiled(self: DrafterTrainer, *args: Any) -> torch.Tensor:
        loss = step(self, *args)
        if self.state.global_step == 1:  # after the loss of step 2 was found good
            self.drafter.get_parameter("projections.1.weight").data[3, 3] = float("nan")
        return loss

    monkeypatch.setattr(DrafterTrainer, "training_step", spoiled)
    flags = [*NO_EVALUATION, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "1"]
    with pytest.raises(ValueError, match=r"every weight must be finite, but those of projections\.1\.weight are not"):
        run("medusa", command(*flags))
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-1"]


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "must hold at least one row, but there is none"),
        ('{"id": "a", "prompt_ids": [1, 5], "answer_ids": []}\n', "must hold a row with a trained token"),
    ],
    ids=["empty", "masked"],
)
def test_data_without_anything_to_learn_is_refused(
    command: Flags, tmp_path: Path, capsys, text: str, told: str
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text, encoding="utf-8")
    assert main("medusa", command("--train_data", str(data))) == 1
    assert told in capsys.readouterr().err
