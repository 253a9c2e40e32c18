"""A checkpoint folder looked at before anything is built from it: what it is, and whether its files are whole.

Weights are read by their header alone, pickles are never opened. Knows no method: what a configuration may hold comes
from the annotations of its class, what the weights must be from the drafter built without memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig

from ..core.tree import DynamicTree, TreeTopology
from .base import Drafter
from .config import DrafterConfig
from .modules import DraftVocabulary

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
DTYPES = ("float32", "bfloat16", "float16", "float64")
FLOATS = ("F64", "F32", "BF16", "F16")  # as safetensors spells them
WRITTEN_BY_TRANSFORMERS = {*PreTrainedConfig().to_dict(), "torch_dtype", "use_cache"}  # the last one by its Trainer

LARGEST_CONFIG = 16 * 2**20
"""Bytes of a config.json or an index."""

MOST_MODULES, LARGEST_SIZE, MOST_NODES = 128, 2**24, 1024
"""Bounds on settings named `num_…`, on those named `…_size` or `…_width`, and on a topology: a damaged file must not
fill the memory."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ValueError, naming the file, for anything else."""
    try:
        if path.stat().st_size > LARGEST_CONFIG:
            raise ValueError(f"it has {path.stat().st_size:,} bytes, the most is {LARGEST_CONFIG:,}")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it is a {type(found).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON object, but is not ({error}); copy the checkpoint again") from error
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read, but is not ({error})") from error
    return found


def kind_of(folder: Path) -> str | None:
    """Say in words what a checkpoint folder holds, judged by its file names and config.json; None for unknown ones."""
    names = sorted(path.name for path in folder.iterdir())
    heads = [name for name in names if name.startswith(("medusa_lm_head.", "hydra_lm_head."))]
    if heads:
        return f"heads in the format of the official {heads[0].partition('_')[0].title()} release ({heads[0]})"
    config = read_json(folder / "config.json") if "config.json" in names else {}
    model_type = str(config.get("model_type"))
    architectures = config.get("architectures")
    called = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    if model_type.startswith("headstart-"):
        return f"a headstart drafter ({model_type})"
    if "adapter_config.json" in names:
        return "a LoRA adapter (adapter_config.json)"
    if "medusa_num_heads" in config or "hydra_num_heads" in config:
        return "heads in the format of the official Medusa or Hydra release"
    if "speculators_model_type" in config:
        return "a drafter in the format of the speculators library"
    if "eagle" in (called + model_type).lower() or "draft_vocab_size" in config or _looks_like_eagle(folder):
        return "an EAGLE drafter in another project's format"
    return f"a transformers model (model_type {model_type!r})" if "model_type" in config else None


def _looks_like_eagle(folder: Path) -> bool:
    """EAGLE-1 calls itself a llama: it is known by its `fc` layer."""
    path = folder / WEIGHTS
    return path.is_file() and "fc.weight" in header(path)


def nearest_folder(path: Path) -> str:
    """Return a hint that names the folder beside a missing one whose name is nearest, or nothing."""
    siblings = [beside.name for beside in path.parent.glob("*") if beside.is_dir()] if path.parent.is_dir() else []
    near = get_close_matches(path.name, siblings, 1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def first_line(error: Exception) -> str:
    """Return an error's first line with words in it; those of the Hub go on for a page."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def pickles_in(folder: Path) -> list[str]:
    """Return the names of files that are, or may be, pickles: opening one can run anybody's code."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor in a safetensors file. Raises ValueError where it is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} must be a whole safetensors file, but cannot be read ({error}); copy the checkpoint again"
        ) from error


def weights_in(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the type and shape of each tensor of a checkpoint, in one file or in shards with an index."""
    if (folder / WEIGHTS).is_file():
        return header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        found = ", ".join(pickles_in(folder))
        why = f"only {found}: pickles can run code and are never opened; save with safetensors" if found else "none"
        raise ValueError(f"{folder} must hold whole weights in {WEIGHTS}, but there is {why}")
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places or not all(_is_shard(name) for name in places.values()):
        raise ValueError(f"{folder / INDEX} must map tensors to safetensors files beside it; copy the checkpoint again")
    shards = [header(folder / name) for name in sorted(set(places.values()))]
    return {name: found for shard in shards for name, found in shard.items()}


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors")


def check_settings(config_class: type[DrafterConfig], settings: Mapping[str, Any], place: str) -> None:
    """Raise ValueError for settings that a configuration does not have, or whose values make no sense.

    settings: what config.json holds. place: begins every message.
    """
    hints = annotations_of(config_class)
    refuse_unknown([name for name in settings if name not in WRITTEN_BY_TRANSFORMERS], hints, place)
    for name, value in settings.items():
        if name in hints and not fits(value, hints[name]):
            raise ValueError(f"{place}: {name} must be {_spelled(hints[name])}, but is {_short(value)}")
        if isinstance(value, int) and (most := _most(name)) and not 1 <= value <= most:
            raise ValueError(f"{place}: {name} must be from 1 to {most}, but is {value}")
    for name in ("dtype", "torch_dtype"):
        if settings.get(name) not in (None, *DTYPES):
            raise ValueError(f"{place}: {name} must be one of {', '.join(DTYPES)}, but is {_short(settings[name])}")
    check_topology(settings, place)
    check_dynamic_tree(settings, place)


def refuse_unknown(settings: Iterable[str], known: Iterable[str], place: str) -> None:
    """Raise ValueError for the first setting that is not known, naming the nearest."""
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"{place} has no setting {name!r}{hint}")


def check_topology(settings: Mapping[str, Any], place: str) -> None:
    """Raise ValueError for a tree that is malformed, larger than any step, or with more candidates than tokens."""
    paths = settings.get("topology")
    if paths is None:
        return
    if len(paths) >= MOST_NODES:
        raise ValueError(f"{place}: topology must have fewer than {MOST_NODES} nodes, but has {len(paths)}")
    try:
        width = TreeTopology.from_paths(paths).width
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{place}: topology is malformed: {error}") from error
    size = settings.get("draft_vocab_size") or settings.get("target_vocab_size")
    if size and width > size:
        raise ValueError(f"{place}: topology asks for {width} candidates a depth, but the drafter knows {size} tokens")


def check_dynamic_tree(settings: Mapping[str, Any], place: str) -> None:
    """Raise ValueError for a tree by confidence whose fields are unknown, senseless or larger than any step."""
    told, place = settings.get("dynamic_tree"), f"{place}: dynamic_tree"
    if told is None:
        return
    hints = get_type_hints(DynamicTree)
    refuse_unknown(told, hints, place)
    for name, value in told.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{place}: {name} must be {_spelled(hints[name])}, but is {_short(value)}")
        if isinstance(value, int) and value > MOST_NODES:
            raise ValueError(f"{place}: {name} must be at most {MOST_NODES}, but is {value}")
    try:
        DynamicTree(**told)
    except ValueError as error:
        raise ValueError(f"{place} makes no sense: {error}") from error


def check_weights(skeleton: nn.Module, found: Mapping[str, tuple[str, tuple[int, ...]]], place: str) -> None:
    """Raise ValueError unless the tensors in a checkpoint are those of the drafter, by name, shape and kind.

    skeleton: the drafter on the meta device. Without this, transformers would fill gaps with random numbers.
    """
    wanted = skeleton.state_dict()
    wrong = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unexpected": sorted(found.keys() - wanted.keys()),
        "of another shape": [n for n in sorted(wanted) if n in found and tuple(wanted[n].shape) != found[n][1]],
        "of another type": [n for n in sorted(wanted) if n in found and not _same_kind(wanted[n], found[n][0])],
    }
    for problem, names in wrong.items():
        if names:
            first = names[0]
            detail = f" (must be {list(wanted[first].shape)}, is {list(found[first][1])})" if "shape" in problem else ""
            raise ValueError(
                f"{place} must hold exactly the weights its config.json describes, but {len(names)} are {problem}: "
                f"{', '.join(names[:3])}{detail}; copy the checkpoint again"
            )


def check_values(drafter: Drafter, place: str) -> None:
    """Raise ValueError for weights that no drafter can have: not finite, or a draft vocabulary that is none."""
    for name, weight in drafter.named_parameters():
        if not bool(weight.isfinite().all()):
            raise ValueError(f"{place}: weights must be finite, but {name} holds NaN or infinity; train it again")
    for module in drafter.modules():
        if isinstance(module, DraftVocabulary) and module.chosen is not None:
            ids, size = module.ids, drafter.config.target_vocab_size
            if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
                raise ValueError(
                    f"{place}: the draft vocabulary must be ascending token ids below {size}, but is not; copy it again"
                )


def annotations_of(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """Return the annotation of every setting of a configuration, those every drafter has included."""
    hints: dict[str, Any] = {}
    for kind in reversed(config_class.__mro__):
        if issubclass(kind, DrafterConfig) and "__init__" in vars(kind):
            hints |= get_type_hints(vars(kind)["__init__"])
    return {name: hint for name, hint in hints.items() if name not in ("kwargs", "return")}


def fits(value: Any, hint: Any) -> bool:
    """Say whether a value from JSON is what an annotation asks for; numbers must be finite."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin is Literal:
        return value in inside
    if origin is dict or hint is dict:
        return isinstance(value, dict)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list | tuple) and all(fits(one, inside[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or (isinstance(hint, type) and isinstance(value, hint))


def _most(name: str) -> int | None:
    if name.startswith("num_"):
        return MOST_MODULES
    return LARGEST_SIZE if name.endswith(("_size", "_width")) else None


def _same_kind(wanted: torch.Tensor, found: str) -> bool:
    return found in FLOATS if wanted.is_floating_point() else found == "I64"


def _spelled(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("collections.abc.", "").replace("typing.", "")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
