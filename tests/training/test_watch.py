"""Steps with numbers that are none are skipped when asked to, unusual gradients are told, every tensor learns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import two_processes as several
from torch import Tensor, nn

from headstart.drafters.registry import METHODS
from headstart.training.checkpoints import find_newest
from headstart.training.command_line import parse
from headstart.training.guards import PATIENCE, LearningCheck
from headstart.training.run import main, run
from headstart.training.trainer import DrafterTrainer
from headstart.training.watch import StepWatch
from headstart.training.watch_arguments import WatchArguments

Flags = Callable[..., list[str]]
WORKER = several.ROOT / "tests" / "support" / "skipping_worker.py"
NO_EVALUATION = ["--eval_strategy", "no", "--eval_prompts", "0", "--held_out_fraction", "0"]
SKIP = [*NO_EVALUATION, "--non_finite", "skip", "--save_strategy", "no"]
ALONE: Any = SimpleNamespace(world_size=1, deepspeed_plugin=None, device=torch.device("cpu"))


def spoiled(numbers: Collection[int], what: str, factor: float = float("nan")) -> Callable[..., Any]:
    """Return a `compute_loss` that multiplies the loss, or a tensor's gradient, in some steps."""
    compute_loss = DrafterTrainer.compute_loss

    def compute(self: DrafterTrainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = compute_loss(self, model, *args, **kwargs)
        if self.state.global_step + 1 not in numbers:
            return loss
        if what == "loss":
            return loss * factor
        handle = model.logit_scale.log.register_hook(lambda gradient: gradient * factor)
        self.callback_handler.add_callback(Unhook(handle))
        return loss

    return compute


class Unhook(StepWatch):
    """Takes a hook away at the end of its step."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.handle.remove()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None: ...


def after_each_step(monkeypatch: pytest.MonkeyPatch) -> list[list[Tensor]]:
    """Return a list that gets the weights and the optimizer's state after each step."""
    seen: list[list[Tensor]] = []
    before = StepWatch.on_step_end

    def note(self: StepWatch, *args: Any, **kwargs: Any) -> None:
        state = [value for one in kwargs["optimizer"].state.values() for value in one.values()]
        seen.append([torch.as_tensor(value).detach().clone() for value in [*kwargs["model"].parameters(), *state]])
        before(self, *args, **kwargs)

    monkeypatch.setattr(StepWatch, "on_step_end", note)
    return seen


def lines(folder: Path, name: str = "loss") -> list[dict[str, Any]]:
    """Return the lines of a run's log that have an entry."""
    state = json.loads((find_newest(folder).newest or folder).joinpath("trainer_state.json").read_text("utf-8"))
    return [line for line in state["log_history"] if name in line]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("clipping", ["1.0", "0"])
def test_skipped_step_leaves_weights_and_optimizer_untouched(
    command: Flags, monkeypatch: pytest.MonkeyPatch, capsys, what: str, clipping: str
) -> None:
    seen = after_each_step(monkeypatch)
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({3}, what))
    run("medusa", command(*SKIP, "--max_steps", "4", "--max_grad_norm", clipping))
    said = capsys.readouterr().out
    assert f"step 3 is skipped: the {what} is not finite (rows r" in said and said.count("is skipped") == 1
    first, second, third, fourth = seen
    assert len(second) == len(third) and all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(third, fourth, strict=True))
    assert all(torch.isfinite(value).all() for value in fourth)


def test_log_counts_skipped_steps_and_leaves_their_loss_out(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*NO_EVALUATION, "--non_finite", "skip", "--save_strategy", "steps", "--save_steps", "6"]
    flags += ["--max_steps", "6", "--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2"]
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({2, 3}, "gradient"))
    run("medusa", command(*flags, output=tmp_path / "each"))
    run("medusa", command(*flags, "--logging_steps", "6", output=tmp_path / "together"))
    each, (together,) = lines(tmp_path / "each"), lines(tmp_path / "together")
    assert [line["step"] for line in each] == [1, 4, 5, 6]
    assert together["loss"] == pytest.approx(sum(line["loss"] for line in each) / 4)
    assert together["skipped_steps"] == 2 and "skipped_steps" not in each[0]
    assert [line["step"] for line in lines(tmp_path / "each", "skipped_steps")] == [2, 3]


def test_so_many_skipped_steps_in_a_row_stop_the_run(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    limited = [*SKIP, "--max_steps", "8", "--non_finite_limit", "2"]
    every = DrafterTrainer.compute_loss
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({2, 4, 6}, "loss"))
    assert main("medusa", command(*limited, output=tmp_path / "now and then")) == 0
    monkeypatch.setattr(DrafterTrainer, "compute_loss", every)
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({2, 4, 5}, "loss"))
    assert main("medusa", command(*limited)) == 1
    error = capsys.readouterr().err
    assert "2 steps in a row (non_finite_limit)" in error and "the last in step 5 (rows r" in error
    assert "the rows stand in" in error


