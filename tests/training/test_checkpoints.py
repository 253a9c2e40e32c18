"""A checkpoint is whole or not there: after a kill, on a full disk, and among others."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from headstart.training.checkpoints import MANIFEST, PARTIAL, check_same_way, find_newest, problem_of, publish, rotate
from headstart.training.run import main, run
from headstart.training.trainer import DrafterTrainer

ROOT = Path(__file__).resolve().parents[2]
Flags = Callable[..., list[str]]
EVERY_STEP = ["--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "no", "--eval_prompts", "0"]


def arguments(**more: Any) -> Any:
    rows = {"train_batch_size": 4, "gradient_accumulation_steps": 1}
    return SimpleNamespace(**{"world_size": 1, "should_save": True, "deepspeed_plugin": None} | rows | more)


def written(folder: Path, step: int, text: str = "weights") -> Path:
    """Write and publish a checkpoint of one file."""
    fresh = folder / PARTIAL / f"checkpoint-{step}"
    fresh.mkdir(parents=True)
    (fresh / "model.safetensors").write_text(text, encoding="utf-8")
    return publish(folder, step, arguments())


def test_whoever_may_read_the_manifest_may_read_the_weights(tmp_path: Path) -> None:
    fresh = tmp_path / PARTIAL / "checkpoint-1" / "target"
    fresh.mkdir(parents=True)
    (fresh / "model.safetensors").touch(mode=0o600)
    final = publish(tmp_path, 1, arguments())
    assert (final / "target" / "model.safetensors").stat().st_mode == (final / "whole.json").stat().st_mode


def test_newest_whole_checkpoint_is_found_by_its_step(tmp_path: Path) -> None:
    for step in (9, 10, 2):
        written(tmp_path, step)
    found = find_newest(tmp_path)
    assert found.newest == tmp_path / "checkpoint-10" and not found.passed_over
    assert not (tmp_path / PARTIAL).exists()


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda at: (at / MANIFEST).unlink(), "has no whole.json, so its save was not finished"),
        (lambda at: (at / MANIFEST).write_text("{", encoding="utf-8"), "whole.json cannot be read"),
        (lambda at: (at / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda at: (at / "model.safetensors").write_text("wei"), "model.safetensors must have 7 bytes, but has 3"),
    ],
    ids=["unfinished", "garbled", "missing", "cut"],
)
def test_checkpoint_that_is_not_whole_is_passed_over_by_name(tmp_path: Path, harm, told: str) -> None:
    older, newer = written(tmp_path, 4), written(tmp_path, 8)
    harm(newer)
    found = find_newest(tmp_path)
    assert found.newest == older
    assert len(found.passed_over) == 1 and found.passed_over[0].startswith("checkpoint-8 (") and told in str(found)


def test_same_step_published_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    written(tmp_path, 4, "old")
    assert (written(tmp_path, 4, "new one") / "model.safetensors").read_text(encoding="utf-8") == "new one"
    assert problem_of(tmp_path / "checkpoint-4") is None


def test_oldest_checkpoints_go_but_never_the_newest_or_the_best(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        written(tmp_path, step)
    rotate(tmp_path, None, None)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 4
    rotate(tmp_path, 2, str(tmp_path / "checkpoint-2"))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-8"}
    rotate(tmp_path, 1, None)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


def test_optimizer_cut_up_for_other_processes_is_refused(tmp_path: Path) -> None:
    checkpoint = written(tmp_path, 4)
    check_same_way(
        checkpoint, arguments(world_size=2, train_batch_size=2)
    )  # without DeepSpeed every process has the whole optimizer
    with pytest.raises(ValueError, match=r"without DeepSpeed .* with DeepSpeed ZeRO-2 and 2 processes; start"):
        check_same_way(checkpoint, arguments(world_size=2, deepspeed_plugin=SimpleNamespace(zero_stage=2)))


class Killed(BaseException):
    """Stands for SIGKILL: nothing cleans up after it."""


def test_run_killed_in_the_middle_of_a_save_goes_on_from_the_checkpoint_before(
    command: Flags, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*EVERY_STEP, "--max_steps", "4"]
    whole = load_file(run("medusa", command(*flags, output=tmp_path / "whole")) / "model.safetensors")
    save = DrafterTrainer._save_scaler

    def dies(self: DrafterTrainer, output_dir: str) -> None:
        if self.state.global_step == 3:
            raise Killed
        save(self, output_dir)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(DrafterTrainer, "_save_scaler", dies)
        run("medusa", command(*flags))
    assert (tmp_path / "run" / PARTIAL / "checkpoint-3" / "model.safetensors").is_file()
    capsys.readouterr()
    resumed = load_file(run("medusa", command(*flags)) / "model.safetensors")
    said = capsys.readouterr().out
    assert "passed over partial/checkpoint-3 (it was still being written)" in said
    assert f"going on from {tmp_path / 'run' / 'checkpoint-2'}" in said
    assert all(resumed[name].equal(value) for name, value in whole.items())
    assert not (tmp_path / "run" / PARTIAL).exists()


def test_broken_checkpoint_asked_for_by_name_is_refused(command: Flags, tmp_path: Path) -> None:
    run("medusa", command(*EVERY_STEP, "--max_steps", "1"))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    (checkpoint / "optimizer.pt").unlink()
    asked = ["--resume_from_checkpoint", str(checkpoint), "--max_steps", "2"]
    with pytest.raises(ValueError, match=r"must be a whole checkpoint, but optimizer\.pt is missing"):
        run("medusa", command(*EVERY_STEP, *asked))


def test_best_checkpoint_is_known_by_its_final_name(command: Flags, tmp_path: Path) -> None:
    flags = ["--load_best_model_at_end", "true", "--num_train_epochs", "2", "--metric_for_best_model", "loss"]
    run("medusa", command(*flags))
    newest = find_newest(tmp_path / "run").newest
    assert newest is not None
    state = (newest / "trainer_state.json").read_text(encoding="utf-8")
    assert f'"best_model_checkpoint": "{tmp_path / "run" / "checkpoint-"}' in state


def test_file_that_cannot_be_written_leaves_the_checkpoint_before_and_says_so(
    command: Flags, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = DrafterTrainer._save_optimizer_and_scheduler
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def in_a_small_space(self: DrafterTrainer, output_dir: str) -> None:
        if self.state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        save(self, output_dir)

    monkeypatch.setattr(DrafterTrainer, "_save_optimizer_and_scheduler", in_a_small_space)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        code = main("medusa", command(*EVERY_STEP, "--max_steps", "3"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert code == 1
    told = capsys.readouterr().err
    assert "checkpoint-2 could not be saved" in told and "the last whole checkpoint is checkpoint-1" in told
    assert find_newest(tmp_path / "run").newest == tmp_path / "run" / "checkpoint-1"


MAY_MOUNT = shutil.which("unshare") is not None and sys.platform == "linux"
IN_A_SMALL_DISK = 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"'


@pytest.mark.slow
def test_full_disk_leaves_the_checkpoint_before_and_says_so(command: Flags, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", IN_A_SMALL_DISK]
    if not MAY_MOUNT or subprocess.run([*alone, "64k", str(disk), "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces that may mount a tmpfs")
    # Room for some checkpoints of these heads, not for nine.
    flags = command(*EVERY_STEP, "--max_steps", "9", "--save_total_limit", "9", output=disk / "run")
    script = "import os, sys; from headstart.training.run import main; code = main('medusa', sys.argv[1:]); "
    script += "print('\\n'.join(sorted(os.listdir(sys.argv[-1])))); sys.exit(code)"
    size = ["200k", str(disk)]
    last = ["--output_dir", str(disk / "run")]
    done = subprocess.run(
        [*alone, *size, sys.executable, "-c", script, *flags, *last], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 1, done.stderr
    error = done.stderr[done.stderr.index("error:") :]
    assert "could not be saved" in error and "the last whole checkpoint is checkpoint-" in error
    assert error.partition("the last whole checkpoint is ")[2].partition(":")[0] in done.stdout.split()
