"""A checkpoint says where it comes from: settings, command, versions, and the state of the repository."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.training.command_line import parse
from headstart.training.records import git_state, without_secrets
from headstart.training.run import main, run

Flags = Callable[..., list[str]]


def git(folder: Path, *words: str) -> str:
    named = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", "-C", str(folder), *named, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "code.py").write_text("one", encoding="utf-8")
    git(folder, "add", "code.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_state_of_the_repository_is_its_commit_and_whether_tracked_files_differ(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "outputs").mkdir()
    (repository / "outputs" / "new.txt").write_text("untracked", encoding="utf-8")
    git_state.cache_clear()
    assert git_state(repository) == {"commit": commit, "dirty": False}
    (repository / "code.py").write_text("two", encoding="utf-8")
    assert git_state(repository) == {"commit": commit, "dirty": False}  # as it was when first asked
    git_state.cache_clear()
    assert git_state(repository) == {"commit": commit, "dirty": True}


def test_folder_outside_a_repository_has_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    git_state.cache_clear()
    assert git_state(tmp_path) is None
    git_state.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None


def test_each_checkpoint_holds_the_record_of_its_run(
    command: Flags, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    flags = ["--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "1", "--no_plot"]
    run("medusa", command(*flags, "--max_steps", "1"))
    run("medusa", command(*flags, "--max_steps", "2", "--learning_rate", "0.002", "--hub_token", "hf_secret"))
    folder = tmp_path / "run"
    first, second = (
        json.loads((folder / f"checkpoint-{step}" / "run.json").read_text(encoding="utf-8")) for step in (1, 2)
    )
    assert first["git"] == second["git"] == {"commit": git(repository, "rev-parse", "HEAD"), "dirty": False}
    assert first["settings"]["max_steps"] == 1 and second["settings"]["max_steps"] == 2
    assert first["versions"]["torch"] and first["identity"]["method"] == "medusa"
    listed = json.loads((folder / "checkpoint-2" / "whole.json").read_text(encoding="utf-8"))["files"]
    assert {"run.json", "resolved.yaml"} <= set(listed)
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hf_secret" in path.read_bytes()]
    again = parse("medusa", ["--config", str(folder / "checkpoint-2" / "resolved.yaml")])
    assert again.training.learning_rate == 0.002 and again.training.max_steps == 2


def test_secrets_are_left_out_of_a_command() -> None:
    words = ["--hub_token", "hf_x", "--seed", "3", "--hub_token=hf_y", "--pad_token_id=2"]
    assert without_secrets(words) == ["--hub_token", "...", "--seed", "3", "--hub_token=...", "--pad_token_id=2"]


def test_trying_out_and_drawing_do_not_make_a_run_another(command: Flags, capsys) -> None:
    assert main("medusa", command("--max_steps", "1", "--no_plot")) == 0
    assert main("medusa", command("--max_steps", "1", "--dry_run")) == 0
    assert "already finished" in capsys.readouterr().out
