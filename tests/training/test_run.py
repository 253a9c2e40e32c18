"""A whole run: from the command to a drafter that generates, and what a second command makes of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headstart import AutoDrafter, attach
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training.command_line import parse
from headstart.training.records import identity
from headstart.training.run import main, run

ROOT = Path(__file__).resolve().parents[2]
Flags = Callable[..., list[str]]


def test_command_gives_a_drafter_with_its_provenance(
    command: Flags, tmp_path: Path, target_folder: Path, capsys
) -> None:
    folder = run("medusa", command("--draft_vocab_size", "24", "--num_train_epochs", "1"))
    said = capsys.readouterr().out
    for part in (
        "processes ",
        "global batch  4 rows",
        "24 tokens, ",
        "trained, 5,456 frozen",
        "tokens/s",
        "saved the drafter",
    ):
        assert part in said
    config = AutoDrafter.from_pretrained(folder).config
    assert config.target_name == target_folder.name  # a path on this machine would say nothing elsewhere
    assert config.training_data["trained_tokens"] == 140 and config.training_data["rows"] == 16
    assert config.training_data["sources"] == ["answers-00000.jsonl"]
    assert config.tokenizer_fingerprint.startswith("sha256:") and config.chat_template_fingerprint.startswith("sha256:")
    assert config.topology and len(config.measured["held_out"]["accuracy_by_depth"]) == 2
    assert config.measured["generation"]["tokens_per_step"] >= 1
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert record["finished"] is True and "torch" in record["versions"]
    assert "--draft_vocab_size 24" in record["command"]
    assert (folder / "resolved.yaml").read_text(encoding="utf-8").startswith("# Every setting")

    model, _ = load_target(str(target_folder))
    inputs = torch.tensor([[1, 7, 8, 9]])
    told = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 12, "do_sample": False}
    plain: Any = model.generate(inputs, **told)  # type: ignore[operator]
    fast: Any = attach(model, folder).generate(inputs, **told)
    assert torch.equal(plain, fast)


def test_same_command_again_says_that_it_is_finished(command: Flags, tmp_path: Path, capsys) -> None:
    flags = command("--max_steps", "2")
    run("medusa", flags)
    before = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    run("medusa", flags)
    assert "already finished" in capsys.readouterr().out
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == before


def test_same_command_goes_on_where_a_killed_run_stopped(command: Flags, tmp_path: Path, capsys) -> None:
    flags = command("--num_train_epochs", "2")
    whole = load_file(run("medusa", flags) / "model.safetensors")
    # What a run killed in its second epoch leaves: the first epoch's checkpoint and an unfinished record.
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copytree(tmp_path / "run" / "checkpoint-4", killed / "checkpoint-4")
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    record["finished"] = False
    (killed / "run.json").write_text(json.dumps(record), encoding="utf-8")
    capsys.readouterr()
    resumed = load_file(run("medusa", command("--num_train_epochs", "2", output=killed)) / "model.safetensors")
    assert "going on from" in capsys.readouterr().out
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_finished_run_goes_on_when_asked_for_more_epochs(command: Flags, tmp_path: Path, capsys) -> None:
    run("medusa", command("--num_train_epochs", "1"))
    run("medusa", command("--num_train_epochs", "2"))
    assert "with other settings (num_train_epochs)" in capsys.readouterr().out
    assert (tmp_path / "run" / "checkpoint-8").is_dir()


def test_folder_of_another_run_is_refused(command: Flags) -> None:
    run("medusa", command("--max_steps", "1"))
    with pytest.raises(ValueError, match="holds another run \\(num_layers: 1 there, 2 now\\)"):
        run("medusa", command("--max_steps", "1", "--num_layers", "2"))


@pytest.mark.parametrize(
    "flags, told",
    [
        (["--target_dtype", "bfloat16"], "target_dtype: 'float32' there, 'bfloat16' now"),
        (["--target_revision", "v2"], "target_revision: None there, 'v2' now"),
    ],
)
def test_target_loaded_otherwise_is_another_run(command: Flags, flags: list[str], told: str) -> None:
    run("medusa", command("--max_steps", "1"))
    with pytest.raises(ValueError, match=f"holds another run \\({told}\\)"):
        run("medusa", command("--max_steps", "2", *flags))


def test_type_of_the_target_is_the_same_by_its_name(command: Flags, capsys) -> None:
    run("medusa", command("--max_steps", "1"))
    run("medusa", command("--max_steps", "1", "--target_dtype", "float32"))
    assert "with other settings (target_dtype)" in capsys.readouterr().out


def test_quantised_target_is_another_run(command: Flags, target: Target) -> None:
    plain, quantised = (parse("medusa", command(*flags)) for flags in ([], ["--load_in_8bit"]))
    differing = identity(plain, target, {}).items() ^ identity(quantised, target, {}).items()
    assert differing == {("target_bits", None), ("target_bits", 8)}


def test_fresh_start_among_old_checkpoints_is_refused(command: Flags) -> None:
    run("medusa", command("--num_train_epochs", "1"))
    with pytest.raises(ValueError, match="must hold no checkpoint for a fresh start"):
        run("medusa", command("--num_train_epochs", "1", "--resume_from_checkpoint", "never"))


def test_run_without_held_out_rows_trains_and_says_that_nothing_is_evaluated(command: Flags, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no row is held out"):
        run("medusa", command("--max_steps", "1", "--held_out_fraction", "0"))
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_data_without_a_trained_token_is_refused(command: Flags, tmp_path: Path, capsys) -> None:
    data = tmp_path / "empty.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "w1"}]}\n', encoding="utf-8")
    assert main("medusa", command("--train_data", str(data))) == 1
    assert "must hold a row with a trained token" in capsys.readouterr().err


def test_script_without_arguments_exits_with_2() -> None:
    script = ROOT / "training" / "train_medusa.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:") and "Traceback" not in done.stderr
