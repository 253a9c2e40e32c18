import json

import pytest

from headstart.cli import main
from headstart.inference.bench.command import load_drafters
from headstart.inference.loading import load_target


@pytest.fixture
def words_of(saved):
    """Return the words of a small run on the saved target."""
    return [
        "bench", "--target", str(saved["target"]), "--drafters", f"{saved['heads']},{saved['heads']}",
        "--prompts", str(saved["prompts"]), "--num_prompts", "2", "--max_new_tokens", "6", "--dtype", "float32",
        "--warm_up", "0", "--seed", "1",
    ]  # fmt: skip


def test_json_without_a_file_is_all_that_stands_on_standard_output(words_of, capsys):
    assert main([*words_of, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert list(report["methods"]) == ["autoregressive", "heads", "heads'"]
    assert report["machine"]["dtype"] == "float32" and report["prompts"]["ids"] == ["81", "82"]
    assert all(one["num_different"] == 0 for one in report["methods"].values())
    assert "speed ratio" in err


def test_json_file_pictures_and_table_come_from_one_run(words_of, capsys, tmp_path):
    out, pictures = tmp_path / "deep" / "bench.json", tmp_path / "plots"
    more = ["--json", str(out), "--plots", str(pictures), "--costs", "--cost_contexts", "8,16", "--prompt_lookup"]
    assert main([*words_of, *more]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["settings"]["cost_contexts"] == [8, 16] and "prompt_lookup" in report["methods"]
    assert sorted(path.name for path in pictures.iterdir()) == ["acceptance.png", "costs.png", "speed.png"]
    assert "speed ratio" in capsys.readouterr().out


def test_sweep_is_one_run_with_table_json_and_picture(words_of, capsys, tmp_path):
    out, pictures = tmp_path / "sweep.json", tmp_path / "plots"
    more = ["--sweep", "draft_length=1..3", "--cost_contexts", "8", "--json", str(out), "--plots", str(pictures)]
    words_of[4] = words_of[4].partition(",")[0]
    assert main([*words_of, *more]) == 0
    sweep = json.loads(out.read_text(encoding="utf-8"))["sweep"]
    assert [point["value"] for point in sweep["points"]] == [1, 2]
    told = capsys.readouterr().out
    assert "heads guesses at most 2 tokens ahead: draft_length=3 and beyond is left out" in told and "formula" in told
    assert [path.name for path in pictures.iterdir()] == ["sweep.png"]


def test_sampled_run_needs_no_drafter_to_be_named(saved, capsys):
    words = ["bench", "--target", str(saved["target"]), "--num_prompts", "1", "--max_new_tokens", "4", "--warm_up", "0"]
    words += ["--prompts", str(saved["prompts"]), "--temperature", "0.9", "--threads", "1", "--json"]
    assert main(words) == 0
    assert list(json.loads(capsys.readouterr().out)["methods"]) == ["autoregressive", "no_drafter"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--num_prompts", "0"], "--num_prompts: must be a whole number of at least 1"),
        (["--top_p", "0.5"], "need a temperature"),
        (["--costs", "--cost_contexts", "8;16"], "whole numbers"),
        (["--drafters", "no-such-folder"], "no-such-folder"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--batch_size", "2", "--prompt_lookup"], "one row at a time"),
        (["--sweep", "draft_lenght=1..3"], "did you mean 'draft_length'"),
        (["--drafters", "", "--sweep", "nodes=4"], "name one with --drafters"),
        (["--drafter", "heads"], "there is no option --drafter; did you mean --drafters?"),
        (["--device", "cuda:99"], "--device: must be one of cpu"),
        (["--device", "gpu"], "but is 'gpu'"),
        (["--json", "."], "must be a file"),
        (["--plots", __file__], "must be a folder"),
    ],
)
def test_mistake_is_told_in_one_line_before_the_target_is_loaded(words_of, capsys, monkeypatch, more, message):
    monkeypatch.setattr("headstart.inference.bench.command.load_target", None)
    assert main([*words_of, *more]) != 0
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("headstart bench:")]
    assert len(error) == 1 and message in error[0]


def test_drafters_take_the_dtype_of_the_target(saved):
    model, _ = load_target(str(saved["target"]), "bfloat16")
    drafters = load_drafters(model, f" {saved['heads']} ,")
    assert list(drafters) == ["heads"] and drafters["heads"].dtype == model.dtype
    assert load_drafters(model, "") == {}
