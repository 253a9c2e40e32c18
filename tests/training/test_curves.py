"""Learning curves go on where a run goes on, and the best checkpoint can be the one with most tokens per step."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart.cli import main as cli
from headstart.training.curves import history_of, read_history
from headstart.training.run import main, run
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]
EVERY_STEP = ["--eval_strategy", "steps", "--eval_steps", "1", "--save_strategy", "steps", "--save_steps", "1"]
needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")


def test_history_sorts_lines_by_kind_and_figures_by_depth() -> None:
    log = [
        {"loss": 2.0, "accuracy_depth_1": 0.5, "accuracy_depth_2": 0.25, "epoch": 0.5, "step": 1},
        {"eval_loss": 1.5, "eval_accuracy_depth_1": 0.6, "eval_tokens_per_step": 1.8, "epoch": 0.5, "step": 1},
        {"eval_loss": 9.9, "epoch": 0.5, "step": 1},
        {"train_loss": 2.0, "train_runtime": 3.0, "epoch": 1.0, "step": 2},
    ]
    assert history_of(log) == {
        "training": [{"step": 1, "epoch": 0.5, "loss": 2.0, "accuracy_by_depth": [0.5, 0.25]}],
        "evaluations": [{"step": 1, "epoch": 0.5, "loss": 1.5, "accuracy_by_depth": [0.6], "tokens_per_step": 1.8}],
    }


def test_history_of_a_run_that_went_on_is_whole(command: Flags, tmp_path: Path) -> None:
    flags = [*EVERY_STEP, "--no_plot", "--save_total_limit", "9"]
    folder = run("medusa", command(*flags, "--max_steps", "4"))
    whole = read_history(folder)
    assert [one["step"] for one in whole["training"]] == [one["step"] for one in whole["evaluations"]] == [1, 2, 3, 4]
    assert all(one["tokens_per_step"] >= 1 and len(one["acceptance_by_depth"]) == 2 for one in whole["evaluations"])
    went_on = tmp_path / "went on"
    shutil.copytree(folder / "checkpoint-2", went_on / "checkpoint-2")
    run("medusa", command(*flags, "--max_steps", "4", output=went_on))

    def without_times(history: dict[str, Any]) -> list[dict[str, Any]]:
        lines = [*history["training"], *history["evaluations"]]
        return [{k: v for k, v in line.items() if "second" not in k} for line in lines]

    assert without_times(read_history(went_on)) == without_times(whole)


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_best_checkpoint_is_the_one_with_most_tokens_per_step(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    measured, figures = DrafterTrainer._measure, iter([1.9, 1.4, 1.5, 1.9])

    def rising_and_falling(self: DrafterTrainer, rows: Any) -> dict[str, float]:
        return measured(self, rows) | {"tokens_per_step": next(figures), "loss": 5.0 - self.state.global_step}

    monkeypatch.setattr(DrafterTrainer, "_measure", rising_and_falling)
    flags = [
        "--metric_for_best_model",
        "tokens_per_step",
        "--load_best_model_at_end",
        "true",
        "--save_total_limit",
        "2",
    ]
    flags += ["--save_strategy", strategy, "--save_steps", "2", "--eval_steps", "2", "--max_steps", "5"]
    folder = run("medusa", command(*EVERY_STEP, *flags))
    best, saved = load_file(folder / "checkpoint-2" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in saved.items())
    assert next(figures, None) is None  # the best weights were measured once more: no point of the curve
    curve = [(one["step"], one["tokens_per_step"]) for one in read_history(folder)["evaluations"]]
    assert curve == [(2, 1.9), (4, 1.4), (5, 1.5)]
    if strategy == "steps":
        last = load_file(folder / "checkpoint-5" / "model.safetensors")
        assert not all(torch.equal(best[name], value) for name, value in last.items())


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--metric_for_best_model", "tokens_per_step", "--eval_prompts", "0"], "but eval_prompts is 0"),
        (["--metric_for_best_model", "tokens_per_step", "--greater_is_better", "false"], "greater_is_better must be"),
        (["--metric_for_best_model", "speed"], "must be a figure of the evaluation (loss, "),
    ],
)
def test_best_checkpoint_by_what_is_not_measured_is_refused(
    command: Flags, flags: list[str], told: str, capsys
) -> None:
    assert main("medusa", command("--max_steps", "1", *EVERY_STEP, "--load_best_model_at_end", "true", *flags)) == 1
    assert told in capsys.readouterr().err


@needs_matplotlib
def test_curves_are_drawn_at_the_end_and_for_several_runs_when_asked(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    first, second = (
        run("medusa", command("--max_steps", "2", "--plot", flag, output=tmp_path / flag)) for flag in ("true", "false")
    )
    assert (first / "curves.png").stat().st_size > 5000 and not (second / "curves.png").exists()
    monkeypatch.chdir(tmp_path)
    assert cli(["train", "--plot", str(first), str(second)]) == 0
    assert capsys.readouterr().out.endswith("curves.png\n") and (tmp_path / "curves.png").is_file()
    assert cli(["train", "--plot", str(second)]) == 0
    assert (second / "curves.png").is_file()


def test_plot_of_what_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert cli(["train", "--plot"]) == 2
    assert cli(["train", "--plot", str(tmp_path)]) == 1
    assert "must be the output_dir of a run, with its history.json" in capsys.readouterr().err
    (tmp_path / "history.json").write_text(json.dumps({"training": []}), encoding="utf-8")
    assert cli(["train", "--plot", str(tmp_path)]) == 1
    assert "must be the history of a run, but cannot be read" in capsys.readouterr().err
