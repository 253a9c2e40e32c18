"""The command line: help, exit codes, one line for a user's mistake, JSON for programs."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import tiny_target
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from headstart import __version__, build_drafter
from headstart.cli import COMMANDS, main
from headstart.core.prompts import read_jsonl
from headstart.distill.respond import write_lines
from headstart.drafters.registry import METHODS
from headstart.inference.options import working


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def target_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> Path:
    folder = tmp_path / "target"
    tiny_target("llama").model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    build_drafter("medusa", tiny_target("llama").model).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_without_a_command_the_usage_is_told(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    assert "usage: headstart COMMAND" in capsys.readouterr().err
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in COMMANDS)


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headstart {__version__}\n"


def test_misspelt_command_names_the_nearest(capsys: pytest.CaptureFixture) -> None:
    assert main(["benhc"]) == 2
    assert "did you mean 'bench'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [[name] for name in sorted(COMMANDS)] + [["distill", action] for action in ("select", "inspect", "capture")],
)
def test_help_of_every_command_has_an_example(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main([*words, "--help"]) == 0
    assert f"headstart {' '.join(words)}" in capsys.readouterr().out.split("example", 1)[1]


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture) -> None:
    assert main(["help"]) == 0
    told = capsys.readouterr().out
    assert "exit codes: 0 done, 1 failed, 2 wrong usage, 75 saved" in told and "130 interrupted" in told
    assert "--debug" in told


def test_train_names_the_nearest_method_and_explains_itself(capsys: pytest.CaptureFixture) -> None:
    assert main(["train"]) == 2
    said = capsys.readouterr().err
    assert all(method in said.split("METHOD is one of:")[1].split("examples:")[0] for method in METHODS)
    assert main(["train", "medussa"]) == 2
    assert "did you mean 'medusa'" in capsys.readouterr().err
    assert main(["train", "medusa"]) == 2
    assert "target" in capsys.readouterr().err


def test_failure_is_one_line_and_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["generate", "--target", str(tmp_path / "nothing"), "--drafter", "x", "--prompt", "hi"]
    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("headstart generate: a target must be a folder or a Hub id")
    assert error.count("\n") == 1
    for debug in (["--debug", *words], [*words, "--debug"], [words[0], "--debug", *words[1:]]):
        with pytest.raises(ValueError, match="a target must be"):
            main(debug)


def test_debug_before_train_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("headstart.training.command.main", lambda _name, words: asked.append(words) or 0)
    assert main(["--debug", "train", "medusa", "--x"]) == main(["train", "medusa", "--debug", "underflow"]) == 0
    assert asked == [["medusa", "--x", "--debug"], ["medusa", "--debug", "underflow"]]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["generate", "--taget", "x"], "there is no option --taget; did you mean --target?"),
        (["generate", "--target", "x"], "required: --drafter"),
        (["chat", "--max_new_tokens", "0"], "--max_new_tokens: must be a whole number of at least 1, but is '0'"),
        (["chat", "--max_new_tokens", "many"], "must be a whole number of at least 1, but is 'many'"),
        (["generate", "--temperature", "nan"], "must be a number of at least 0, but is 'nan'"),
        (["generate", "--top_p=1.5"], "must be a number of at least 0 and at most 1, but is '1.5'"),
        (["generate", "--dtype", "int7"], "invalid choice: 'int7'"),
        (["chat", "--device", "gpu"], "--device: must be one of cpu"),
        (["bench", "--cost_contexts", "8;16"], "--cost_contexts: must be whole numbers of at least 1, separated by"),
        (["tune", "--batch_sizes", "0"], "--batch_sizes: must be whole numbers of at least 1, separated by"),
        (["tune", "--drafters", "x"], "there is no option --drafters; did you mean --drafter?"),
        (["distill", "capture", "--device", "cuda:99"], "--device: must be one of cpu"),
        (["distill", "--out"], "--out: expected one argument"),
        (["distill", "slect", "x"], "there is no action 'slect'; did you mean 'select'?"),
        (["distill", "folder"], "there is no action 'folder'; known are select, inspect, capture"),
        (["distill", "select"], "required: folder, --out"),
        (["distill", "inspect", "--limt", "2"], "there is no option --limt; did you mean --limit?"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_two(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(words) == 2
    told = capsys.readouterr()
    first, *rest = told.err.splitlines()
    assert complaint in first and first.startswith("headstart ") and not told.out
    assert all("--help explains" in line for line in rest) and len(rest) <= 1


def test_output_that_nobody_reads_any_more_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["--help"]) == 141
    assert not capsys.readouterr().err


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `headstart chat` raise."""

    def failing(_name: str, _words: list[str]) -> int:
        raise error

    monkeypatch.setattr("headstart.inference.command.main", failing)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("tried to allocate 3 GiB")])
