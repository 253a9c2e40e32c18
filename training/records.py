"""What a run writes beside the drafter, and what a second run of the same command makes of it.

`run.json`: identity (what must not change within one folder), command, versions, state of the repository, progress.
`resolved.yaml`: every setting that is not a default, itself usable as `--config`. Both stand in the folder of the run
and in each checkpoint, so that one that is moved away still says where it comes from.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from ..distill.dataset import TokenRow
from ..inference.target import Target
from .checkpoints import Found, check_same_way, find_newest, problem_of, sync
from .command_line import Settings, command_of
from .optimizers import MUON
from .vocabulary import ChosenVocabulary

RECORD, RESOLVED = "run.json", "resolved.yaml"
LIBRARIES = ("headstart", "torch", "transformers", "accelerate", "datasets", "deepspeed", "numpy", "safetensors")
OPTIONAL_LIBRARIES = ("peft", "bitsandbytes")
GENERATED = ("tokens_per_step", "acceptance_depth_")
LARGER_IS_BETTER = (*GENERATED, "accuracy_depth_")


@dataclass(frozen=True, slots=True)
class Resume:
    """checkpoint: folder to go on from, None for a fresh start. finished: nothing left to do. note: to be printed."""

    checkpoint: str | None = None
    finished: bool = False
    note: str = ""


def data_fingerprint(rows: Iterable[TokenRow]) -> str:
    """Return `sha256:` and 16 digits that change with any row, token or trained token, and with the order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.id.encode() + row.input_ids.tobytes() + row.loss_mask.tobytes())
    return "sha256:" + digest.hexdigest()[:16]


def identity(settings: Settings, target: Target, fingerprints: dict[str, str]) -> dict[str, Any]:
    """Return what must be the same for a run to go on in the folder of another.

    The target's type counts as loaded, so that `auto` is the same as its name.
    """
    return {
        "method": settings.method,
        "target": settings.target.target,
        "target_revision": settings.target.target_revision,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "target_bits": settings.target.bits,
        "muon": settings.training.optim == MUON,
        "start_from": settings.training.start_from,
        **settings.joint.identity(),
        **settings.drafter,
        "draft_vocab_size": settings.draft_vocab_size,
        **fingerprints,
    }


def provenance(
    settings: Settings,
    train: Sequence[TokenRow],
    held_out: Sequence[TokenRow],
    fingerprint: str,
    vocabulary: ChosenVocabulary | None,
) -> dict[str, Any]:
    """Return what a drafter's config.json says about the data."""
    found: dict[str, Any] = {
        "sources": [Path(source).name if Path(source).exists() else source for source in settings.data.train_data],
        "rows": len(train),
        "tokens": sum(len(row.input_ids) for row in train),
        "trained_tokens": sum(int(row.loss_mask.sum()) for row in train),
        "held_out_rows": len(held_out),
        "fingerprint": fingerprint,
    }
    if settings.training.start_from is not None:
        found["started_from"] = Path(settings.training.start_from).name
    if vocabulary is not None:
        found["draft_vocabulary_coverage"] = round(vocabulary.coverage, 4)
    return found


