"""From flags and a YAML file to settings: parsed once, unknown names refused with the nearest valid one.

YAML keys become flags that stand before the user's own, so a flag always wins. `--help` explains what people set,
`--help_all` lists everything; no flag at all says what is needed.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from transformers import HfArgumentParser
from transformers.integrations.integration_utils import get_available_reporting_integrations

from ..core.prompts import normalise_row
from ..distill.dataset import DATA_FILES, HUB_NAME, read_rows
from ..drafters.registry import drafter_classes
from .arguments import (
    DataArguments,
    DrafterTrainingArguments,
    EvaluationArguments,
    TargetArguments,
    drafter_arguments,
)
from .joint_arguments import JointArguments
from .manual import short_help
from .processes import check_launch, join_processes
from .watch_arguments import WatchArguments

REQUIRED = {"target": "the language model", "train_data": "what to learn from", "output_dir": "where the results go"}
NOT_RECORDED = ("config", "resume_from_checkpoint", "dry_run", "plot")
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class UsageError(ValueError):
    """The command itself is wrong or incomplete; the message says how it should read."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of a run.

    drafter: the fields of the method's configuration. draft_vocab_size: None means the target's whole vocabulary.
    given: what file and flags set, by name.
    """

    method: str
    target: TargetArguments
    data: DataArguments
    evaluation: EvaluationArguments
    training: DrafterTrainingArguments
    joint: JointArguments
    watch: WatchArguments
    drafter: dict[str, Any]
    draft_vocab_size: int | None
    argv: tuple[str, ...]
    given: dict[str, Any]

    def resolved(self) -> dict[str, Any]:
        """Return every setting that is not at its default, ready to be written as YAML."""
        return {k: v for k, v in self.given.items() if k not in NOT_RECORDED and not k.endswith("_token")}


class _Parser(HfArgumentParser):
    """Keeps the words as they were read: the dataclasses may make something else of them.

    read: values by name, of the last (and only) time.
    """

    read: dict[str, Any]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Namespace, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        self.read = dict(vars(found))
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Loader(yaml.SafeLoader):
    """PyYAML reads 1e-3 as text; here it is a number, as YAML 1.2 says."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(method: str, argv: Sequence[str]) -> Settings:
    """Read the settings of a run.

    argv: flags; `--config FILE.yaml` names a file of further ones, which the others override.

    Raises UsageError for a missing, unknown or malformed setting.
    """
    if not argv:
        raise UsageError(explain(method))
    parser = make_parser(method)
    if help_wanted := [word for word in argv if word in ("-h", "--help", "--help_all")]:
        if is_first_process():
            print(parser.format_help() if "--help_all" in help_wanted else help_of(parser, method), end="")
        raise SystemExit(0)
    names = setting_names(parser)
    config, flags = _take_config(list(argv))
    given = yaml_flags(Path(config), names) if config is not None else []
    check_flags(flags, set(parser._option_string_actions))
    check_launch([*given, *flags])
    join_processes()
    parsed = parser.parse_args_into_dataclasses(
        [*given, *flags], return_remaining_strings=True, look_for_args_file=False
    )
    target, data, drafter, evaluation, training, joint, watch, _, remaining = parsed
    if remaining:
        raise UsageError(f"{remaining[0]!r} belongs to no flag; flags read --name value. `--help` lists them")
    missing = [key for key in REQUIRED if not parser.read[key]]
    if missing:
        raise UsageError(f"missing {', '.join('--' + key for key in missing)}\n\n{explain(method)}")
    check_trackers(training)
    own = asdict(drafter)
    draft_vocab_size = own.pop("draft_vocab_size")
    drafter_classes(method)[0](**own)  # refuses impossible values before anything is loaded
    changed = {key: value for key, value in parser.read.items() if value != parser.get_default(key)}
    read = (target, data, evaluation, training, joint, watch)
    return Settings(method, *read, own, draft_vocab_size, tuple(argv), changed)


def make_parser(method: str) -> _Parser:
    """Return what reads the flags of a method: its configuration's fields, our own, and transformers' arguments."""
    kinds: tuple[Any, ...] = (
        TargetArguments,
        DataArguments,
        drafter_arguments(method),
        EvaluationArguments,
        DrafterTrainingArguments,
        JointArguments,
        WatchArguments,
    )
    command = command_of(method)
    parser = _Parser(
        kinds,
        prog=command.removeprefix("accelerate launch training/"),
        usage=f"{command} --config FILE.yaml [--name value ...]",
        allow_abbrev=False,
        add_help=False,
        description=f"Train a {method} drafter.",
        epilog=explain(method),
    )
    parser.add_argument("--config", help="YAML file with any of these settings as keys; flags override it.")
    parser.add_argument("-h", "--help", action="store_true", help="Print what people set, and end.")
    parser.add_argument("--help_all", action="store_true", help="Print all settings, transformers' included, and end.")
    return parser


def setting_names(parser: HfArgumentParser) -> list[str]:
    """Return the names of all settings, as they stand in a YAML file."""
    flags = {key[2:] for key in parser._option_string_actions if key.startswith("--") and "-" not in key[2:]}
    return sorted(flags - {"config", "help", "help_all"})


