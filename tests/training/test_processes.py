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

from headstart.drafters.registry import AutoDrafter
from headstart.training import processes
from headstart.training.command_line import parse
from headstart.training.run import run

Flags = Callable[..., list[str]]
SCRIPT = several.ROOT / "training" / "train_medusa.py"
WORKER = several.ROOT / "tests" / "support" / "uneven_worker.py"


KINDS = ["ddp", "zero2", "zero3", "fsdp2"]
CUT_UP = ("zero3", "fsdp2")
STEPS = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--save_total_limit", "4"]
"""16 rows, 4 a step: the border between the epochs lies between the checkpoints."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("zero"):
        pytest.importorskip("deepspeed")
    if torch.accelerator.is_available() and not several.GPUS:
        pytest.skip("these processes are for CPUs; scripts/verify_gpus.sh runs them on GPUs")
    return request.param


@pytest.fixture(scope="module")
def flags(target_folder: Path, answers_file: Path) -> list[str]:
    """Return what is the same in every run here: 4 rows a step of two processes, 2 a batch."""
    places = ["--target", str(target_folder), "--train_data", str(answers_file)]
    quiet = ["--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "1", "--eval_strategy", "no"]
    measured = ["--held_out_fraction", "0.2", "--eval_prompts", "2", "--eval_new_tokens", "6", "--num_heads", "2"]
    return [*places, *quiet, *measured, *STEPS, "--per_device_train_batch_size", "2"]


@pytest.fixture(scope="module")
def alone(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process, with accumulation in the place of others."""
    folder = tmp_path_factory.mktemp("alone")
    accumulated = ["--gradient_accumulation_steps", str(several.PROCESSES)]
    return run("medusa", [*flags, *accumulated, "--output_dir", str(folder)])


def own_flags(kind: str) -> list[str]:
    """Return what suits a way of training: weights that are cut up cannot be read whenever a process likes to."""
    return [] if kind in CUT_UP else ["--feature_cache_gb", "0.01"]


@pytest.fixture(scope="module")
def together(kind: str, flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in several processes."""
    folder = tmp_path_factory.mktemp(kind) / "run"
    done = several.launched(kind, SCRIPT, *flags, *own_flags(kind), "--output_dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"processes     {several.PROCESSES} on " in done.stdout
    return folder


@pytest.fixture(scope="module")
def uneven_alone(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Train on uneven rows in one process."""
    folder = tmp_path_factory.mktemp("uneven")
    done = subprocess.run(
        [sys.executable, str(WORKER), str(target_folder), str(folder), str(2 * several.PROCESSES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "model.safetensors")


def unlike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """Return the tensors that differ by more than another order of additions would make them."""
    assert found.keys() == wanted.keys()
    close = {"rtol": 0, "atol": several.TOLERANCE}
    return [name for name, value in wanted.items() if not torch.allclose(found[name].cpu(), value.cpu(), **close)]


def halfway(run: Path, folder: Path) -> Path:
    """Make a run that was stopped at its first checkpoint."""
    shutil.copytree(run / "checkpoint-3", folder / "checkpoint-3")
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    return folder


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
        elif path.suffix in (".pt", ".pth", ".bin"):
            collect(torch.load(path, map_location="cpu", weights_only=False), name)
    return found


@pytest.mark.distributed
def test_several_processes_give_the_drafter_of_one(together: Path, alone: Path) -> None:
    wanted, found = (load_file(folder / "model.safetensors") for folder in (alone, together))
    assert unlike(found, wanted) == []


@pytest.mark.distributed
def test_several_processes_measure_what_one_measures(together: Path, alone: Path) -> None:
    wanted, found = (
        json.loads((folder / "run.json").read_text(encoding="utf-8"))["measured"] for folder in (alone, together)
    )
    assert found["held_out"]["accuracy_by_depth"] == wanted["held_out"]["accuracy_by_depth"]
    assert found["held_out"]["loss"] == pytest.approx(wanted["held_out"]["loss"], abs=2e-4)
    assert found["generation"]["tokens_per_step"] == wanted["generation"]["tokens_per_step"]
    topologies = [AutoDrafter.from_pretrained(folder).config.topology for folder in (alone, together)]
    assert topologies[0] == topologies[1]


@pytest.mark.distributed
def test_several_processes_go_on_to_the_bit(kind: str, together: Path, flags: list[str], tmp_path: Path) -> None:
    halves = halfway(together, tmp_path)
    done = several.launched(kind, SCRIPT, *flags, *own_flags(kind), "--output_dir", str(halves))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on from" in done.stdout
    wanted, found = tensors_of(together / "checkpoint-6"), tensors_of(halves / "checkpoint-6")
    assert wanted.keys() == found.keys() and any("rng_state_1" in place for place in wanted)
    assert any("exp_avg" in place for place in wanted)
    for place, value in wanted.items():
        if several.GPUS:
            torch.testing.assert_close(found[place], value, rtol=0, atol=several.TOLERANCE, msg=place)
        else:
            assert torch.equal(found[place], value), place


@pytest.mark.distributed
def test_no_file_holds_a_frozen_weight(together: Path, target_folder: Path) -> None:
    frozen = [tensor.flatten() for tensor in load_file(target_folder / "model.safetensors").values()]
    parts = {part[:8].numpy().tobytes() for whole in frozen for part in whole.chunk(several.PROCESSES) if part.std()}
    stored = tensors_of(together)
    assert any("checkpoint-6" in place for place in stored)
    assert not [place for place in stored if "language_model" in place or "lm_head" in place]
    held = [
        place
        for place, value in stored.items()
        if value.detach().flatten()[:8].float().cpu().numpy().tobytes() in parts
    ]
    assert held == []


@pytest.mark.distributed
def test_process_without_a_trained_token_waits_for_nobody_and_changes_nothing(
    target_folder: Path, tmp_path: Path, kind: str, uneven_alone: dict[str, Tensor]
) -> None:
    done = several.launched(kind, WORKER, str(target_folder), str(tmp_path), "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert unlike(load_file(tmp_path / "model.safetensors"), uneven_alone) == []


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp"], indirect=True, scope="module")
def test_one_process_goes_on_where_several_stopped(
    together: Path, alone: Path, flags: list[str], tmp_path: Path
) -> None:
    halves = ["--output_dir", str(halfway(together, tmp_path))]
    with pytest.raises(ValueError, match=f"with {2 * several.PROCESSES} rows a step, but the 1 of this run make 2"):
        run("medusa", [*flags, *halves])
    run("medusa", [*flags, *halves, "--gradient_accumulation_steps", str(several.PROCESSES)])
    wanted, found = (load_file(folder / "model.safetensors") for folder in (alone, tmp_path))
    assert unlike(found, wanted) == []


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
