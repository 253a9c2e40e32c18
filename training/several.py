"""Several drafters from one pass of the target: `headstart train --drafters medusa.yaml,hydra_pp.yaml [options]`.

They are trained one after the other, each as its own file says, in its own output_dir, and go on by themselves when
stopped. What they share is the target and its features: whichever drafter comes first to a row has the target read it,
for the layers of all of them, and the others find it in memory. With a store the target is not run for features.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafters.base import FeatureLayer
from ..drafters.registry import METHODS, new_drafter
from ..inference.target import Target
from .command_line import Settings, UsageError, check_data, parse, report_failure, take_debug
from .features import KeptRows
from .guards import EXIT_STOPPED, StoppedBySignal
from .run import Loaded, load, run, say

SHARED = ("target", "target_revision", "target_dtype", "load_in_4bit", "load_in_8bit")
USAGE = """usage: headstart train --drafters FILE.yaml,FILE.yaml,... [--name value ...]

  A file is named after its method (medusa.yaml, medusa_full.yaml), or written METHOD=FILE.yaml. Options hold for all of
  them; with --output_dir FOLDER each goes into a folder of its file's name below it."""


@dataclass(frozen=True, slots=True)
class Planned:
    """One drafter to train: its method, and its whole command line."""

    method: str
    argv: list[str]
    settings: Settings


def main(argv: Sequence[str]) -> int:
    """Run `headstart train --drafters …`; return its exit status."""
    debug, words = take_debug(argv)
    try:
        train_several(words)
    except (ValueError, OSError) as error:
        return report_failure(error, debug)
    except torch.OutOfMemoryError as error:
        return report_failure(ValueError(f"out of memory ({error}); lower per_device_train_batch_size"), debug)
    except StoppedBySignal as stopped:
        say(str(stopped))
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def train_several(words: Sequence[str], loaded: Loaded | None = None) -> list[Path]:
    """Train every drafter; return the folders they are saved in.

    loaded: the target, if it is there already.
    Raises UsageError for a wrong command, and ValueError for drafters that cannot share a target's pass.
    """
    plans = read_plans(words)
    check_alike(plans)
    first = plans[0].settings
    loaded = load(first) if loaded is None else loaded
    if first.data.features is None:
        layers = layers_of(plans, loaded.target)
        capacity = max(plan.settings.data.feature_cache_gb for plan in plans)
        loaded = replace(loaded, kept=KeptRows(loaded.target, layers, int(capacity * 1e9)))
        say(f"one pass of the target for {len(plans)} drafters: layers {', '.join(map(str, layers))}")
    folders = []
    for number, plan in enumerate(plans, start=1):
        say(f"\ndrafter {number} of {len(plans)}: {plan.method}, into {plan.settings.training.output_dir}")
        folders.append(run(plan.method, plan.argv, loaded))
    return folders


def read_plans(words: Sequence[str]) -> list[Planned]:
    """Read the command: which files, and the options for all of them."""
    names, flags = _take("--drafters", words)
    output, flags = _take("--output_dir", flags)
    files = [name for name in (names or "").split(",") if name]
    if not files:
        raise UsageError(USAGE)
    plans = []
    for name in files:
        method, _, file = name.rpartition("=")
        method = method or method_of(file)
        own = [] if output is None else ["--output_dir", str(Path(output) / Path(file).stem)]
        argv = ["--config", file, *flags, *own]
        plans.append(Planned(method, argv, parse(method, argv)))
        check_data(plans[-1].settings.data)
    return plans


def method_of(file: str) -> str:
    """Return the method that a file is named after: the longest that its name begins with."""
    stem = Path(file).stem
    found = [method for method in METHODS if stem == method or stem.startswith(method + "_")]
    if not found:
        near = get_close_matches(stem, METHODS, 1)
        raise UsageError(
            f"{file} must be named after its method ({', '.join(sorted(METHODS))})"
            + (f" (is it {near[0]}?)" if near else "")
            + f"; rename it, or write METHOD={file}"
        )
    return max(found, key=len)


def check_alike(plans: Sequence[Planned]) -> None:
    """Raise ValueError unless the drafters have one target, a place to share its features, and folders of their own."""
    first = plans[0].settings
    for plan in plans[1:]:
        values = [(getattr(one.target, name), name) for name in SHARED for one in (first, plan.settings)]
        for (there, name), (here, _) in zip(values[::2], values[1::2], strict=True):
            _check_same(name, there, here, plan)
        _check_same("features", first.data.features, plan.settings.data.features, plan)
    for plan in plans:
        if plan.settings.joint.train_target != "none":
            raise ValueError(
                f"{plan.method} has train_target {plan.settings.joint.train_target}: it changes the target while it "
                "learns, so it cannot share it; train it alone"
            )
        if plan.settings.data.delete_features_after_use:
            raise ValueError(
                "drafters trained one after the other read the same features, so none may delete them after use; leave "
                "delete_features_after_use out"
            )
    folders = [str(plan.settings.training.output_dir) for plan in plans]
    if len(set(folders)) < len(folders):
        raise ValueError(f"each drafter must have an output_dir of its own, but they are {', '.join(folders)}")
    if first.data.features is None and not any(plan.settings.data.feature_cache_gb for plan in plans):
        raise ValueError(
            "drafters share the target's features in memory or in a store, but there is neither: set feature_cache_gb, "
            "or make a store with `headstart distill capture` and set features"
        )


def layers_of(plans: Sequence[Planned], target: Target) -> tuple[FeatureLayer, ...]:
    """Return what the drafters read of the target together, "final" first; each is built once to ask it."""
    layers: list[FeatureLayer] = ["final"]
    for plan in plans:
        size = plan.settings.draft_vocab_size
        vocabulary: Tensor | None = None if size is None else torch.arange(min(size, target.vocab_size))
        drafter = new_drafter(plan.method, target, vocabulary, **plan.settings.drafter)
        if drafter.trains_target:
            raise ValueError(f"{plan.method} changes the target while it learns, so it cannot share it: train it alone")
        layers += drafter.feature_layers
    return tuple(dict.fromkeys(layers))


def _check_same(name: str, there: Any, here: Any, plan: Planned) -> None:
    if there != here:
        raise ValueError(
            f"drafters trained together must have the same {name}, but the first has {there!r} and {plan.argv[1]} "
            f"{here!r}; give it for all: --{name}"
        )


def _take(name: str, words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take the last value of a flag out of the words."""
    value, rest = None, []
    left = iter(words)
    for word in left:
        if word == name:
            value = next(left, "")
        elif word.startswith(name + "="):
            value = word.partition("=")[2]
        else:
            rest.append(word)
    return value, rest