def help_of(parser: _Parser, method: str) -> str:
    """Return what `--help` prints: usage, examples, and the settings that people use."""
    command, config = command_of(method), nearest_config(method) or "FILE.yaml"
    examples = [
        f"headstart train {method} --config {config}",
        f"headstart train {method} --config {config} --max_steps 20 --output_dir outputs/try",
        f"headstart train {method} --config {config} --target my-model --train_data train.jsonl.gz --output_dir mine",
    ]
    if command.startswith("accelerate"):
        launch = "accelerate launch --config_file configs/accelerate/8gpu.yaml"
        examples.append(f"{command.replace('accelerate launch', launch)} --config {config}")
    top = [
        f"usage: {parser.usage}",
        f"Train a {method} drafter for a target. Every setting is a flag and a key of the YAML file; the flag wins.\n"
        f"{', '.join(REQUIRED)} must be set.",
        "\n".join(["examples:", *(f"  {example}" for example in examples)]),
    ]
    return short_help(parser, top, DrafterTrainingArguments._argument_group_name)


def command_of(method: str) -> str:
    """Return what starts a run of a method: its entry script, or `headstart train` where it has none."""
    entry = Path(__file__).parent / f"train_{method}.py"
    return f"accelerate launch training/{entry.name}" if entry.exists() else f"headstart train {method}"


def explain(method: str) -> str:
    """Return what a command needs: usage, required keys, and a configuration to start from."""
    width = max(map(len, REQUIRED))
    lines = [
        f"usage: {command_of(method)} --config FILE.yaml [--name value ...]",
        "",
        "required, in the file or as flags:",
        *(f"  --{key:<{width}}  {text}" for key, text in REQUIRED.items()),
    ]
    nearest = nearest_config(method)
    if nearest is not None:
        lines += ["", f"start from: --config {nearest}"]
    return "\n".join([*lines, "", "explained: --help"])


def nearest_config(method: str) -> str | None:
    """Return the path of the configuration to start from, relative to the working directory where it lies below it."""
    found = sorted(CONFIGS.glob(f"{method}*.yaml"), key=lambda path: (len(path.stem), path.stem))
    if not found:
        return None
    here = Path.cwd()
    return str(found[0].relative_to(here)) if found[0].is_relative_to(here) else str(found[0])


def yaml_flags(path: Path, names: Sequence[str]) -> list[str]:
    """Turn a YAML file's keys into flags: lists into several values, mappings into JSON; null leaves the default.

    Raises UsageError for a file that is missing or no mapping, and for a key that is no setting, naming the nearest.
    """
    if not path.is_file():
        near = get_close_matches(path.name, [file.name for file in CONFIGS.glob("*.yaml")], 1)
        raise UsageError(
            f"--config must name a file, but there is no {path}"
            + (f"; did you mean {CONFIGS / near[0]}?" if near else "")
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}  # a SafeLoader
    except yaml.YAMLError as error:
        raise UsageError(f"{path} must be YAML, but is not: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"{path} must hold `name: value` lines, but holds a {type(content).__name__}")
    flags: list[str] = []
    for key, value in content.items():
        if str(key) not in names:
            raise UsageError(f"{path}: {key!r} is no setting{_nearest(str(key), names)}")
        if value is None:
            continue
        flags.append(f"--{key}")
        values = value if isinstance(value, list) else [value]
        flags += [json.dumps(v) if isinstance(v, dict | list) else str(v) for v in values]
    return flags


def check_flags(flags: Sequence[str], known: set[str]) -> None:
    """Raise UsageError for a flag that is no setting, naming the nearest."""
    for flag in flags:
        name = flag.partition("=")[0]
        if name.startswith("--") and name not in known:
            raise UsageError(f"{name} is no setting{_nearest(name, sorted(known))}")


def check_data(data: DataArguments) -> None:
    """Raise ValueError unless every data file is there and its first row can be read; the Hub is not asked.

    For what takes no time to tell, before the target is loaded.
    """
    for source in [*data.train_data, *data.eval_data]:
        if HUB_NAME.fullmatch(source) and not source.endswith(DATA_FILES) and not Path(source).exists():
            continue
        for place, row in read_rows(source):
            if "headstart" in row:  # a header
                continue
            if row.get("answer_ids") is None:
                normalise_row(row, place)
            break
        else:
            raise ValueError(f"{source}: data to learn from must hold at least one row, but there is none")


def check_trackers(args: DrafterTrainingArguments) -> None:
    """Raise UsageError for a tracker in report_to whose package is not installed."""
    available = get_available_reporting_integrations()
    missing = [name for name in args.report_to or () if name not in available]
    if missing:
        there = f"installed are {', '.join(available)}" if available else "no tracker is installed"
        raise UsageError(f"report_to names {missing[0]}, whose package must be installed ({there}): pip install it")


def _nearest(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else "; --help_all lists them"


def _take_config(argv: list[str]) -> tuple[str | None, list[str]]:
    config, rest = None, []
    words = iter(argv)
    for word in words:
        if word == "--config":
            config = next(words, None)
            if config is None:
                raise UsageError("--config needs a file name")
        elif word.startswith("--config="):
            config = word.partition("=")[2]
        else:
            rest.append(word)
    return config, rest


def is_first_process() -> bool:
    """Whether this process speaks for all; known from the environment before the processes have joined."""
    return os.environ.get("RANK", "0") == "0"


def take_debug(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Take a `--debug` without value out of the flags: tracebacks are shown. With a value it is transformers' own."""
    kept, asked = [], False
    for i, word in enumerate(argv):
        if word == "--debug" and (i + 1 == len(argv) or argv[i + 1].startswith("--")):
            asked = True
        else:
            kept.append(word)
    return asked, kept


def report_failure(error: Exception, traceback_shown: bool) -> int:
    """Print a user's error without its traceback; return the exit status."""
    first = is_first_process()
    if isinstance(error, UsageError):
        if first:
            print(str(error) if str(error).startswith("usage:") else f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if traceback_shown:
        raise error
    place = "" if first else f" (process {os.environ.get('RANK')})"
    print(f"error{place}: {error}\n(--debug shows where)", file=sys.stderr, flush=True)
    return 1
