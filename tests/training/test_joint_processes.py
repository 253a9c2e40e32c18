"""Joint training in several processes gives what one process gives, and DeepSpeed is refused."""

from __future__ import annotations

import json
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


@pytest.fixture(autouse=True)
def on_this_machine() -> None:
    if torch.accelerator.is_available() and not several.GPUS:
        pytest.skip("these processes are for CPUs; scripts/verify_gpus.sh runs them on GPUs")


@pytest.mark.distributed
def test_several_processes_give_the_drafter_and_the_adapter_of_one(command: Flags, tmp_path: Path) -> None:
    flags = [*JOINT, "--num_train_epochs", "2", "--gradient_accumulation_steps"]
    alone = run("medusa", command(*flags, str(2 * several.PROCESSES)))
    done = several.launched("ddp", SCRIPT, *command(*flags, "2", output=tmp_path / "several"))
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        wanted, found = load_file(alone / file), load_file(tmp_path / "several" / file)
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=10 * several.TOLERANCE, msg=name)
    figures = [
        json.loads((folder / "target_change.json").read_text(encoding="utf-8"))
        for folder in (alone, tmp_path / "several")
    ]
    assert figures[0]["kl"] > 1e-4 and figures[0]["kl"] == pytest.approx(figures[1]["kl"], rel=1e-2)


@pytest.mark.distributed
def test_deepspeed_is_refused(command: Flags) -> None:
    pytest.importorskip("deepspeed")
    done = several.launched("zero2", SCRIPT, *command(*JOINT))
    assert done.returncode and "which was never run with DeepSpeed or FSDP" in done.stderr
