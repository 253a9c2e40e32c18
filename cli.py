"""The `headstart` command: each subcommand parses its own arguments and calls one function.

What a user can mend ends with one line that says what must hold, what was found and what to do; `--debug` shows the
traceback. Nothing heavy is imported before a command is known.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "doctor": ("training.doctor", "is everything there that a run needs, and does it fit together?"),
    "distill": ("distill.command", "the target's own answers to prompts, as training data"),
    "train": ("training.command", "train a drafter on them: headstart train medusa --config configs/medusa.yaml"),
    "bench": ("inference.bench.command", "compare drafters with the model alone, on the same prompts"),
    "tune": ("inference.tune.command", "find and keep the draft tree that is fastest on this machine"),
    "generate": ("inference.command", "answer a prompt with a drafter"),
    "chat": ("inference.command", "talk to a target with a drafter, answers streamed"),
}

USAGE = "\n".join(
    [
        "usage: headstart COMMAND [options]; headstart COMMAND --help explains one",
        "",
        *(f"  {name:10}{what}" for name, (_, what) in COMMANDS.items()),
        "",
        "options: --help, --version, and for every command --debug (show the traceback of an error)",
        "exit codes: 0 done, 1 failed, 2 wrong usage, 75 saved and stopped by SIGTERM (the same command goes on),",
        "130 interrupted, 141 the reader of the output went away",
    ]
)

OK, FAILED, WRONG_USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    leading = words[:1] == ["--debug"]
    words = words[leading:]
    debug = leading or "--debug" in words
    if words[:1] == ["train"]:  # has a --debug of its own, and reports errors before `accelerate launch` does
        words += ["--debug"] * leading
    else:
        words = [word for word in words if word != "--debug"]
    prog = f"headstart {words[0]}" if words and words[0] in COMMANDS else "headstart"
    with warnings.catch_warnings():
        warnings.formatwarning = lambda message, *_, **__: f"{prog}: {message}\n"
        try:
            code = _dispatch(words)
            sys.stdout.flush()  # here, where a closed pipe is still ours to handle
            return code
        except SystemExit as stopped:  # of argparse, after --help or its own complaint
            return stopped.code if isinstance(stopped.code, int) else FAILED
        except KeyboardInterrupt:
            print(f"\n{prog}: interrupted", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:  # `headstart … | head`: Python would complain once more when it closes standard output
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return PIPE_CLOSED
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            told = _explained(error)
            if debug or told is None:
                raise
            print(f"{prog}: {told}", file=sys.stderr)
            return FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, file=sys.stdout if words else sys.stderr)
        return OK if words else WRONG_USAGE
    name, *rest = words
    if name == "--version":
        from . import __version__

        print(f"headstart {__version__}")
        return OK
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"headstart: {name!r} is not a command{hint}\n\n{USAGE}", file=sys.stderr)
        return WRONG_USAGE
    command: Callable[[str, list[str]], int] = import_module(f".{COMMANDS[name][0]}", __package__).main
    return command(name, rest)


def _explained(error: Exception) -> str | None:
    """Return what to tell a user of an error that he can mend; None for our own mistakes, which show where they are."""
    if isinstance(error, ValueError | OSError):
        return str(error) or type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's is not imported for this
        return f"out of memory ({error}); use a smaller batch, shorter texts or a smaller model"
    return None


if __name__ == "__main__":
    sys.exit(main())
