"""Joint training in several processes gives what one process gives, goes on, and refuses what it cannot do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import two_processes as several
from safetensors.torch import load_file

from headstart.training.run import run

Flags = Callable[..., list[str]]
SCRIPT = several.ROOT / "training" / "train_medusa.py"
JOINT = ["--train_target", "lora", "--lora_r", "4", "--lora_dropout", "0", "--target_learning_rate", "1e-2"]
JOINT += ["--drafter_only_steps", "2", "--drafter_loss_weight", "0.5", "--per_device_train_batch_size", "1"]


STEPS = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "2", "--save_total_limit", "4"]
STEPS += ["--eval_strategy", "no"]


@pytest.fixture(scope="module", params=["ddp", "zero2", "zero3"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    if torch.accelerator.is_available() and not several.GPUS:
        pytest.skip("these processes are for CPUs; scripts/verify_gpus.sh runs them on GPUs")
    return request.param


@pytest.mark.distributed
def test_several_processes_give_the_drafter_and_the_adapter_of_one_and_go_on(
    command: Flags, tmp_path: Path, kind: str
) -> None:
    flags = [*JOINT, *STEPS, "--gradient_accumulation_steps"]
    alone = run("medusa", command(*flags, str(2 * several.PROCESSES)))
    together, halves = tmp_path / "several", tmp_path / "halves"
    done = several.launched(kind, SCRIPT, *command(*flags, "2", output=together))
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        wanted, found = load_file(alone / file), load_file(together / file)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=10 * several.TOLERANCE, msg=name)
    figures = [json.loads((folder / "target_change.json").read_text(encoding="utf-8")) for folder in (alone, together)]
    assert figures[0]["kl"] > 1e-4 and figures[0]["kl"] == pytest.approx(figures[1]["kl"], rel=1e-2)

    # From before the target joins: what waits for its turn must be in the checkpoint.
    shutil.copytree(together / "checkpoint-2", halves / "checkpoint-2")
    done = several.launched(kind, SCRIPT, *command(*flags, "2", output=halves))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from" in done.stdout
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        wanted, found = load_file(together / file), load_file(halves / file)
        for name, value in wanted.items():
            atol = several.TOLERANCE if several.GPUS else 0
            torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=name)


@pytest.mark.distributed
def test_whole_target_under_deepspeed_is_refused(command: Flags) -> None:
    pytest.importorskip("deepspeed")
    done = several.launched("zero2", SCRIPT, *command(*JOINT, "--train_target", "full"))
    assert done.returncode and "which DeepSpeed cannot do; set train_target lora" in done.stderr
