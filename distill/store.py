"""A folder of stored features: the target's states of each row of token ids, read instead of running the target.

`store.json` says what was made from what, and which rows stand where; `features-NNNNN.safetensors` hold the states of
their rows one behind the other. Rows are found by their tokens, so cut or re-rendered ones are never mistaken for
others. Knows files and fingerprints; how states are made is `capture.py`'s business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..core.files import give_usual_mode
from ..core.prompts import template_fingerprint, tokenizer_fingerprint
from ..drafters.base import FeatureLayer
from ..inference.target import Target
from .dataset import TokenRow
from .shards import sync_names

MANIFEST, VERSION, STATES = "store.json", 1, "states"
DECIDING = ("config", "weights", "tokenizer", "dtype")
"""Fingerprints that decide the numbers; a target's name and revision only say where it came from."""
SAMPLES = 64
"""Values of each weight that enter the fingerprint of the weights."""
VOLATILE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row's states stand: rows begin … begin + length of a shard."""

    shard: str
    begin: int
    length: int


def row_key(row: TokenRow) -> int:
    """Return 64 bits that tell a row's tokens from those of others."""
    return int.from_bytes(hashlib.sha256(row.input_ids.tobytes()).digest()[:8], "big", signed=True)


def target_identity(
    target: Target, tokenizer: PreTrainedTokenizerBase, name: str, revision: str | None
) -> dict[str, str | None]:
    """Return what tells one target from another: its names, and fingerprints of all that decides its states."""
    settings = {key: value for key, value in target.model.config.to_dict().items() if key not in VOLATILE}
    return {
        "target": name,
        "revision": revision,
        "config": _sha256(json.dumps(settings, sort_keys=True, default=str).encode()),
        "weights": weights_fingerprint(target),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": template_fingerprint(tokenizer),
        "dtype": str(target.dtype).removeprefix("torch."),
    }


