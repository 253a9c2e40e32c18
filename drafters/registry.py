"""The methods there are, one line each, and how a drafter is made or found."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor

from .base import Drafter, TargetView
from .checkpoint import (
    check_settings,
    check_values,
    check_weights,
    first_line,
    kind_of,
    nearest_folder,
    read_json,
    refuse_unknown,
    weights_in,
)
from .config import DrafterConfig
from .eagle import EagleConfig, EagleDrafter
from .eagle3 import Eagle3Config, Eagle3Drafter
from .hydra import HydraConfig, HydraDrafter
from .medusa import MedusaConfig, MedusaDrafter
from .mlp import MlpConfig, MlpDrafter
from .mtp import MtpConfig, MtpDrafter
from .redrafter import RedrafterConfig, RedrafterDrafter

METHODS: dict[str, tuple[type[DrafterConfig], type[Drafter]]] = {
    "eagle": (EagleConfig, EagleDrafter),
    "eagle3": (Eagle3Config, Eagle3Drafter),
    "hydra": (HydraConfig, HydraDrafter),
    "medusa": (MedusaConfig, MedusaDrafter),
    "redrafter": (RedrafterConfig, RedrafterDrafter),
    "mlp": (MlpConfig, MlpDrafter),
    "mtp": (MtpConfig, MtpDrafter),
}

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_OPTIONS = ("cache_dir", "token", "local_files_only", "force_download")


def drafter_classes(method: str) -> tuple[type[DrafterConfig], type[Drafter]]:
    """Return the configuration and drafter class of a method. Raises ValueError for an unknown name."""
    if method not in METHODS:
        near = get_close_matches(method, METHODS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"method must be one of {', '.join(sorted(METHODS))}, but is {method!r}{hint}")
    return METHODS[method]


def new_drafter(method: str, target: TargetView, draft_vocabulary: Tensor | None = None, **settings: Any) -> Drafter:
    """Make a fresh drafter for a target, initialised from its weights, in fp32.

    draft_vocabulary [Vd] long: the target tokens it can guess, sorted; None means all of them.
    settings: fields of the method's configuration. Raises ValueError for unknown ones, naming the nearest.
    """
    config_class, drafter_class = drafter_classes(method)
    refuse_unknown(settings, config_fields(config_class), method)
    check_settings(config_class, settings, method)
    if draft_vocabulary is not None:
        settings["draft_vocab_size"] = len(draft_vocabulary)
    elif settings.get("draft_vocab_size") is not None:
        raise ValueError("draft_vocab_size needs to know which tokens: pass draft_vocabulary, their sorted ids")
    settings.setdefault("target_name", getattr(target.config, "name_or_path", None) or None)
    for name, value in config_class.settings_for(target).items():
        own = settings.get(name)  # None where the command line left it; a mapping may name some of its entries
        settings[name] = {**value, **own} if isinstance(own, dict) else value if own is None else own
    sizes = {"target_width": target.width, "target_vocab_size": target.vocab_size}
    config = config_class(**{**settings, **sizes})
    with torch.device("cpu"):
        drafter = drafter_class(config).float()
    drafter.to(target.device)  # type: ignore[arg-type]
    if draft_vocabulary is not None:
        drafter.set_draft_vocabulary(draft_vocabulary.to(target.device))
    drafter.initialise_from(target)
    drafter.config.feature_layers = list(drafter.feature_layers)
    return drafter


def config_fields(config_class: type[DrafterConfig]) -> dict[str, Any]:
    """Return a configuration's own fields and their defaults, those every drafter has included."""
    defaults = config_class().to_dict()
    inherited = DrafterConfig().to_dict()
    shared = {"topology", "dynamic_tree", "draft_vocab_size", "target_name", "target_revision"}
    return {name: value for name, value in defaults.items() if name in shared or name not in inherited}


class AutoDrafter:
    """Loads a drafter of any method from a folder or a Hub id."""

    @staticmethod
    def check(name: str) -> None:
        """Raise ValueError unless a method, a drafter's folder or a Hub id has this name; nothing is built from it."""
        if name not in METHODS or Path(name).is_dir():
            _classes_of(_folder(name, None, {}))

    @staticmethod
    def from_pretrained(name_or_path: str | Path, revision: str | None = None, **kwargs: Any) -> Drafter:
        """Load a drafter in eval mode.

        name_or_path: a folder, or a Hub id with a "/". Weights are read from safetensors only.
        kwargs: `cache_dir`, `token`, `local_files_only` and `force_download` for the Hub, others as in transformers.

        Raises ValueError for a checkpoint that is missing, foreign, damaged or incomplete.
        """
        download = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        folder = _folder(str(name_or_path), revision, download)
        config_class, drafter_class = _classes_of(folder)
        place = str(folder / "config.json")
        settings = read_json(folder / "config.json")
        check_settings(config_class, settings, place)
        try:
            config = config_class.from_dict(settings)
            with torch.device("meta"):
                skeleton = drafter_class(config)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{place} does not describe a drafter: {error}; copy the checkpoint again") from error
        if config.feature_layers not in (None, list(skeleton.feature_layers)):
            raise ValueError(
                f"{place}: feature_layers must be {list(skeleton.feature_layers)}, but is {config.feature_layers}"
            )
        check_weights(skeleton, weights_in(folder), str(name_or_path))
        drafter = drafter_class.from_pretrained(str(folder), config=config, use_safetensors=True, **kwargs)
        check_values(drafter, str(name_or_path))
        return drafter.eval()


def _folder(name: str, revision: str | None, download: dict[str, Any]) -> Path:
    """Return the checkpoint's folder; from the Hub only what a drafter is made of is fetched."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(
            f"a drafter must be a folder that holds config.json and model.safetensors, but {name} is a file; files "
            "such as .pt or .bin are pickles and are never opened"
        )
    if not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"a drafter must be a folder or a Hub id like 'owner/name', but {name} is neither{nearest_folder(path)}"
        )
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors"], **download))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no folder here, and could not be fetched from the Hub ({first_line(error)}); check the name, "
            "the revision and the network"
        ) from error


def _classes_of(folder: Path) -> tuple[type[DrafterConfig], type[Drafter]]:
    """Return the classes of the drafter in a folder. Raises ValueError, saying what else lies there."""
    has_config = (folder / "config.json").exists()
    model_type = read_json(folder / "config.json").get("model_type") if has_config else None
    for config_class, drafter_class in METHODS.values():
        if config_class.model_type == model_type:
            return config_class, drafter_class
    known = ", ".join(config.model_type for config, _ in METHODS.values())
    kind = kind_of(folder)
    if kind is not None:
        found = f"is {kind}"
    elif not has_config:
        found = "has none"
    else:
        found = f"its model_type is {model_type!r}"
    raise ValueError(
        f"{folder} must hold a drafter's config.json (model_type {known}), but {found}; give a drafter that "
        "`headstart train` made"
    )
