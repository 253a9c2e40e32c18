"""Several processes give the drafter of one, go on to the bit, and never train alone in silence."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes as several
from safetensors.torch import load_file
from torch import Tensor

from headstart.training import processes
from headstart.training.command_line import parse
from headstart.training.run import run

Flags = Callable[..., list[str]]
SCRIPT = several.ROOT / "training" / "train_medusa.py"
WORKER = several.ROOT / "tests" / "support" / "uneven_worker.py"


@pytest.fixture(params=["ddp", "zero2"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "zero2":
        pytest.importorskip("deepspeed")
    if torch.accelerator.is_available() and not several.GPUS:
        pytest.skip("these processes are for CPUs; scripts/verify_gpus.sh runs them on GPUs")
    return request.param


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return every tensor in a checkpoint's files, the optimizer's and the random states included, by place."""
    found: dict[str, Tensor] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, Tensor):
            found[place] = value
        parts = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for key, part in parts:
            collect(part, f"{place}/{key}")

    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            collect(load_file(path), name)
        elif path.suffix in (".pt", ".pth"):
            collect(torch.load(path, map_location="cpu", weights_only=False), name)
    return found


@pytest.mark.distributed
def test_several_processes_give_the_drafter_of_one(command: Flags, tmp_path: Path, kind: str) -> None:
    one = ("--num_train_epochs", "2", "--per_device_train_batch_size", "2", "--eval_strategy", "no")
    accumulated = ["--gradient_accumulation_steps", str(several.PROCESSES)]
    alone = load_file(run("medusa", command(*one, *accumulated)) / "model.safetensors")
    done = several.launched(kind, SCRIPT, *command(*one, output=tmp_path / "several"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"processes     {several.PROCESSES} on " in done.stdout
    together = load_file(tmp_path / "several" / "model.safetensors")
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=several.TOLERANCE, msg=name)


@pytest.mark.distributed
def test_process_without_a_trained_token_waits_for_nobody_and_changes_nothing(
    target_folder: Path, tmp_path: Path, kind: str
) -> None:
    steps = 2 * several.PROCESSES
    alone = subprocess.run(
        [sys.executable, str(WORKER), str(target_folder), str(tmp_path / "one"), str(steps)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    done = several.launched(kind, WORKER, str(target_folder), str(tmp_path / "several"), "2")
    assert done.returncode == 0, done.stdout + done.stderr
    together = load_file(tmp_path / "several" / "model.safetensors")
    for name, value in load_file(tmp_path / "one" / "model.safetensors").items():
        torch.testing.assert_close(together[name], value, rtol=0, atol=several.TOLERANCE, msg=name)


@pytest.mark.distributed
def test_several_processes_go_on_to_the_bit(command: Flags, tmp_path: Path, kind: str) -> None:
    # 16 rows, 2 a process: the border between the epochs lies within the second half.
    flags = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--per_device_train_batch_size", "2"]
    flags += ["--eval_strategy", "no", "--save_total_limit", "4", "--feature_cache_gb", "0.01"]
    done = several.launched(kind, SCRIPT, *command(*flags))
    assert done.returncode == 0, done.stdout + done.stderr
    whole, halves = tmp_path / "run", tmp_path / "halves"
    shutil.copytree(whole / "checkpoint-3", halves / "checkpoint-3")
    record = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    (halves / "run.json").write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    done = several.launched(kind, SCRIPT, *command(*flags, output=halves))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from" in done.stdout
    wanted, found = tensors_of(whole / "checkpoint-6"), tensors_of(halves / "checkpoint-6")
    assert wanted.keys() == found.keys() and any("rng_state_1" in place for place in wanted)
    assert any("exp_avg" in place for place in wanted)
    for place, value in wanted.items():
        if several.GPUS:
            torch.testing.assert_close(found[place], value, rtol=0, atol=several.TOLERANCE, msg=place)
        else:
            assert torch.equal(found[place], value), place


@pytest.mark.distributed
def test_sigterm_to_one_process_stops_all_after_the_same_step(command: Flags, tmp_path: Path) -> None:
    flags = ["--max_steps", "100000", "--save_strategy", "no", "--eval_strategy", "no"]
    command_line = several.launch_command("ddp", SCRIPT, *command(*flags))
    said = []
    with subprocess.Popen(command_line, cwd=several.ROOT, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            said.append(line)
            if "'loss'" in line:
                launcher.send_signal(signal.SIGTERM)
                break
        said += launcher.stdout.readlines()
    assert launcher.returncode != 0
    assert "stopped by SIGTERM after step" in "".join(said)
    checkpoint = next((tmp_path / "run").glob("checkpoint-*"))
    assert {"rng_state_0.pth", "rng_state_1.pth", "whole.json"} <= {path.name for path in checkpoint.iterdir()}


@pytest.mark.distributed
def test_mistake_is_told_before_the_launchers_traceback() -> None:
    done = several.launched("ddp", SCRIPT)
    assert done.returncode == 1
    assert "--train_data" in done.stderr.partition("Traceback")[0]


@pytest.mark.distributed
def test_launcher_that_starts_fewer_processes_than_asked_is_found_out(command: Flags) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", str(SCRIPT)]
    done = subprocess.run([*launcher, *command()], capture_output=True, text=True, check=False, cwd=several.ROOT)
    assert done.returncode != 0
    assert "--num_processes asks for 2 processes, but only this one was started" in done.stderr


def test_processes_that_did_not_join_are_refused(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse("medusa", command()).training
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="the launcher started 2 processes, but they have not joined"):
        processes.check_joined(args)


def test_accelerate_file_for_several_processes_is_not_ignored_by_plain_python(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n", encoding="utf-8")
    monkeypatch.setattr(processes, "default_config_file", str(file))
    with pytest.raises(ValueError, match=r"default_config\.yaml asks for 8 processes, but only this one was started"):
        parse("medusa", command())
    file.write_text("num_processes: 1\n", encoding="utf-8")
    assert parse("medusa", command()).training.world_size == 1


def test_deepspeed_without_a_launcher_is_refused(command: Flags) -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="DeepSpeed needs a launcher"):
        parse("medusa", command("--deepspeed", "configs/deepspeed/zero2.json"))


@pytest.mark.parametrize("way", ["flag", "launcher"])
def test_deepspeed_that_is_not_installed_is_told_before_anything_is_loaded(
    command: Flags, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "is_deepspeed_available", lambda: False)
    if way == "launcher":
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    flags = ["--deepspeed", "zero2.json"] if way == "flag" else []
    with pytest.raises(ValueError, match="DeepSpeed was asked for and must be installed"):
        parse("medusa", command("--target", "owner/never-loaded", *flags))