def decide_resume(settings: Settings, who: dict[str, Any]) -> Resume:
    """Look into output_dir and say how to go on.

    Raises ValueError when it holds another run, or when a fresh start would mix with old checkpoints.
    """
    folder, wanted = Path(str(settings.training.output_dir)), settings.training.resume_from_checkpoint or "auto"
    found = find_newest(folder)
    if wanted in ("never", "false", "False", "no", "none"):
        if found.newest is not None:
            raise ValueError(
                f"{folder} must hold no checkpoint for a fresh start, but holds {found.newest.name}; choose another "
                "output_dir, delete it, or leave resume_from_checkpoint at auto"
            )
        return Resume()
    if wanted not in ("auto", "true", "True"):
        if not Path(wanted).is_dir():
            raise ValueError(f"resume_from_checkpoint must be auto, never or a checkpoint folder, but is {wanted!r}")
        problem = problem_of(Path(wanted))
        if problem is not None:
            raise ValueError(f"{wanted} must be a whole checkpoint, but {problem}; choose another, or auto")
        check_same_way(Path(wanted), settings.training)
        return Resume(wanted, note=f"going on from {wanted}")
    record = read_record(folder)
    if record is None:
        return _go_on(found, settings)
    before = record.get("identity", {})
    differing = [key for key in who if key in before and before[key] != who[key]]
    if differing:
        told = ", ".join(f"{key}: {before.get(key)!r} there, {who[key]!r} now" for key in differing)
        raise ValueError(f"{folder} holds another run ({told}); choose another output_dir")
    resolved = settings.resolved()
    changed = sorted(
        key for key in {*resolved, *record["settings"]} if resolved.get(key) != record["settings"].get(key)
    )
    if record.get("finished") and not changed:
        return Resume(
            finished=True,
            note=f"already finished: the drafter is in {folder} (to train anew, choose another output_dir)",
        )
    return _go_on(found, settings, f" with other settings ({', '.join(changed)})" if changed else "")


def _go_on(found: Found, settings: Settings, how: str = "") -> Resume:
    passed = [f"passed over {one}" for one in found.passed_over]
    if found.newest is None:
        return Resume(note="\n".join([*passed, "no whole checkpoint: starting from the beginning"]) if passed else "")
    check_same_way(found.newest, settings.training)
    return Resume(str(found.newest), note="\n".join([*passed, f"going on from {found.newest}{how}"]))


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record of an earlier run, None if there is none."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} must be JSON, but is not ({error}); delete it to go on from the last checkpoint"
        ) from error


def write_record(settings: Settings, who: dict[str, Any], folder: Path, **more: Any) -> None:
    """Write run.json and resolved.yaml into a folder, each whole or not at all: of a run, or of one checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "identity": who,
        "settings": settings.resolved(),
        "command": shlex.join([f"train_{settings.method}", *without_secrets(settings.argv)]),
        "world_size": settings.training.world_size,
        "versions": versions(),
        "git": git_state(Path.cwd()),
        **more,
    }
    _write(folder / RECORD, json.dumps(record, indent=2) + "\n")
    heading = f"# Every setting of this run that is not a default: {command_of(settings.method)} --config THIS\n"
    _write(folder / RESOLVED, heading + yaml.safe_dump(settings.resolved(), sort_keys=False, allow_unicode=True))


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the words of a command with the values of tokens (`--hub_token`) left out."""
    words, hide = [], False
    for word in argv:
        name, given, _ = word.partition("=")
        secret = name.startswith("--") and name.endswith("_token")
        words.append("..." if hide else f"{name}=..." if secret and given else word)
        hide = secret and not given
    return words


@lru_cache
def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the repository that a folder lies in, and whether tracked files differ from it.

    None outside a repository, or without git. As it is when first asked: what a run has loaded does not change later.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if not commit or changes is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *words: str) -> str | None:
    options = ["--no-optional-locks", "-C", str(folder)]
    try:
        done = subprocess.run(["git", *options, *words], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def check_best(settings: Settings) -> None:
    """Raise ValueError when the best checkpoint is to be chosen by a figure that is not measured."""
    args = settings.training
    metric = str(args.metric_for_best_model or "").removeprefix("eval_")
    if metric.startswith(GENERATED) and not settings.evaluation.eval_prompts:
        raise ValueError(
            f"metric_for_best_model is {metric}, which evaluation measures by generating, but eval_prompts is 0; set "
            "eval_prompts, or take loss"
        )
    if metric.startswith(LARGER_IS_BETTER) and args.greater_is_better is False:
        raise ValueError(f"greater_is_better must be true for {metric}, but is false; leave it out")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that decide a result."""
    found = {"python": platform.python_version()}
    for name in (*LIBRARIES, *OPTIONAL_LIBRARIES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
