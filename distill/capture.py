"""Fill a store with the target's features: one pass over the rows, which any number of drafters then learn from.

Each row is read alone, as training reads it with `feature_cache_gb`: the states are the same to the bit.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..core.shapes import rounded_up
from ..drafters.base import FeatureLayer
from ..inference.target import Target
from .dataset import DATA_FILES, TokenRow
from .shards import alone_in
from .store import (
    MANIFEST,
    differences,
    file_fingerprint,
    missing_shards,
    read_manifest,
    row_key,
    write_manifest,
    write_shard,
)

SHARD_BYTES = 128_000_000
"""Size of a shard: what a killed capture has to make again at most, and what is held in memory."""
ROOM = 1.02
"""Room on the disk asked for, over what the states themselves take."""
TIMED_ROWS = 3


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is still to be written, and how long that takes."""

    bytes: int
    seconds: float


def read_layers(text: str) -> tuple[FeatureLayer, ...]:
    """Return the layers of a list like `final,1,14,26`, "final" first and each once.

    Raises ValueError for anything but "final" and block numbers.
    """
    layers: list[FeatureLayer] = ["final"]
    for word in (part.strip() for part in text.split(",")):
        if word != "final" and not word.isdecimal():
            raise ValueError(
                f"layers must be block numbers from 0 up and `final`, separated by commas, but {word!r} is neither"
            )
        layers.append(word if word == "final" else int(word))
    return tuple(dict.fromkeys(layers))


@torch.no_grad()
def row_states(target: Target, tokens: Tensor, layers: Sequence[FeatureLayer]) -> Tensor:
    """Return the states [T, F, D] of one row's tokens [T] long, read alone."""
    length = len(tokens)
    row = torch.nn.functional.pad(tokens, (0, rounded_up(length) - length))[None]
    places = torch.arange(row.shape[1], device=row.device)[None]
    # Padding stands at the last position: learned position tables end with the window.
    return target.encode(row, places < length, layers, places.clamp(max=length - 1)).features[0, :length]


def data_fingerprints(sources: Sequence[str]) -> list[list[str]]:
    """Return name and fingerprint of each data file; data sets of the Hub are known by their name alone."""
    found = []
    for source in sources:
        path = Path(source)
        files = sorted(f for f in path.iterdir() if f.name.endswith(DATA_FILES)) if path.is_dir() else [path]
        for file in files:
            found.append([file.name, file_fingerprint(file)] if file.is_file() else [source, "Hub"])
    return found


def bytes_per_token(target: Target, layers: Sequence[FeatureLayer]) -> int:
    """Return what the states of one position take."""
    return len(layers) * target.width * target.dtype.itemsize


def capture(target: Target, rows: Sequence[TokenRow], folder: Path, manifest: dict[str, Any], progress: bool) -> int:
    """Write the shards that are not there yet; return how many tokens the target has read for them.

    rows: those that the manifest was made of. A capture that was stopped goes on: whole shards stay.
    Raises ValueError when the folder holds other features, when another process writes there, and when the disk has
    not the room; then nothing has been written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        check_same(folder, manifest)
        todo = missing_shards(folder, manifest)
        ahead = estimate(target, rows, manifest["layers"], sum(shard["tokens"] for shard in todo))
        print(told(manifest, todo, ahead), file=sys.stderr, flush=True)
        check_room(folder, ahead.bytes)
        for leftover in folder.glob("*.partial"):
            leftover.unlink()
        if not (folder / MANIFEST).exists():
            write_manifest(folder, manifest)
        by_key = {row_key(row): row for row in rows}
        total = manifest["tokens"]
        done = total - sum(shard["tokens"] for shard in todo)
        with tqdm(total=total, initial=done, desc="features", unit="token", unit_scale=True, smoothing=0,
                  disable=not progress, dynamic_ncols=True) as bar:  # fmt: skip
            for shard in todo:
                states = []
                for key, _, _, length in shard["rows"]:
                    states.append(_read(target, by_key[key], manifest["layers"]))
                    bar.update(length)
                write_shard(folder, manifest, shard["file"], torch.cat(states))
    return total - done


def check_same(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise ValueError, naming both sides, when the folder holds anything but an earlier part of this capture."""
    if not (folder / MANIFEST).exists():
        found = sorted(path.name for path in folder.iterdir() if not path.name.endswith(".partial"))
        if found:
            raise ValueError(
                f"{folder} must be empty or hold stored features, but holds {found[0]}; use another folder"
            )
        return
    there = read_manifest(folder)
    if there == manifest:
        return
    flat = [{**one["made_from"], **one, "made_from": None, "shards": None} for one in (there, manifest)]
    what = differences(*flat) or "the order or the ids of their rows"
    raise ValueError(f"{folder} holds other features, which differ in {what}; use another folder")


def estimate(target: Target, rows: Sequence[TokenRow], layers: Sequence[FeatureLayer], tokens: int) -> Estimate:
    """Time a few rows of middling length, after one that warms up."""
    if not tokens:
        return Estimate(0, 0.0)
    ordered = sorted(rows, key=lambda row: len(row.input_ids))
    middle = ordered[len(ordered) // 2 :][:TIMED_ROWS]
    _read(target, middle[0], layers)
    start = time.perf_counter()
    for row in middle:
        _read(target, row, layers)
    speed = sum(len(row.input_ids) for row in middle) / (time.perf_counter() - start)
    return Estimate(tokens * bytes_per_token(target, layers), tokens / speed)


def told(manifest: dict[str, Any], todo: Sequence[dict[str, Any]], ahead: Estimate) -> str:
    """Say what is there and what is going to be written."""
    whole = (
        f"{manifest['rows']:,} rows, {manifest['tokens']:,} tokens, layers {', '.join(map(str, manifest['layers']))}"
    )
    shards = len(manifest["shards"])
    if not todo:
        return f"{whole}: all {shards} shards are there already"
    found = f"{shards - len(todo)} of {shards} shards are there already, " if len(todo) < shards else ""
    return f"{whole}: {found}{ahead.bytes / 1e9:.3f} GB to write, about {ahead.seconds / 60:.1f} minutes"


def check_room(folder: Path, size: int) -> None:
    """Raise ValueError when the disk has not the room for so many bytes."""
    free = shutil.disk_usage(folder).free
    if size * ROOM > free:
        raise ValueError(
            f"{folder} must have room for {size * ROOM / 1e9:.3f} GB of features, but {free / 1e9:.3f} GB are free: "
            "store fewer layers or rows, lower max_length, or use another disk; training without a store needs none"
        )


def _read(target: Target, row: TokenRow, layers: Sequence[FeatureLayer]) -> Tensor:
    tokens = torch.from_numpy(row.input_ids).to(target.device, torch.long)
    return row_states(target, tokens, layers).cpu()
