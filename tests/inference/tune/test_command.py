"""`headstart tune` from words to a kept tree."""

import json

import pytest

from headstart.cli import main
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.inference.tune.store import tunings_of


@pytest.fixture
def words_of(saved):
    return [
        "tune", "--target", str(saved["target"]), "--drafter", str(saved["heads"]), "--prompts",
        str(saved["prompts.jsonl"]), "--num_prompts", "2", "--proof_prompts", "2", "--max_new_tokens", "8",
        "--contexts", "8,16", "--rounds", "1", "--dtype", "float32",
    ]  # fmt: skip


def test_chosen_tree_is_reported_and_kept(words_of, saved, capsys):
    assert main([*words_of, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    target = Target(load_target(str(saved["target"]), "float32")[0])
    (kept,) = tunings_of(saved["heads"], target)
    assert kept.topology == report["batches"][0]["chosen"]["topology"]
    assert report["kept"] == [str(next((saved["heads"] / "tuned").iterdir()))] and "kept in" in err
    assert report["prompts"]["ids"] == ["a", "b"] and report["proof_prompts"]["ids"] == ["c"]
    assert report["proof_is_new"] is True


def test_dry_run_keeps_nothing(words_of, saved, tmp_path, capsys):
    assert main([*words_of, "--dry_run", "--temperature", "0.8", "--json", str(tmp_path / "out.json")]) == 0
    assert not (saved["heads"] / "tuned").exists() and "expected" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["kept"] == [] and report["settings"]["decoding"]["temperature"] == 0.8


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch_sizes", "1;2"], "--batch_sizes: must be whole numbers of at least 1"),
        (["--contexts", "x"], "--contexts: must be whole numbers"),
        (["--num_prompts", "0"], "at least 1"),
        (["--drafter", "nowhere/at-all"], "drafter must be a folder"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--batch_size", "1"], "there is no option --batch_size; did you mean --batch_sizes?"),
        (["--top_k", "3"], "need a temperature"),
        (["--json", "/dev/null/report.json"], "must be a place that can be written"),
    ],
)
def test_mistake_is_told_in_one_line_before_the_target_is_loaded(words_of, capsys, monkeypatch, more, message):
    monkeypatch.setattr("headstart.inference.tune.command.load_target", None)
    assert main([*words_of, *more]) != 0
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headstart tune:")]
    assert len(error) == 1 and message in error[0]
