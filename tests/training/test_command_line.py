"""From flags and YAML to settings, and what is said when they are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser

from headstart.drafters.registry import METHODS
from headstart.training.arguments import drafter_arguments, texts_of
from headstart.training.command_line import UsageError, check_data, command_of, parse
from headstart.training.manual import USUAL
from headstart.training.run import main

ROOT = Path(__file__).resolve().parents[2]
Flags = Callable[..., list[str]]


def written(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_command_without_arguments_explains_itself(capsys) -> None:
    assert main("medusa", []) == 2
    told = capsys.readouterr().err
    for part in ("usage: accelerate launch", "--target", "--train_data", "--output_dir", "configs/medusa.yaml"):
        assert part in told


@pytest.mark.parametrize("method", sorted(METHODS))
def test_help_explains_what_people_set_and_help_all_lists_everything(method: str, capsys) -> None:
    told = {}
    for flag in ("-h", "--help", "--help_all"):
        with pytest.raises(SystemExit) as ended:
            main(method, ["--config", "nowhere.yaml", flag])
        assert ended.value.code == 0
        told[flag] = capsys.readouterr().out
    short, every = told["--help"], told["--help_all"]
    assert short == told["-h"] and short.startswith(f"usage: {command_of(method)}")
    assert f"headstart train {method} --config" in short.split("examples:")[1] and "--help_all" in short
    own = [field.name for field in fields(drafter_arguments(method))]
    for name in (*own, *USUAL, "train_data", "target", "eval_prompts", "config"):
        assert f"  --{name} " in short or f"  --{name}\n" in short
    assert "See `" not in short, "every field of the configuration is explained in its docstring"
    assert "--adafactor" not in short and "fp16_full_eval" not in short and "--fp16_full_eval" in every
    assert short.index("--num_train_epochs") < short.index("--per_device") < short.index("--learning_rate")
    assert max(map(len, short.splitlines())) <= 130


def test_texts_of_fields_come_from_the_docstring() -> None:
    class Config:
        """A configuration.

        width: how wide, in pixels. Not much. tall, deep: the other
        two. flat: "yes" or "no: never".
        """

        def __init__(self, width: int, tall: int, deep: int, flat: str, untold: int) -> None: ...

    assert texts_of(Config) == {
        "width": "How wide, in pixels. Not much.",
        "tall": "tall and deep: the other two.",
        "deep": "tall and deep: the other two.",
        "flat": '"yes" or "no: never".',
    }


def test_data_is_looked_at_before_the_target_is_loaded(command: Flags, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("headstart.training.run.load_target", None)
    empty, malformed = tmp_path / "empty.jsonl", tmp_path / "malformed.jsonl"
    empty.write_text('{"headstart": "answers", "version": 1}\n', encoding="utf-8")
    malformed.write_text('{"text": "no conversation"}\n', encoding="utf-8")
    for flag, source, wrong in (
        ("--train_data", str(tmp_path / "nowhere.jsonl"), "a data source must be a file or folder that exists"),
        ("--eval_data", __file__, "a data file must end in"),
        ("--eval_data", str(empty), "must hold at least one row"),
        ("--train_data", str(malformed), f"{malformed}, line 1"),
    ):
        assert main("medusa", command(flag, source)) == 1
        told = capsys.readouterr().err
        assert wrong in told and "Traceback" not in told


def test_data_of_the_hub_is_not_fetched_to_be_looked_at(command: Flags, monkeypatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)
    check_data(parse("medusa", command("--train_data", "owner/name")).data)


def test_missing_settings_are_named(capsys) -> None:
    assert main("medusa", ["--target", "owner/name"]) == 2
    assert "missing --train_data, --output_dir" in capsys.readouterr().err


def test_unknown_flag_is_refused_with_the_nearest(command: Flags) -> None:
    with pytest.raises(UsageError, match="--nun_heads is no setting; did you mean --num_heads"):
        parse("medusa", command("--nun_heads", "3"))


def test_abbreviated_flag_is_refused(command: Flags) -> None:
    with pytest.raises(UsageError, match="--learning_r is no setting; did you mean --learning_rate"):
        parse("medusa", command("--learning_r", "1"))


def test_unknown_key_of_a_file_is_refused_with_the_nearest(command: Flags, tmp_path: Path) -> None:
    config = written(tmp_path, "num_epochs: 3\n")
    with pytest.raises(UsageError, match=r"config.yaml: 'num_epochs' is no setting; did you mean num_\w+\?"):
        parse("medusa", command("--config", config))


def test_stray_word_is_refused(command: Flags) -> None:
    with pytest.raises(UsageError, match="'3' belongs to no flag"):
        parse("medusa", ["3", *command()])


@pytest.mark.parametrize("where", ["before", "after"])
def test_flag_wins_over_the_file_wherever_it_stands(command: Flags, tmp_path: Path, where: str) -> None:
    config = ["--config", written(tmp_path, "max_steps: 5\nlearning_rate: 1e-5\nseed: 7\n")]
    flags = ["--max_steps", "9"]
    settings = parse("medusa", command(*(flags + config if where == "before" else config + flags)))
    assert settings.training.max_steps == 9
    assert settings.training.learning_rate == 1e-5
    assert settings.training.seed == 7


def test_file_may_hold_lists_mappings_numbers_switches_and_nothing(command: Flags, tmp_path: Path) -> None:
    text = (
        "eval_data: [a.jsonl, b.jsonl]\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1e-5}\n"
        "bf16: true\ntarget_revision: null\nsave_total_limit: 3\n"
    )
    settings = parse("medusa", command("--config", written(tmp_path, text)))
    assert settings.data.eval_data == ["a.jsonl", "b.jsonl"]
    assert settings.training.lr_scheduler_kwargs == {"min_lr": 1e-5}
    assert settings.training.bf16 is True
    assert settings.target.target_revision is None


@pytest.mark.parametrize("text", ["- 1\n- 2\n", "just words\n", "a: [1\n"])
def test_file_that_is_no_mapping_is_refused(command: Flags, tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"config\.yaml must"):
        parse("medusa", command("--config", written(tmp_path, text)))


def test_missing_file_is_named_with_the_nearest(command: Flags) -> None:
    with pytest.raises(UsageError, match=r"there is no configs/medusa\.yam; did you mean .*medusa\.yaml"):
        parse("medusa", command("--config", "configs/medusa.yam"))


def test_fields_of_the_drafter_are_flags(command: Flags) -> None:
    settings = parse("medusa", command("--num_layers", "2", "--projection", "shared", "--draft_vocab_size", "12"))
    assert settings.drafter["num_layers"] == 2
    assert settings.drafter["projection"] == "shared"
    assert settings.draft_vocab_size == 12


def test_mappings_of_the_drafter_are_read_from_flags_and_files(command: Flags, tmp_path: Path) -> None:
    tree = {"nodes": 9, "stop_below": 0.1}
    assert parse("medusa", command()).drafter["dynamic_tree"] is None
    assert parse("medusa", command("--dynamic_tree", json.dumps(tree))).drafter["dynamic_tree"] == tree
    file = written(tmp_path, "dynamic_tree: {nodes: 9, stop_below: 0.1}\n")
    assert parse("medusa", command("--config", file)).drafter["dynamic_tree"] == tree
    for text in ("[9]", "nine"):
        with pytest.raises(UsageError, match=r"--dynamic_tree.*: invalid mapping value"):
            parse("medusa", command("--dynamic_tree", text))


@pytest.mark.parametrize(
    "flags",
    [
        ["--num_heads", "0"],
        ["--loss", "mse"],
        ["--held_out_fraction", "1.5"],
        ["--max_length", "1"],
        ["--tree_nodes", "1"],
        ["--load_in_4bit", "--load_in_8bit"],
        ["--num_heads"],
        ["--num_heads", "many"],
    ],
)
def test_impossible_value_is_refused_before_anything_is_loaded(command: Flags, flags: list[str]) -> None:
    with pytest.raises(ValueError):
        parse("medusa", command(*flags))


def test_name_that_is_neither_folder_nor_hub_id_is_refused(command: Flags, capsys) -> None:
    assert main("medusa", command("--target", "smollm2")) == 1
    told = capsys.readouterr().err
    assert "'smollm2' is neither" in told and "Traceback" not in told


def test_loading_in_4_bit_without_bitsandbytes_is_refused(command: Flags, capsys) -> None:
    if find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    assert main("medusa", command("--load_in_4bit")) == 1
    assert "needs bitsandbytes" in capsys.readouterr().err


def test_tracker_that_is_not_installed_is_named(command: Flags) -> None:
    with pytest.raises(UsageError, match="report_to names no_such_tracker"):
        parse("medusa", command("--report_to", "no_such_tracker"))


def test_words_are_parsed_once(command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, parse_known_args = [], HfArgumentParser.parse_known_args

    def noted(self: HfArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        seen.append(args)
        return parse_known_args(self, args, namespace)

    monkeypatch.setattr(HfArgumentParser, "parse_known_args", noted)
    settings = parse("medusa", command("--config", written(tmp_path, "seed: 7\nmax_steps: 5\n"), "--max_steps", "9"))
    assert len(seen) == 1 and seen[0][:4] == ["--seed", "7", "--max_steps", "5"]
    assert settings.given["max_steps"] == 9 and settings.given["seed"] == 7


def test_debug_shows_the_traceback(command: Flags) -> None:
    with pytest.raises(ValueError, match="neither"):
        main("medusa", command("--target", "smollm2", "--debug"))


def test_resolved_settings_give_the_same_settings_again(command: Flags, tmp_path: Path) -> None:
    first = parse("medusa", command("--draft_vocab_size", "9", "--learning_rate", "3e-4", "--hub_token", "secret"))
    assert "hub_token" not in first.resolved()
    again = parse("medusa", ["--config", written(tmp_path, yaml.safe_dump(first.resolved()))])
    assert again.resolved() == first.resolved()
    assert (again.target, again.data, again.evaluation, again.drafter) == (
        first.target,
        first.data,
        first.evaluation,
        first.drafter,
    )


def test_method_is_started_by_its_entry_script_or_by_the_command() -> None:
    assert command_of("medusa") == "accelerate launch training/train_medusa.py"
    assert command_of("mlp") == "headstart train mlp"


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configuration_is_complete_and_starts_with_its_command(config: Path, command: Flags) -> None:
    first = config.read_text(encoding="utf-8").splitlines()[0]
    method = max((method for method in METHODS if config.stem.startswith(method)), key=len)
    assert first.startswith(f"# {command_of(method)} --config configs/{config.name}")
    settings = parse(method, ["--config", str(config), "--train_data", "answers", "--bf16", "false"])
    assert settings.target.target and settings.training.output_dir
