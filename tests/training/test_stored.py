"""Rows that a store lacks are made by the target to the bit, and a store that is used once goes as it is used."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import two_processes as several
from safetensors.torch import load_file

from headstart.cli import main as headstart
from headstart.distill import command as distill_command
from headstart.distill.dataset import Collator, load_dataset
from headstart.distill.shards import alone_in, locked
from headstart.distill.store import FeatureStore
from headstart.inference.loading import eos_ids, load_target
from headstart.inference.target import Target, TargetOutput
from headstart.training.command_line import parse
from headstart.training.features import FeatureSource, KeptRows, KeyedCollator
from headstart.training.run import Loaded, main, run
from headstart.training.several import train_several
from headstart.training.stored import rows_ahead
from headstart.training.trainer import DrafterTrainer

SCRIPT = several.ROOT / "training" / "train_medusa.py"
PER_TOKEN = 2 * 16 * 4
EPOCHS = ["--num_train_epochs", "2", "--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "no"]
EPOCHS += ["--save_total_limit", "20"]
"""16 rows to train on and 4 held out, in two epochs of four steps; a checkpoint at each."""


class ReadingTarget(Target):
    """Counts how often it reads whole rows."""

    rows_read = 0

    def encode(self, tokens: torch.Tensor, *args, **kwargs) -> TargetOutput:
        self.rows_read += len(tokens)
        return super().encode(tokens, *args, **kwargs)


@pytest.fixture
def loaded(target_folder: Path) -> Loaded:
    model, tokenizer = load_target(str(target_folder))
    return Loaded(ReadingTarget(model), tokenizer, eos_ids(model))


@pytest.fixture
def captured(target_folder: Path, answers_file: Path, tmp_path: Path, monkeypatch) -> Callable[..., Path]:
    """Make a store of the first rows of the data, in shards of so many tokens."""

    def make(rows: int = 20, tokens_per_shard: int = 1) -> Path:
        monkeypatch.setattr(distill_command, "SHARD_BYTES", tokens_per_shard * PER_TOKEN)
        data, folder = tmp_path / f"first{rows}.jsonl", tmp_path / f"store{rows}"
        lines = answers_file.read_text(encoding="utf-8").splitlines(keepends=True)
        data.write_text("".join(lines[:rows]), encoding="utf-8")
        words = ["distill", "capture", "--target", str(target_folder), "--data", str(data), "--out", str(folder)]
        assert headstart([*words, "--layers", "final,1"]) == 0
        return folder

    return make


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("features-*"))


# Rows that the store lacks


def test_features_of_rows_that_are_made_equal_those_of_stored_ones_to_the_bit(
    loaded: Loaded, answers_file: Path, captured
) -> None:
    rows = load_dataset(answers_file, loaded.tokenizer).rows
    inputs = KeyedCollator(Collator(2))(rows[8:16])
    whole, part = FeatureStore(captured(20)), FeatureStore(captured(12))
    assert part.check_rows(rows[8:16], {}, make=True) == 4 and whole.check_rows(rows, {}) == 0
    found = []
    for store in (whole, part):
        kept = KeptRows(loaded.target, store.layers, 0, store)
        found.append(FeatureSource(loaded.target, (1, "final"), kept=kept)(inputs))
    assert torch.equal(found[0].features, found[1].features) and torch.equal(found[0].final, found[1].final)
    with pytest.raises(ValueError, match=r"lacks one of \d+ tokens; set missing_features to make"):
        KeptRows(loaded.target, part.layers, 0, part, make=False).states([torch.tensor(rows[15].input_ids)], [-1])


def test_run_on_a_part_of_the_rows_equals_one_on_all_of_them_and_says_what_is_made(
    command, captured, loaded: Loaded, tmp_path: Path, capsys
) -> None:
    whole, part = captured(20), captured(12)
    before = {path.name: path.read_bytes() for path in part.iterdir()}
    wanted = run("medusa", command(*EPOCHS, "--features", str(whole), output=tmp_path / "whole"), loaded)
    assert loaded.target.rows_read <= 1  # type: ignore[attr-defined]
    assert f"features      20 rows read from {whole}\n" in capsys.readouterr().out
    flags = ["--features", str(part), "--missing_features", "make"]
    found = run("medusa", command(*EPOCHS, *flags, output=tmp_path / "part"), loaded)
    assert f"12 rows read from {part}; the target makes 8 rows that are not there\n" in capsys.readouterr().out
    assert same(weights(found), weights(wanted))
    assert json.loads((found / "config.json").read_text())["measured"] == json.loads(
        (wanted / "config.json").read_text()
    )["measured"]  # fmt: skip
    assert {path.name: path.read_bytes() for path in part.iterdir()} == before, "nothing is deleted unasked"


def test_rows_that_are_not_there_are_refused_unless_they_are_to_be_made(command, captured, capsys) -> None:
    part = captured(12, tokens_per_shard=50)
    assert main("medusa", command(*EPOCHS, "--features", str(part))) == 1
    told = capsys.readouterr().err
    assert re.search(r"every row that is going to be read, but 8 of 20 are not there .*the first: r1\d\)", told)
    assert "missing_features make has the target read them" in told and "data: [['first12" in told
    assert "are missing or not whole" not in told
    (part / shards(part)[0]).unlink()
    assert main("medusa", command(*EPOCHS, "--features", str(part))) == 1
    assert re.search(r"; 1 of its \d shards are missing or not whole, since a capture was", capsys.readouterr().err)


def test_store_of_another_target_or_of_none_of_the_rows_is_refused_in_any_case(command, captured, capsys) -> None:
    flags = ["--features", str(captured(20)), "--missing_features", "make"]
    assert main("medusa", command(*EPOCHS, *flags, "--target_dtype", "bfloat16")) == 1
    assert "dtype: 'float32' there, 'bfloat16' now" in capsys.readouterr().err
    assert main("medusa", command(*EPOCHS, *flags, "--max_length", "5")) == 1
    assert re.search(r"not one is there .*made otherwise: max_length: \d+ there, 5 now", capsys.readouterr().err)


def test_shards_that_are_missing_are_made_too(command, captured, tmp_path: Path, capsys) -> None:
    store = captured(20, tokens_per_shard=50)
    wanted = weights(run("medusa", command(*EPOCHS, "--features", str(store), output=tmp_path / "whole")))
    (store / shards(store)[1]).unlink()
    flags = ["--features", str(store), "--missing_features", "make"]
    capsys.readouterr()
    assert same(weights(run("medusa", command(*EPOCHS, *flags, output=tmp_path / "part"))), wanted)
    assert re.search(r"\d+ rows read from .*; the target makes [2-9] rows", capsys.readouterr().out)


@pytest.mark.parametrize("flags", [["--missing_features", "make"], ["--delete_features_after_use"]], ids=lambda f: f[0])
def test_settings_of_a_store_without_one_are_refused(command, flags: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{flags[0][2:]} has no effect without features"):
        parse("medusa", command(*flags))


# A store that is used once


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential"])
def test_rows_ahead_are_those_of_the_steps_that_follow(command, strategy: str) -> None:
    args = parse(
        "medusa", command("--gradient_accumulation_steps", "2", "--train_sampling_strategy", strategy)
    ).training
    lengths = [3 + i * 5 % 11 for i in range(19)]  # three steps an epoch: 8, 8, 3 rows
    steps = [rows_ahead(lengths, args, step, step + 1) for step in range(6)]
    assert [len(rows) for rows in steps] == [8, 8, 3] * 2
    assert set.union(*steps[:3]) == set.union(*steps[3:]) == set(range(19))
    for step in range(7):
        for last in range(step, 7):
            assert rows_ahead(lengths, args, step, last) == set().union(*steps[step:last])


def test_shards_go_in_the_last_epoch_as_checkpoints_are_saved(
    command, captured, loaded: Loaded, tmp_path: Path, capsys
) -> None:
    store = captured(20)
    wanted = weights(run("medusa", command(*EPOCHS, "--features", str(store), output=tmp_path / "kept"), loaded))
    assert len(shards(store)) == 20
    capsys.readouterr()
    flags = ["--features", str(store), "--delete_features_after_use"]
    found = weights(run("medusa", command(*EPOCHS, *flags, output=tmp_path / "deleted"), loaded))
    said = capsys.readouterr().out
    assert f"20 rows read from {store}; its shards are deleted after use\n" in said
    assert said.count(f"deleted 4 of 20 shards of {store} after use") == 5, "at steps 5 to 8, and at the end"
    assert said.index("saved the drafter") < said.rindex("deleted 4 of 20 shards"), "those held out"
    assert same(found, wanted) and not shards(store)
    assert loaded.target.rows_read <= 2  # type: ignore[attr-defined]
    assert run("medusa", command(*EPOCHS, *flags, output=tmp_path / "deleted"), loaded)
    assert "already finished" in capsys.readouterr().out


def test_shard_with_a_row_that_the_run_never_reads_stays(command, captured, tmp_path: Path) -> None:
    store = captured(20, tokens_per_shard=40)
    before = shards(store)
    captured(12)
    data = ["--train_data", str(tmp_path / "first12.jsonl")]
    run("medusa", command(*EPOCHS, *data, "--features", str(store), "--delete_features_after_use"))
    manifest = json.loads((store / "store.json").read_text())
    read = {f"r{i}" for i in range(12)}
    stay = [one["file"] for one in manifest["shards"] if not {row[1] for row in one["rows"]} <= read]
    assert shards(store) == stay and 0 < len(stay) < len(before)


def test_killed_run_goes_on_without_what_was_deleted_and_says_so_where_it_cannot(
    command, captured, loaded: Loaded, tmp_path: Path, monkeypatch, capsys
) -> None:
    store = captured(20)
    wanted = weights(run("medusa", command(*EPOCHS, "--features", str(store), output=tmp_path / "kept"), loaded))
    flags = ["--features", str(store), "--delete_features_after_use"]
    step = DrafterTrainer.training_step

    def killed(self, *args):
        if self.state.global_step == 6:
            raise RuntimeError("killed")
        return step(self, *args)

    monkeypatch.setattr(DrafterTrainer, "training_step", killed)
    with pytest.raises(RuntimeError, match="killed"):
        run("medusa", command(*EPOCHS, *flags), loaded)
    monkeypatch.undo()
    assert len(shards(store)) == 12
    older = command(*EPOCHS, *flags, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-5"))
    assert main("medusa", older) == 1
    told = capsys.readouterr().err
    assert re.search(r"but 4 of 16 are not there.*; 8 of its 20 shards .* were deleted after use", told)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.copytree(store, tmp_path / "store")
    read = loaded.target.rows_read  # type: ignore[attr-defined]
    assert same(weights(run("medusa", command(*EPOCHS, *flags), loaded)), wanted)
    assert f"12 rows read from {store}" in capsys.readouterr().out and not shards(store)
    made = ["--features", str(tmp_path / "store"), "--missing_features", "make"]
    made += ["--resume_from_checkpoint", str(tmp_path / "again" / "checkpoint-5")]
    assert loaded.target.rows_read - read <= 1 + 8  # type: ignore[attr-defined]  # measured before the first step
    assert same(weights(run("medusa", command(*EPOCHS, *made, output=tmp_path / "again"), loaded)), wanted)
    assert "12 rows read from" in (said := capsys.readouterr().out) and "makes 4 rows that are not there" in said


def test_store_that_another_process_has_open_is_not_deleted_and_one_to_be_deleted_is_not_read(
    command, captured, loaded: Loaded, tmp_path: Path
) -> None:
    store = captured(20)
    flags = ["--features", str(store), "--delete_features_after_use"]
    with locked(store, alone=False, refusal=""):
        with pytest.raises(ValueError, match="no other process may have it open, but one has"):
            run("medusa", command("--max_steps", "1", *flags), loaded)
        with pytest.raises(ValueError, match="another is at work there"), alone_in(store):
            pass
        run("medusa", command("--max_steps", "1", *flags[:2], output=tmp_path / "beside"), loaded)
    with (
        locked(store, alone=True, refusal=""),
        pytest.raises(ValueError, match="another process writes there or is going to delete it"),
    ):
        run("medusa", command("--max_steps", "1", *flags[:2]), loaded)
    assert len(shards(store)) == 20


def test_dry_run_deletes_nothing(command, captured, loaded: Loaded) -> None:
    store = captured(20)
    run("medusa", command(*EPOCHS, "--features", str(store), "--delete_features_after_use", "--dry_run"), loaded)
    assert len(shards(store)) == 20


def test_drafters_trained_one_after_the_other_delete_nothing(command, captured, tmp_path: Path) -> None:
    (tmp_path / "medusa.yaml").write_text("num_heads: 2\n", encoding="utf-8")
    flags = command("--features", str(captured(20)), "--delete_features_after_use", output=tmp_path / "out")
    with pytest.raises(ValueError, match="read the same features, so none may delete them"):
        train_several(["--drafters", str(tmp_path / "medusa.yaml"), *flags])


@pytest.mark.distributed
def test_several_processes_read_a_store_and_delete_it(command, captured, tmp_path: Path) -> None:
    store = captured(20)
    flags = ["--per_device_train_batch_size", str(4 // several.PROCESSES), *EPOCHS, "--features", str(store)]
    for way, more in (("kept", []), ("deleted", ["--delete_features_after_use"])):
        done = several.launched("ddp", SCRIPT, *command(*flags, *more, output=tmp_path / way))
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"deleted 4 of 20 shards of {store} after use") == 5
    assert same(weights(tmp_path / "kept"), weights(tmp_path / "deleted")) and not shards(store)
