"""A folder of stored features: the target's states of each row of token ids, read instead of running the target.

`store.json` says what was made from what, and which rows stand where; `features-NNNNN.safetensors` hold the states of
their rows one behind the other. Rows are found by their tokens, so cut or re-rendered ones are never mistaken for
others. Knows files and fingerprints; how states are made is `capture.py`'s business.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
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

    Raises ValueError for a folder that is no store. Of a shard that is missing or not whole, no row is there.

    layers: what is stored of each position, "final" first. absent: how many shards are missing or not whole.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        self.layers: tuple[FeatureLayer, ...] = tuple(self.manifest["layers"])
        shards = self.manifest["shards"]
        missing = {shard["file"] for shard in missing_shards(self.folder, self.manifest)}
        self.absent = len(missing)
        self._planned = {row[0] for shard in shards for row in shard["rows"]}
        self._places = {
            key: Place(shard["file"], begin, length)
            for shard in shards
            if shard["file"] not in missing
            for key, _, begin, length in shard["rows"]
        }
        self._open: dict[str, Any] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._places

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

    def check_origin(self, rows: Iterable[TokenRow], now: Mapping[str, Any]) -> None:
        """Raise ValueError, naming both sides, when not one of the rows was ever to be stored here.

        now: what decides the tokens of rows, as `made_with` returns it for the store.
        """
        if not any(row_key(row) in self._planned for row in rows):
            raise ValueError(
                f"{self.folder} must hold rows of the data, but not one is there with the same tokens"
                f"{self._otherwise(now)}; capture them again, into another folder"
            )

    def check_rows(self, rows: Iterable[TokenRow], now: Mapping[str, Any], make: bool = False) -> int:
        """Return how many rows are not stored. Raises ValueError, naming both sides, if there are any.

        now: see `check_origin`. make: the target is going to make them, so nothing is raised.
        """
        count, missing, first = 0, 0, ""
        for row in rows:
            count += 1
            if row_key(row) not in self:
                missing, first = missing + 1, first or row.id
        if missing and not make:
            absent = (
                f"; {self.absent} of its {len(self.manifest['shards'])} shards are missing or not whole, since a "
                "capture was stopped or features were deleted after use"
            )
            raise ValueError(
                f"{self.folder} must hold every row that is going to be read, but {missing:,} of {count:,} are not "
                f"there with the same tokens (the first: {first}){absent if self.absent else ''}"
                f"{self._otherwise(now)}; missing_features make has the target read them, the same `headstart distill "
                "capture` command makes shards that are missing; or train with the data and max_length of the store"
            )
        return missing

    def made_with(self) -> dict[str, Any]:
        """Return what decided the tokens of the rows, as far as it was recorded."""
        about = {key: self.manifest[key] for key in ("max_length", "train_on", "data") if key in self.manifest}
        return {"chat_template": self.manifest["made_from"]["chat_template"], **about}

    def _otherwise(self, now: Mapping[str, Any]) -> str:
        told = differences(self.made_with(), now)
        return f"; it was made otherwise: {told}" if told else ""

    def release(self, done: Collection[int], delete: bool) -> int:
        """Let go of the shards whose rows are all done; return how many they were. delete: their files go too.

        done: keys of rows that are not going to be read again. A process that has only let go of a shard no longer
        keeps its room on the disk taken.
        """
        count = 0
        for shard in self.manifest["shards"]:
            keys = [row[0] for row in shard["rows"]]
            if keys[0] in self and all(key in done for key in keys):
                self._open.pop(shard["file"], None)
                for key in keys:
                    del self._places[key]
                if delete:
                    (self.folder / shard["file"]).unlink(missing_ok=True)
                count += 1
        if count and delete:
            sync_names(self.folder)
        return count

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
