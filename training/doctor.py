"""`headstart doctor`: is everything there that a run needs, and does it fit together? Changes nothing.

Imports little before the packages have been looked at: an environment that cannot import PyTorch is told, not met.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .doctor_packages import check_packages
from .findings import NOTE, OK, WRONG, Finding

DESCRIPTION = """Look whether a run would work: packages, devices, disk, and, where they are named, the target (its
configuration and tokenizer, not its weights), the data (the first rows) and a configuration.
Asks no network without --online. Exit status: 0 if nothing is wrong, else 1."""

EXAMPLES = [
    "headstart doctor",
    "headstart doctor --config configs/medusa.yaml",
    "headstart doctor --target my-model --data train.jsonl.gz --json",
]
STYLES = {OK: "green", NOTE: "yellow", WRONG: "bold red"}


def main(name: str, argv: Sequence[str]) -> int:
    """Run `headstart doctor`; return its exit status."""
    packages = check_packages()
    try:
        with redirect_stdout(io.StringIO()):  # some libraries greet on import; standard output is for the answer
            from .doctor_run import checkup
            from .doctor_run import parse as parse_options
    except Exception as error:  # a broken installation may raise anything
        broken = Finding("packages", "import", WRONG, f"{type(error).__name__}: {error}", "install headstart anew")
        return show([*packages, broken], as_json="--json" in argv)
    options: Namespace = parse_options(f"headstart {name}", DESCRIPTION, EXAMPLES, argv)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what matters of them is a finding
        findings = [*packages, *checkup(options)]
    return show(findings, options.json)


def show(findings: Sequence[Finding], as_json: bool) -> int:
    """Print findings for people or programs; return the exit status."""
    wrong = [finding for finding in findings if finding.status == WRONG]
    if as_json:
        print(json.dumps({"ok": not wrong, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return int(bool(wrong))
    console = Console(file=sys.stdout, highlight=False)
    for group, members in groupby(findings, key=lambda finding: finding.group):
        table = Table(box=None, show_header=False, padding=(0, 1), title=group, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for finding in members:
            told = finding.found + (f"\n→ {finding.remedy}" if finding.remedy else "")
            table.add_row(Text(finding.status, STYLES[finding.status]), finding.name, Text(told))
        console.print(table)
        console.print()
    notes = sum(finding.status == NOTE for finding in findings)
    told = f"{len(wrong)} wrong: {', '.join(one.name for one in wrong)}" if wrong else "nothing is wrong"
    console.print(Text(f"{told}; {notes} {'note' if notes == 1 else 'notes'}", STYLES[WRONG if wrong else OK]))
    return int(bool(wrong))
