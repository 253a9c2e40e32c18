"""What the subcommands share: a parser that names the nearest option, checked numbers, and progress for people.

Answers go to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

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


def add_target(parser: argparse.ArgumentParser) -> None:
    """Declare how a target is named and loaded."""
    group = parser.add_argument_group("target")
    group.add_argument("--target", required=True, metavar="NAME", help="the model: a folder or a Hub id")
    group.add_argument("--target_revision", metavar="REV", help="branch, tag or commit on the Hub")
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="default: the checkpoint's own")


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