def weights_fingerprint(target: Target) -> str:
    """Return `sha256:` and 16 digits of values taken from every weight at even distances: quick for any size."""
    digest = hashlib.sha256()
    for name, weight in target.model.named_parameters():
        values = weight.detach().reshape(-1)
        chosen = values[:: max(1, values.numel() // SAMPLES)].contiguous().cpu()
        digest.update(name.encode() + str(tuple(weight.shape)).encode())
        digest.update(chosen.view(torch.uint8).numpy().tobytes())
    return "sha256:" + digest.hexdigest()[:16]


def file_fingerprint(path: Path) -> str:
    """Return `sha256:` and 16 digits of a file's bytes."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return "sha256:" + digest.hexdigest()[:16]


def make_manifest(
    identity: Mapping[str, str | None],
    layers: Sequence[FeatureLayer],
    rows: Sequence[TokenRow],
    tokens_per_shard: int,
    **more: Any,
) -> dict[str, Any]:
    """Plan a store: which rows stand in which shard, fixed before the first one is written.

    layers: "final" first. rows: those with the same tokens are stored once. A shard takes rows until it has
        `tokens_per_shard`. more: further things to record, which must be the same for a capture to go on.
    """
    distinct: dict[int, TokenRow] = {}
    for row in rows:
        distinct.setdefault(row_key(row), row)
    shards: list[dict[str, Any]] = []
    for key, row in distinct.items():
        if not shards or shards[-1]["tokens"] >= tokens_per_shard:
            shards.append({"file": f"features-{len(shards):05d}.safetensors", "tokens": 0, "rows": []})
        shards[-1]["rows"].append([key, row.id, shards[-1]["tokens"], len(row.input_ids)])
        shards[-1]["tokens"] += len(row.input_ids)
    tokens = sum(shard["tokens"] for shard in shards)
    counts = {"rows": len(distinct), "tokens": tokens}
    made = {"headstart": "features", "version": VERSION, "made_from": dict(identity), "layers": list(layers)}
    return {**made, **more, **counts, "shards": shards}


def manifest_fingerprint(manifest: Mapping[str, Any]) -> str:
    """Return what ties shards to their manifest."""
    return _sha256(json.dumps(manifest, sort_keys=True).encode())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a store. Raises ValueError when the folder holds none, or one of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"{folder} must hold stored features ({MANIFEST}), but has none; make them with `headstart distill capture`"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON, but is not ({error}); capture into another folder") from error
    found = (manifest.get("headstart"), manifest.get("version")) if isinstance(manifest, dict) else (None, None)
    if found != ("features", VERSION):
        raise ValueError(
            f"{path} must describe features of version {VERSION}, but describes {found[0]} of version {found[1]}; "
            "capture them again, into another folder"
        )
    return manifest


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest whole or not at all."""
    temporary = folder / (MANIFEST + ".partial")
    temporary.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    _publish(temporary, folder / MANIFEST)


def write_shard(folder: Path, manifest: Mapping[str, Any], name: str, states: Tensor) -> None:
    """Write the states [R, F, D] of a shard's rows, one behind the other, whole or not at all."""
    temporary = folder / (name + ".partial")
    try:
        save_file({STATES: states.contiguous()}, str(temporary), {"store": manifest_fingerprint(manifest)})
        give_usual_mode(temporary)
        _publish(temporary, folder / name)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OSError(
            f"{folder / name} cannot be written ({error}); the shards before it are safe: make room, and the same "
            "command goes on from there"
        ) from error


def missing_shards(folder: Path, manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of shards that are not there whole, or were not made for this manifest."""
    wanted, mark = [], manifest_fingerprint(manifest)
    for shard in manifest["shards"]:
        try:
            with safe_open(str(folder / shard["file"]), framework="pt") as file:
                whole = (file.metadata() or {}).get("store") == mark
                whole = whole and file.get_slice(STATES).get_shape()[0] == shard["tokens"]
        except (OSError, SafetensorError):
            whole = False
        if not whole:
            wanted.append(shard)
    return wanted


class FeatureStore:
    """Reads stored features, mapped into memory: only what is asked for comes from the disk.

    Raises ValueError for a folder that is no store, and for one whose capture was not finished.

    layers: what is stored of each position, "final" first.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.layers: tuple[FeatureLayer, ...] = tuple(self.manifest["layers"])
        shards = self.manifest["shards"]
        missing = missing_shards(self.folder, self.manifest)
        if missing:
            raise ValueError(
                f"{self.folder} must hold all {len(shards)} shards of its {MANIFEST}, but {len(missing)} are missing "
                f"or not whole ({missing[0]['file']}); the same `headstart distill capture` command makes the rest"
            )
        self._places = {
            key: Place(shard["file"], begin, length)
            for shard in shards
            for key, _, begin, length in shard["rows"]
        }  # fmt: skip
        self._open: dict[str, Any] = {}

    def check_target(self, identity: Mapping[str, str | None]) -> None:
        """Raise ValueError, naming both sides, unless the states are those of this target."""
        made_from = self.manifest["made_from"]
        told = differences({key: made_from[key] for key in DECIDING}, {key: identity[key] for key in DECIDING})
        if told:
            raise ValueError(
                f"{self.folder} must hold features of the target {identity['target']}, but they were made from "
                f"{made_from['target']} and differ in {told}; capture them again with this target, into another folder"
            )

    def check_layers(self, layers: Sequence[FeatureLayer]) -> None:
        """Raise ValueError unless all that a drafter reads is stored."""
        missing = [layer for layer in layers if layer not in self.layers]
        if missing:
            said = ",".join(map(str, dict.fromkeys([*self.layers, *missing])))
            raise ValueError(
                f"{self.folder} must hold layers {', '.join(map(str, missing))}, which the drafter reads, but holds "
                f"{', '.join(map(str, self.layers))}; capture again with --layers {said}, into another folder"
            )

    def check_rows(self, rows: Sequence[TokenRow]) -> None:
        """Raise ValueError unless every row is stored."""
        missing = [row.id for row in rows if row_key(row) not in self._places]
        if missing:
            about = {key: self.manifest[key] for key in ("data", "max_length", "train_on") if key in self.manifest}
            made = {"chat_template": self.manifest["made_from"]["chat_template"], **about}
            raise ValueError(
                f"{self.folder} must hold every row of the data, but {len(missing):,} of {len(rows):,} are not there "
                f"with the same tokens (the first: {missing[0]}); it was made with {json.dumps(made)}: train with the "
                "same data and max_length, or capture again, into another folder"
            )

    def row(self, key: int) -> Tensor:
        """Return the states [T, F, D] of a row, in the order of `layers`."""
        place = self._places[key]
        if place.shard not in self._open:
            self._open[place.shard] = safe_open(str(self.folder / place.shard), framework="pt")
        return self._open[place.shard].get_slice(STATES)[place.begin : place.begin + place.length]


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in which entries two mappings differ, with both sides."""
    keys = dict.fromkeys([*there, *now])
    return ", ".join(
        f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in keys if there.get(key) != now.get(key)
    )


def _publish(temporary: Path, path: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_names(path.parent)


def _sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()[:16]
