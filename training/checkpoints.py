"""Checkpoints that are whole or not there: written under another name, synced to disk, then renamed.

A run killed at any moment leaves the checkpoints it had. What it was writing stays in `output_dir/partial`, and the
next run says so. Knows files and processes, not what is in them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer_utils import sort_checkpoints

from ..core.files import give_usual_mode
from .processes import deepspeed_stage, fsdp_version

PARTIAL, MANIFEST = "partial", "whole.json"


@dataclass(frozen=True, slots=True)
class Found:
    """newest: the last whole checkpoint, None if there is none. passed_over: newer ones, each with what is wrong."""

    newest: Path | None
    passed_over: list[str]


def find_newest(folder: Path) -> Found:
    """Look for the last whole checkpoint of a run."""
    passed_over = []
    partial = folder / PARTIAL
    if partial.is_dir():
        names = sorted(path.name for path in partial.glob("checkpoint-*"))
        passed_over = [f"{PARTIAL}/{name} (it was still being written)" for name in names]
    steps = sort_checkpoints(str(folder)) if folder.is_dir() else []
    for checkpoint in map(Path, reversed(steps)):
        problem = problem_of(checkpoint)
        if problem is None:
            return Found(checkpoint, passed_over)
        passed_over.append(f"{checkpoint.name} ({problem})")
    return Found(None, passed_over)


def problem_of(checkpoint: Path) -> str | None:
    """Say why a checkpoint cannot be used, None if it is whole: every file of its manifest is there, in full."""
    manifest = checkpoint / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}, so its save was not finished"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError):
        return f"{MANIFEST} cannot be read"
    for name, size in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} must have {size} bytes, but has {path.stat().st_size}"
    return None


def check_same_way(checkpoint: Path, args: TrainingArguments) -> None:
    """Raise ValueError when a checkpoint cannot be gone on from by the processes of this run.

    Its optimizer may be cut up for others; or other processes would make a step of another number of rows, so that the
    place in the data would be wrong.
    """
    then = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    now = way_of_saving(args)
    cut = now["deepspeed_stage"] is not None
    same = all(then.get(key) == now[key] for key in ("deepspeed_stage", "fsdp"))
    if not same or (cut and then["processes"] != now["processes"]):
        raise ValueError(
            f"{checkpoint} was saved {_way(then)} and holds the optimizer in that form, but this run works "
            f"{_way(now)}; start it in the same way"
        )
    rows = then.get("rows_per_step", now["rows_per_step"])
    if then["processes"] != now["processes"] and rows != now["rows_per_step"]:
        raise ValueError(
            f"{checkpoint} was saved by {then['processes']} processes with {rows} rows a step, but the "
            f"{now['processes']} of this run make {now['rows_per_step']}, and would not find their place in the data; "
            "choose gradient_accumulation_steps or per_device_train_batch_size so that the rows are the same"
        )


def way_of_saving(args: TrainingArguments) -> dict[str, int | None]:
    """Return what of a run's processes a checkpoint must fit, for its manifest."""
    return {
        "processes": args.world_size,
        "deepspeed_stage": deepspeed_stage(args),
        "fsdp": fsdp_version(),
        "rows_per_step": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
    }


def _way(saved: dict[str, int | None]) -> str:
    if saved.get("fsdp") is not None:
        return "with FSDP"
    stage = saved["deepspeed_stage"]
    return "without DeepSpeed" if stage is None else f"with DeepSpeed ZeRO-{stage} and {saved['processes']} processes"


@contextmanager
def told_of_failure(what: str, folder: Path) -> Iterator[None]:
    """Turn a failed write into an OSError that says what could not be saved, why, and what is still there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(folder).free
        newest = find_newest(folder).newest
        left = f"the last whole checkpoint is {newest.name}" if newest is not None else "there is no checkpoint yet"
        raise OSError(
            f"{what} could not be saved in {folder} ({str(error).splitlines()[0]}; {free / 1e6:,.1f} MB are free "
            f"there); {left}: make room, and the same command goes on from there"
        ) from error


def publish(folder: Path, step: int, args: TrainingArguments) -> Path:
    """Give a finished checkpoint its name; every process calls this when it has written its files.

    Returns `folder/checkpoint-STEP`. The first process writes the manifest, syncs every file, then renames.
    """
    written, final = folder / PARTIAL / f"checkpoint-{step}", folder / f"checkpoint-{step}"
    wait_for_all(args)
    if args.should_save:
        paths = sorted(path for path in written.rglob("*") if path.is_file())
        for path in paths:
            if path.suffix == ".safetensors":
                give_usual_mode(path)
        manifest = {
            "step": step,
            **way_of_saving(args),
            "files": {path.relative_to(written).as_posix(): path.stat().st_size for path in paths},
        }
        (written / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in [*written.rglob("*"), written]:
            sync(path)
        if final.exists():  # of an earlier attempt that went on from an older checkpoint, or incomplete
            remove(final)
        written.rename(final)
        sync(folder)
        shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    wait_for_all(args)
    return final


def rotate(folder: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `keep`; the newest and the best always stay."""
    steps = [Path(path) for path in sort_checkpoints(str(folder))]
    spared = {steps[-1].name} | ({Path(best).name} if best is not None else set())
    surplus = len(steps) - max(keep, len(spared)) if keep else 0
    for checkpoint in [path for path in steps if path.name not in spared][: max(0, surplus)]:
        remove(checkpoint)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill half-way leaves nothing that looks like one."""
    doomed = checkpoint.parent / PARTIAL / f"removed-{checkpoint.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    doomed.parent.mkdir(exist_ok=True)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def discard_partial(folder: Path) -> None:
    """Delete what an earlier run did not finish writing."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows opens no folders, and keeps their lists by itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def wait_for_all(args: TrainingArguments) -> None:
    """Wait until every process has come here; a collective call."""
    if args.world_size > 1:
        torch.distributed.barrier()
