"""Tuned trees, kept beside the drafter: `tuned/<machine>.json` in its folder, one file for each machine and dtype.

A file holds one entry for each batch size and temperature. It belongs to the weights it was measured with and is not
used with others. config.json and the weights are never touched.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..bench.machine import accelerator_name, cpu_name
from ..target import Target

FORMAT_VERSION = 1
FOLDER = "tuned"
SAMPLED_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Tuning:
    """One tuned tree.

    topology: rank paths, as `Drafter.set_topology` takes them. expected, measured: figures of this tree, for readers.
    """

    batch_size: int
    temperature: float
    topology: list[list[int]]
    expected: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)


def hardware(target: Target) -> dict[str, Any]:
    """Return what a tuning holds for: device, threads (of a CPU), dtype and PyTorch's version."""
    accelerator = accelerator_name(target.device)
    return {
        "device": cpu_name() if accelerator is None else accelerator,
        "threads": torch.get_num_threads() if accelerator is None else None,
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }


def place_of(folder: str | Path, target: Target) -> Path:
    """Return the file for this machine and dtype in a drafter's folder, there or not."""
    facts = hardware(target)
    threads = None if facts["threads"] is None else f"{facts['threads']} threads"
    key = " ".join(filter(None, (facts["device"], threads, facts["dtype"], f"torch {facts['torch']}")))
    return Path(folder) / FOLDER / (re.sub(r"[^a-z0-9.]+", "-", key.lower()).strip("-.") + ".json")


def save_tuning(folder: str | Path, target: Target, tuning: Tuning) -> Path:
    """Add a tuning to the file of this machine, in place of one of the same batch size and temperature.

    The file is written whole or not at all. Returns its path.
    """
    path = place_of(folder, target)
    path.parent.mkdir(exist_ok=True)
    kept = [one for one in tunings_of(folder, target) if (one.batch_size, one.temperature) != _key(tuning)]
    content = {
        "headstart_tuned": FORMAT_VERSION,
        "hardware": hardware(target),
        "weights": weights_fingerprint(folder),
        "entries": [asdict(one) for one in sorted([*kept, tuning], key=_key)],
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


def tunings_of(folder: str | Path, target: Target) -> list[Tuning]:
    """Return what is kept in a drafter's folder for this machine, dtype and these weights.

    Warns where a file cannot be read.
    """
    path = place_of(folder, target)
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        fits = content["headstart_tuned"] == FORMAT_VERSION and content["hardware"] == hardware(target)
        if not fits or content["weights"] != weights_fingerprint(folder):
            return []
        return [Tuning(**entry) for entry in content["entries"]]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        warnings.warn(
            f"{path} must hold a tuned tree, but cannot be read ({error!r}); the drafter's own tree is used: run "
            "`headstart tune` again or delete the file",
            stacklevel=3,
        )
        return []


def nearest(tunings: Sequence[Tuning], batch_size: int, temperature: float) -> Tuning | None:
    """Return the tuning with the nearest batch size, then the nearest temperature; None where there is none."""

    def distance(one: Tuning) -> tuple[float, float]:
        return abs(one.batch_size - batch_size), abs(one.temperature - temperature)

    return min(tunings, key=distance, default=None)


def weights_fingerprint(folder: str | Path) -> str:
    """Return a hash that other weights would change: of the ends of each weight file, not of gigabytes."""
    digest = hashlib.sha256()
    for file in sorted(Path(folder).glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(SAMPLED_BYTES))
            stream.seek(max(0, size - SAMPLED_BYTES))
            digest.update(stream.read())
    return f"sha256:{digest.hexdigest()[:16]}"


def _key(tuning: Tuning) -> tuple[int, float]:
    return tuning.batch_size, tuning.temperature