def test_gradient_far_above_the_median_is_told_with_its_rows_and_stops_nothing(
    command: Flags, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({5, 23}, "gradient", 1e5))
    run("medusa", command(*NO_EVALUATION, "--max_steps", "25", "--per_device_train_batch_size", "2"))
    alarms = re.findall(r"step (\d+): the gradient's norm is .*\(rows (r\d+), (r\d+)\)", capsys.readouterr().out)
    assert [step for step, *_ in alarms] == ["23"]  # after 4 steps nothing is unusual yet


def test_alarm_can_be_turned_off(command: Flags, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled({23}, "gradient", 1e5))
    run("medusa", command(*NO_EVALUATION, "--max_steps", "24", "--grad_norm_alarm", "0"))
    assert "times the median" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--non_finite", "ignore"], "invalid choice: 'ignore'"),
        (["--non_finite_limit", "0"], "non_finite_limit must be at least 1, but is 0"),
        (["--grad_norm_alarm", "0.5"], "grad_norm_alarm must be above 1, or 0 for no alarm, but is 0.5"),
    ],
)
def test_impossible_settings_are_refused(command: Flags, flags: list[str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse("medusa", command(*flags))


def test_skipping_is_refused_with_deepspeed_which_steps_by_itself() -> None:
    args: Any = SimpleNamespace(deepspeed_plugin=object(), device="cpu")
    with pytest.raises(ValueError, match="non_finite must be stop with DeepSpeed"):
        StepWatch(WatchArguments(non_finite="skip"), args, [], LearningCheck(lambda: [], lambda: None))


def test_tensor_whose_gradient_stays_zero_is_named(command: Flags, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(DrafterTrainer, "compute_loss", spoiled(range(20), "gradient", 0.0))
    assert main("medusa", command(*NO_EVALUATION, "--max_steps", "4")) == 0
    assert main("medusa", command(*NO_EVALUATION, "--max_steps", "9")) == 1
    assert "the gradient of logit_scale.log was all zero in 5 steps" in capsys.readouterr().err


def steps_of(check: LearningCheck, gradients: list[float], parameter: nn.Parameter) -> None:
    """Show the check a gradient of one value in each step."""
    for value in gradients:
        parameter.grad = torch.full_like(parameter, value)
        check.check(ALONE)


def test_tensor_that_wakes_up_in_time_is_not_named() -> None:
    parameter, labels = nn.Parameter(torch.ones(3)), torch.tensor([4.0, 2.0])
    check = LearningCheck(lambda: [("weight", parameter)], lambda: labels)
    steps_of(check, [0.0] * (PATIENCE - 1) + [1.0] + [0.0] * 2 * PATIENCE, parameter)
    check = LearningCheck(lambda: [("weight", parameter)], lambda: labels)
    with pytest.raises(ValueError, match="the gradient of weight was all zero"):
        steps_of(check, [0.0] * PATIENCE, parameter)


def test_steps_without_a_label_at_some_depth_do_not_count() -> None:
    parameter, labels = nn.Parameter(torch.ones(3)), torch.tensor([4.0, 0.0])
    check = LearningCheck(lambda: [("weight", parameter)], lambda: labels)
    steps_of(check, [0.0] * 3 * PATIENCE, parameter)
    labels[1] = 1
    with pytest.raises(ValueError, match="the gradient of weight was all zero"):
        steps_of(check, [0.0] * PATIENCE, parameter)


def test_tensor_without_a_gradient_is_named_at_once() -> None:
    check = LearningCheck(lambda: [("weight", nn.Parameter(torch.ones(3)))], lambda: None)
    with pytest.raises(ValueError, match="every trained tensor must get a gradient, but weight got none"):
        check.check(ALONE)


@pytest.mark.parametrize(
    "method, flags",
    [*((method, []) for method in sorted(METHODS)), ("hydra", ["--prefix_attention", "true"]),
     ("medusa", ["--train_target", "lora", "--drafter_only_steps", "2"])],
)  # fmt: skip
def test_every_tensor_of_every_method_is_heard_in_time(
    command: Flags, monkeypatch: pytest.MonkeyPatch, method: str, flags: list[str]
) -> None:
    checks: list[LearningCheck] = []
    check = LearningCheck.check
    monkeypatch.setattr(LearningCheck, "check", lambda self, args: (checks.append(self), check(self, args))[1])
    words = command(*NO_EVALUATION, "--save_strategy", "no", "--max_steps", str(PATIENCE + 3), *flags)
    place = words.index("--num_heads")
    run(method, [*words[:place], *words[place + 2 :]])
    assert checks[-1].checked == {name for name, _ in checks[-1].learning()}


@pytest.mark.distributed
def test_processes_skip_the_same_step_when_one_of_them_must(target_folder: Path, tmp_path: Path) -> None:
    done = several.launched("ddp", WORKER, str(target_folder), str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("step 2 is skipped: the loss is not finite (rows r") == 1
    assert f"process {several.PROCESSES - 1}: step 2 is skipped" in done.stdout
    first, *others = (torch.load(tmp_path / f"steps-{rank}.pt") for rank in range(several.PROCESSES))
    assert torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
