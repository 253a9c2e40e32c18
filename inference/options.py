"""What the subcommands share: a parser that names the nearest option, checked values, reports, progress for people.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers.utils import logging

from .loading import DTYPES


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line, and name the option that was probably meant."""

    def __init__(self, prog: str, description: str, examples: Sequence[str]) -> None:
        epilog = "\n".join(["examples:", *(f"  {example}" for example in examples)])
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, epilog=epilog, formatter_class=formatter, allow_abbrev=False)

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the words of a command. A wrong option is named before what it leaves missing is missed."""
        for word in argv:
            name = word.partition("=")[0]
            if word == "--":
                break
            if word.startswith("--") and name not in self._option_string_actions:
                near = get_close_matches(name, self._option_string_actions, 1)
                self.error(f"there is no option {name}" + (f"; did you mean {near[0]}?" if near else ""))
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n({self.prog} --help explains)\n")


def whole(at_least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers from `at_least` up."""

    def read(text: str) -> int:
        try:
            if (number := int(text)) >= at_least:
                return number
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {at_least}, but is {text!r}")

    return read


def real(at_least: float = 0.0, at_most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of finite numbers within bounds."""

    def read(text: str) -> float:
        try:
            if math.isfinite(number := float(text)) and at_least <= number <= at_most:
                return number
        except ValueError:
            pass
        most = f" and at most {at_most:g}" if math.isfinite(at_most) else ""
        raise argparse.ArgumentTypeError(f"must be a number of at least {at_least:g}{most}, but is {text!r}")

    return read


def wholes(at_least: int) -> Callable[[str], tuple[int, ...]]:
    """Return a reader of whole numbers from `at_least` up, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        try:
            if min(numbers := tuple(int(part) for part in text.split(","))) >= at_least:
                return numbers
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(
            f"must be whole numbers of at least {at_least}, separated by commas, but is {text!r}"
        )

    return read


def device(text: str) -> str:
    """Return the name of a device that is there."""
    try:
        torch.empty(0, device=torch.device(text))
    except (RuntimeError, AssertionError) as error:  # torch's own words are a page long
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(there)}, but is {text!r}") from error
    return text


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare how a target is named and loaded."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", required=True, metavar="NAME", help="the model: a folder or a Hub id")
    group.add_argument("--target_revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="default: the checkpoint's own")
    group.add_argument("--device", type=device, metavar="NAME", help="default: the first GPU, if there is one")


def add_measured(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare what commands that measure have in common; return the group of what they write."""
    group = parser.add_argument_group("answers")
    group.add_argument("--max_new_tokens", type=whole(1), default=128, metavar="N",
                       help="longest answer (default %(default)s)")  # fmt: skip
    group.add_argument("--temperature", type=real(), default=0.0, metavar="T", help="0 is greedy (default %(default)s)")
    group.add_argument("--top_p", type=real(0, 1), default=1.0, metavar="P",
                       help="when sampling: the likeliest share of tokens (default %(default)s)")  # fmt: skip
    group.add_argument("--top_k", type=whole(0), default=0, metavar="K",
                       help="when sampling: the likeliest K tokens; 0: all (default %(default)s)")  # fmt: skip
    group.add_argument("--seed", type=whole(0), default=0,
                       help="of sampled text and of the intervals (default %(default)s)")  # fmt: skip
    group = parser.add_argument_group("output")
    group.add_argument("--json", nargs="?", const="-", metavar="OUT",
                       help="write the report as JSON to a file, or without one to standard output")  # fmt: skip
    return group


def check_writable(place: str | Path, folder: bool = False) -> None:
    """Raise ValueError, before a long run, where its file (or folder) could not be written; "-" always can."""
    path = Path(place)
    if str(place) == "-":
        return
    if path.exists() and path.is_dir() != folder:
        raise ValueError(f"{place} must be a {'folder' if folder else 'file'}, but is none; name another place")
    above = next(one for one in (path, *path.absolute().parents) if one.exists())
    if not os.access(above, os.W_OK) or (above != path and not above.is_dir()):
        raise ValueError(f"{place} must be a place that can be written, but {above} cannot; name another place")


def write_json(report: dict[str, Any], place: str) -> None:
    """Write a report to a file, whole or not at all; "-" is standard output."""
    text = json.dumps(report, ensure_ascii=False, indent=1)
    if place == "-":
        print(text)
        return
    out = Path(place)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(out)


def add_adapter(group: Any) -> None:
    """Declare that a drafter may change its target, in the group that names the drafter."""
    group.add_argument(
        "--apply_adapter",
        action="store_true",
        help="put on the target the adapter that was trained with the drafter; it changes what the target says",
    )


@contextmanager
def working(what: str, target: str = "") -> Iterator[None]:
    """Show what takes a while and for how long, on standard error, where that is a terminal.

    target: a name that is no folder is fetched from the Hub, which shows its own progress; then nothing is shown here.
    """
    if target and not Path(target).expanduser().is_dir():
        yield
        return
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # transformers would leave a line for every file that it loads
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", style="dim"), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(what)
            yield
    finally:
        if bars:
            logging.enable_progress_bar()
