"""A target that was trained together with its drafter: known again by its weights, and its LoRA adapter put on.

Such a drafter guesses what the changed target says. Its config tells which one that is (`adapted_target`), and the
adapter lies beside it in peft's format. Nothing here changes a model unless it is asked to, and it is undone exactly.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.base import Drafter
from ..drafters.checkpoint import first_line, pickles_in, read_json

ADAPTER, TARGET = "adapter", "target"
"""Folders beside a drafter's files: the adapter in peft's format, and a whole changed target."""

SAMPLES = 64
"""Values of each weight that a target is known by."""

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
LAW_OF_LORA = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Settings of an adapter that decide, beside its weights, what it adds."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells a target from another. base: of its weights. adapter: of the LoRA adapter that it carries, or None."""

    base: str
    adapter: str | None


def require_peft() -> None:
    """Raise ValueError where peft is not installed."""
    if find_spec("peft") is None:
        raise ValueError("LoRA adapters need peft, which is not installed: pip install 'headstart[lora]'")


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """Fingerprint a model as it is now: a sample of every weight, and every value of an adapter.

    Values are rounded to bfloat16 first, so that one checkpoint is the same in the types it may be loaded in.
    """
    base, lora = hashlib.sha256(), {}
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            lora[re.sub(r"(\.lora_\w+)\.[^.]+", r"\1", name)] = weight  # without the adapter's name
            continue
        values = weight.detach().reshape(-1)
        base.update(f"{name.replace('.base_layer', '')}{tuple(weight.shape)}".encode())
        base.update(_rounded(values[:: max(1, values.numel() // SAMPLES)]))
    configs = list(vars(model).get("peft_config", {}).values())
    settings = vars(configs[0]) if configs else {}
    return Fingerprint(_short(base), adapter_fingerprint(lora, settings) if lora else None)


def adapter_fingerprint(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """Fingerprint an adapter by all its values, named as in the model, and by the settings that scale it."""
    digest = hashlib.sha256(json.dumps({name: settings.get(name) for name in LAW_OF_LORA}, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode() + _rounded(tensor.detach()))
    return _short(digest)


def _rounded(values: Tensor) -> bytes:
    if values.is_floating_point():
        values = values.float().bfloat16()
    return values.contiguous().reshape(-1).cpu().view(torch.uint8).numpy().tobytes()


def _short(digest: Any) -> str:
    return "sha256:" + digest.hexdigest()[:16]


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Keep peft from warning of what is meant (an adapted head tied to embeddings, GPT-2's layers) or not ours."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        warnings.filterwarnings("ignore", message="Model (with|has) `tie_word_embeddings=True`")
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield


class AppliedAdapter:
    """A LoRA adapter on a model: its linear layers are replaced in place, and put back by `remove`.

    layers: peft's model around it. The weights of the model itself are not touched, so that putting back is exact.
    """

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        from peft import LoraConfig, PeftModel

        # Only what a plain adapter needs: other settings may import whatever module they name.
        stored = read_json(folder / SETTINGS)
        settings = {name: stored[name] for name in (*LAW_OF_LORA, "target_modules") if name in stored}
        config = LoraConfig(task_type="CAUSAL_LM", inference_mode=True, **settings)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._training = [module for module in model.modules() if module.training]
        with quiet_peft():
            # The adapter is served in the type of the target, as the drafter is.
            self.layers = PeftModel.from_pretrained(model, str(folder), config=config, autocast_adapter_dtype=False)
        self.layers.requires_grad_(False)
        model.eval()

    def remove(self) -> None:
        """Put the model's own layers back."""
        vars(self.layers.unload()).pop("peft_config", None)  # older releases leave it
        for parameter in self._trained:
            parameter.requires_grad_(True)
        for module in self._training:
            module.training = True


def adapt(model: PreTrainedModel, drafter: Drafter, apply_adapter: bool) -> AppliedAdapter | None:
    """Make sure that a model is the target that a drafter was trained with; put the adapter on where that is asked for.

    Returns the adapter if it was put on, None if nothing was done. Raises ValueError for any other target, for a
    target that lacks the adapter where `apply_adapter` is off, and for an adapter that is missing, damaged or another.
    """
    folder = Path(drafter.name_or_path) if drafter.name_or_path else None
    wanted: dict[str, Any] = drafter.config.adapted_target or {}
    if not wanted:
        if apply_adapter:
            warnings.warn("apply_adapter has no effect: this drafter was trained without one", stacklevel=3)
        return None
    if not isinstance(wanted.get("base"), str) or not (wanted.get("adapter") or wanted.get("whole")):
        raise ValueError(
            f"adapted_target must name base and adapter, or base and whole, but is {wanted}; train it anew"
        )
    found = fingerprint(model)
    if found == Fingerprint(str(wanted.get("whole")), None):
        return None
    if found.adapter is not None and found == Fingerprint(wanted["base"], wanted.get("adapter")):
        return None
    place = folder if folder is not None else Path("the folder it was saved in")
    if wanted.get("adapter") is None:
        raise ValueError(
            f"the drafter was trained together with its target, all of whose weights changed ({wanted.get('whole')}), "
            f"but this target is another ({found.base}); load the one in {place / TARGET}"
        )
    if found.adapter is not None:
        raise ValueError(
            f"the drafter needs its target with the adapter {wanted['adapter']}, but this one already carries "
            f"{found.adapter}; load the target without an adapter"
        )
    if not apply_adapter:
        whole = f", or load the merged target in {place / TARGET}" if wanted.get("whole") else ""
        raise ValueError(
            f"the drafter was trained together with an adapter of its target, which changes what the target says, and "
            f"this target does not carry it; to put on the one in {place / ADAPTER}, pass apply_adapter=True "
            f"(--apply_adapter){whole}"
        )
    if found.base != wanted["base"]:
        raise ValueError(
            f"the adapter was trained on a target with the fingerprint {wanted['base']} "
            f"({drafter.config.target_name}, in {wanted.get('dtype')}), but this one has {found.base}; load that one, "
            "in the same type"
        )
    if folder is None:
        raise ValueError("the adapter lies beside a drafter's files, but this drafter was not loaded from any: save it")
    return _apply(model, folder / ADAPTER, wanted["adapter"])


def _apply(model: PreTrainedModel, folder: Path, wanted: str) -> AppliedAdapter:
    require_peft()
    found = stored_fingerprint(folder)
    if found != wanted:
        raise ValueError(
            f"{folder} must hold the adapter {wanted} that the drafter was trained with, but holds {found}; copy the "
            "whole folder of the drafter again"
        )
    try:
        applied = AppliedAdapter(model, folder)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        vars(model).pop("peft_config", None)
        raise ValueError(
            f"the adapter in {folder} cannot be put on the target ({first_line(error)}); copy the folder again, or "
            "take a release of peft that is not older than the one it was made with"
        ) from error
    carried = fingerprint(model).adapter
    if carried != wanted:  # its settings name other layers than its weights
        applied.remove()
        raise ValueError(f"{folder} must fit the target's layers, but {SETTINGS} names others than {WEIGHTS} holds")
    return applied


def stored_fingerprint(folder: Path) -> str:
    """Fingerprint the adapter in a folder. Raises ValueError where it is missing, damaged, or no LoRA adapter."""
    if not (folder / WEIGHTS).is_file() or not (folder / SETTINGS).is_file():
        pickles = ", ".join(pickles_in(folder)) if folder.is_dir() else ""
        why = f"only {pickles}: pickles can run code and are never opened" if pickles else "does not"
        raise ValueError(f"{folder} must hold {SETTINGS} and {WEIGHTS}, but {why}; copy the drafter's folder again")
    settings = read_json(folder / SETTINGS)
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{folder} must hold a LoRA adapter, but its peft_type is {settings.get('peft_type')!r}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{folder / WEIGHTS} must be a whole safetensors file, but cannot be read ({first_line(error)}); copy it "
            "again"
        ) from error
    return adapter_fingerprint({name.removeprefix("base_model.model."): t for name, t in tensors.items()}, settings)
