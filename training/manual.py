"""What a training command prints for `--help`: what people set, in groups, with its texts.

The words come from the arguments' own help texts; nothing here knows a setting but the names of the usual ones.
"""

from __future__ import annotations

import shutil
import textwrap
from argparse import Action, ArgumentParser
from collections.abc import Sequence
from enum import Enum

USUAL = (
    "output_dir", "resume_from_checkpoint", "num_train_epochs", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "optim", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay",
    "max_grad_norm", "bf16", "eval_strategy", "eval_steps", "save_strategy", "save_steps", "save_total_limit",
    "logging_steps", "report_to", "train_sampling_strategy", "seed", "deepspeed",
)  # fmt: skip
"""Those of transformers' TrainingArguments that people set."""

NAMES, LINE = 34, 120
"""Columns: where the texts begin, and the longest line."""


def short_help(parser: ArgumentParser, top: Sequence[str], transformers_group: str) -> str:
    """Return every setting with its text, group by group; of transformers' group only the usual ones.

    top: the paragraphs that stand first, usage and examples.
    """
    parts = list(top)
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not _is_a_no(action)]
        title = group.title
        if title == transformers_group:
            actions = sorted((one for one in actions if one.dest in USUAL), key=lambda one: USUAL.index(one.dest))
            title = "training, the usual ones of transformers' TrainingArguments (--help_all lists all of them)"
        if actions:
            parts.append("\n".join([f"{title}:", *(_told(action) for action in actions)]))
    return "\n\n".join(parts) + "\n"


def _is_a_no(action: Action) -> bool:
    """Whether an action is the `--no_…` of another."""
    return action.nargs == 0 and action.option_strings[0].startswith("--no_")


def _told(action: Action) -> str:
    """Return one setting: its name, its text and what holds where it is not set."""
    name = ", ".join(flag for flag in action.option_strings if "-" not in flag.lstrip("-"))
    text = " ".join((action.help or "").replace("%%", "%").split())
    if action.metavar is None and action.choices is not None and len(list(action.choices)) < 8:
        missing = [str(choice) for choice in action.choices if str(choice) not in text]
        text += f" One of {', '.join(str(choice) for choice in action.choices)}." if missing else ""
    default = action.default.value if isinstance(action.default, Enum) else action.default
    if action.nargs != 0 and default not in (None, "", [], False, "==SUPPRESS=="):
        text = f"{text.rstrip('.')} (default {default})."
    width = min(LINE, shutil.get_terminal_size((LINE, 24)).columns)
    lines = textwrap.wrap(text, max(width - NAMES, 40)) or [""]
    head = f"  {name}"
    if len(head) > NAMES - 2:
        lines = [head, *(" " * NAMES + line for line in lines)]
    else:
        lines = [f"{head:<{NAMES}}{lines[0]}", *(" " * NAMES + line for line in lines[1:])]
    return "\n".join(lines)
