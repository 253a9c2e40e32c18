"""The command line: help, exit codes, one line for a user's mistake, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_targets import tiny_target
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart import __version__, build_drafter
from headstart.cli import COMMANDS, main
from headstart.core.prompts import read_jsonl
from headstart.distill.respond import write_lines


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


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture) -> None:
    try:
        code = main([command, "--help"])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 0
    assert f"headstart {command}" in capsys.readouterr().out.split("example", 1)[1]


def test_train_names_the_nearest_method_and_explains_itself(capsys: pytest.CaptureFixture) -> None:
    assert main(["train"]) == 2
    assert "METHOD is one of: medusa" in capsys.readouterr().err
    assert main(["train", "medussa"]) == 2
    assert "did you mean 'medusa'" in capsys.readouterr().err
    assert main(["train", "medusa"]) == 2
    assert "target" in capsys.readouterr().err


def test_users_mistake_is_one_line_and_exit_code_two(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["generate", "--target", str(tmp_path / "nothing"), "--drafter", "x", "--prompt", "hi"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("headstart generate: a target must be a folder or a Hub id")
    assert "Traceback" not in error
    with pytest.raises(ValueError, match="a target must be"):
        main([*words, "--debug"])


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


def test_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def interrupted(_name: str, _argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.inference.command.main", interrupted)
    assert main(["chat"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_threads_of_the_process_are_left_alone() -> None:
    before = torch.get_num_threads()
    main(["--version"])
    assert torch.get_num_threads() == before