def test_too_little_memory_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, error: Exception
) -> None:
    fails_with(monkeypatch, error)
    assert main(["chat"]) == 1
    assert "out of memory" in capsys.readouterr().err


def test_our_own_mistakes_show_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        main(["chat"])


def test_distill_select_and_inspect_in_a_row(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompts, out, chosen = tmp_path / "prompts.jsonl", tmp_path / "answers", tmp_path / "train.jsonl.gz"
    write_lines(prompts, [{"turns": [word]} for word in ("one two", "three", "four five")])
    common = ["--target", str(target_folder), "--prompts", str(prompts), "--out", str(out)]
    assert main(["distill", *common, "--max_new_tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["answered"] == 3
    assert main(["distill", *common, "--max_new_tokens", "8"]) == 0
    assert "3 were there already" in capsys.readouterr().out
    finished = {"id": "x", "prompt_ids": [1, 5], "answer_ids": [5, 6, 7, 2], "finish_reason": "stop"}
    write_lines(out / "answers-00009.jsonl", [finished])
    assert main(["distill", "select", str(out), "--out", str(chosen), "--cut_share", "0"]) == 0
    assert "of 4 answers" in capsys.readouterr().out
    assert finished in [row for _, row in read_jsonl(chosen)]
    assert main(["distill", "inspect", str(out), "--target", str(target_folder), "--limit", "1"]) == 0
    assert "4 rows" in capsys.readouterr().out
    assert main(["distill", "inspect", str(out), "--target", str(target_folder), "--limit", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"] == 4 and len(told["shown"]) == 1 and any(told["shown"][0]["loss_mask"])


def test_distill_names_what_is_wrong_before_it_loads_a_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    words = ["distill", "--target", "nowhere/at-all", "--prompts", str(prompts), "--out", str(out)]
    write_lines(prompts, [{"turns": ["one"]}, {"turns": [" "]}])
    assert main(words) == 1
    assert f"{prompts}, line 2, message 1: a user message must say something" in capsys.readouterr().err
    write_lines(prompts, [])
    assert main(words) == 1
    assert f"{prompts}: prompts must hold at least one row" in capsys.readouterr().err
    assert main([*words[:-1], str(prompts)]) == 1
    assert "--out must be a folder" in capsys.readouterr().err


def test_generate_reads_standard_input_and_refuses_an_empty_prompt(
    target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ["generate", "--target", str(target_folder), "--drafter", str(drafter_folder), "--max_new_tokens", "4"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\n"))
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"]
    for prompt, place in ([], "standard input"), (["--prompt", " "], "--prompt"):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main([*words, *prompt]) == 1
        assert f"{place} must say something, but is empty" in capsys.readouterr().err
    assert main([*words, "--prompt", "half \udcff"]) == 1
    assert "--prompt: text must be whole characters" in capsys.readouterr().err


def test_drafter_is_looked_for_before_the_target_is_loaded(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("the target was loaded for nothing")

    for module in ("inference", "distill"):
        monkeypatch.setattr(f"headstart.{module}.command.load_target", loaded)
    words = ["--target", str(target_folder), "--drafter", str(target_folder)]
    for command in (["chat"], ["generate", "--prompt", "one"], ["distill", "--out", str(tmp_path / "out")]):
        assert main([*command, *words]) == 1
        assert "is a transformers model" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [True, False])
def test_work_that_takes_a_while_is_shown_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    bars = logging.is_progress_bar_enabled()
    with working("thinking"):
        assert not logging.is_progress_bar_enabled()
    told = capsys.readouterr()
    assert ("thinking" in told.err) == terminal and not told.out
    assert logging.is_progress_bar_enabled() == bars


def test_setting_without_effect_and_missing_template_are_warned_of(
    target_folder: Path, drafter_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (target_folder / "chat_template.jinja").unlink()
    words = ["generate", "--target", str(target_folder), "--drafter", str(drafter_folder), "--prompt", "one"]
    with pytest.warns(UserWarning) as told:
        assert main([*words, "--max_new_tokens", "3", "--top_p", "0.5", "--json"]) == 0
    assert ["--top_p has no effect at temperature 0" in str(one.message) for one in told] == [True, False]
    assert ["no chat template" in str(one.message) for one in told] == [False, True]
    assert json.loads(capsys.readouterr().out)["token_ids"]


def test_select_refuses_what_it_cannot_use(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    words = ["distill", "select", str(folder), "--out", str(tmp_path / "new" / "train.jsonl")]

    def told(code: int, **rows: Any) -> str:
        if rows:
            write_lines(folder / "answers-00000.jsonl", list(rows.values()))
        assert main(words) == code
        return capsys.readouterr().err

    answer = {"id": "a", "prompt_ids": [1], "answer_ids": [5, 2], "finish_reason": "stop"}
    assert "must be a folder of shards" in told(1)
    assert "line 1: `answer_ids` must be a list of token ids, found None" in told(1, row={"id": "a"})
    assert "line 1: `finish_reason` must be stop, length or loop" in told(1, row=answer | {"finish_reason": "?"})
    one, other = ({"headstart": "answers", "version": 1, "tokenizer_fingerprint": mark} for mark in "ab")
    assert "line 2: all answers must be one model's, but tokenizer_fingerprint is 'b'" in told(1, one=one, other=other)
    assert told(0, header=one, row=answer) == ""
    words[-1] = str(tmp_path / "train.txt")
    assert "--out must be a file ending in .jsonl" in told(1)


def test_generate_prints_text_for_people_and_json_for_programs(
    target_folder: Path, drafter_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["generate", "--target", str(target_folder), "--drafter", str(drafter_folder), "--prompt", "one two"]
    assert main([*words, "--max_new_tokens", "6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["token_ids"]) <= 6
    assert told["stats"]["tokens_per_step"] >= 1
    assert main([*words, "--max_new_tokens", "6", "--temperature", "0.7", "--seed", "1"]) == 0
    assert "tokens per step" in capsys.readouterr().err


def test_drafter_trained_on_another_template_is_used_with_a_warning(
    target_folder: Path, drafter_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    config = json.loads((drafter_folder / "config.json").read_text())
    config["chat_template_fingerprint"] = "sha256:0123456789abcdef"
    (drafter_folder / "config.json").write_text(json.dumps(config))
    words = ["generate", "--target", str(target_folder), "--drafter", str(drafter_folder), "--prompt", "one"]
    with pytest.warns(UserWarning, match="another chat template"):
        assert main([*words, "--max_new_tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"]


def test_chat_streams_answers_until_quit(
    target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = iter(["one two", "/new", "", "three", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(said))
    words = ["chat", "--target", str(target_folder), "--drafter", str(drafter_folder), "--max_new_tokens", "5"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("tokens per step") == 2


def test_chat_ends_with_the_input(target_folder: Path, drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_more(_prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nothing_more)
    assert main(["chat", "--target", str(target_folder), "--drafter", str(drafter_folder)]) == 0


def test_interrupt_is_one_line_and_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    assert main(["chat"]) == 130
    assert capsys.readouterr().err.strip() == "headstart chat: interrupted"


def test_threads_of_the_process_are_left_alone() -> None:
    before = torch.get_num_threads()
    main(["--version"])
    assert torch.get_num_threads() == before
