"""The `headstart` command: each subcommand parses its own arguments and calls one function.

A user's mistake ends with one line that says what must hold, what was found and what to do, and exit code 2; `--debug`
shows the traceback. Ctrl-C exits with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "distill": ("distill.command", "the target's own answers to prompts, as training data"),
    "train": ("training.command", "train a drafter on them: headstart train medusa --config configs/medusa.yaml"),
    "bench": ("inference.bench.command", "compare drafters with the model alone, on the same prompts"),
    "generate": ("inference.command", "answer a prompt with a drafter"),
    "chat": ("inference.command", "talk to a target with a drafter, answers streamed"),
}

USAGE = "\n".join(
    [
        "usage: headstart COMMAND [options]; headstart COMMAND --help explains one",
        "",
        *(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()),
        "",
        "options for every command: --help, --debug (tracebacks), and --version without a command",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    if words[:1] != ["train"]:  # which has a --debug of its own, and reports errors before `accelerate launch` does
        words = [word for word in words if word != "--debug"]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    name, *rest = words
    if name == "--version":
        from . import __version__

        print(f"headstart {__version__}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"headstart: {name!r} is not a command{hint}\n\n{USAGE}", file=sys.stderr)
        return 2
    command: Callable[[str, list[str]], int] = import_module(f".{COMMANDS[name][0]}", __package__).main
    try:
        return command(name, rest)
    except KeyboardInterrupt:
        print("headstart: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if debug:
            raise
        print(f"headstart {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
