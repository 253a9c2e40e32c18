"""The methods there are, one line each, and how a drafter is made or found."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils.hub import cached_file

from .base import Drafter, DrafterConfig, TargetView
from .medusa import MedusaConfig, MedusaDrafter

METHODS: dict[str, tuple[type[DrafterConfig], type[Drafter]]] = {
    "medusa": (MedusaConfig, MedusaDrafter),
}


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
    known = config_fields(config_class)
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(sorted(known))}"
            raise ValueError(f"{method} has no setting {name!r}{hint}")
    if draft_vocabulary is not None:
        settings["draft_vocab_size"] = len(draft_vocabulary)
    elif settings.get("draft_vocab_size") is not None:
        raise ValueError("draft_vocab_size needs to know which tokens: pass draft_vocabulary, their sorted ids")
    settings.setdefault("target_name", getattr(target.config, "name_or_path", None) or None)
    config = config_class(**{**settings, "target_width": target.width, "target_vocab_size": target.vocab_size})
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
    shared = {"topology", "draft_vocab_size", "target_name", "target_revision"}
    return {name: value for name, value in defaults.items() if name in shared or name not in inherited}


class AutoDrafter:
    """Loads a drafter of any method from a folder or a Hub id."""

    @staticmethod
    def from_pretrained(name_or_path: str | Path, revision: str | None = None, **kwargs: Any) -> Drafter:
        """Load a drafter in eval mode.

        name_or_path: a folder, or a Hub id with a "/". Weights are read from safetensors only.

        Raises ValueError for a checkpoint that is missing, foreign, truncated or incomplete.
        """
        path = Path(name_or_path)
        if not path.is_dir() and "/" not in str(name_or_path).strip("/."):
            raise ValueError(
                f"a drafter must be a folder or a Hub id like 'owner/name', but {name_or_path!s} is neither"
            )
        config_file = cached_file(
            str(name_or_path), "config.json", revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if config_file is None:
            raise ValueError(
                f"{name_or_path} must hold a drafter's config.json, but has none; is it a headstart checkpoint?"
            )
        try:
            model_type = json.loads(Path(config_file).read_text(encoding="utf-8")).get("model_type")
        except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
            raise ValueError(
                f"{config_file} must be a JSON object, but is not ({error}); copy the checkpoint again"
            ) from error
        by_type = {config.model_type: (config, drafter) for config, drafter in METHODS.values()}
        if model_type not in by_type:
            raise ValueError(
                f"{name_or_path} must be a drafter of type {', '.join(by_type)}, but its model_type is {model_type!r}"
            )
        drafter_class = by_type[model_type][1]
        try:
            loaded: Any = drafter_class.from_pretrained(
                str(name_or_path),
                revision=revision or "main",
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **kwargs,
            )
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{name_or_path} must hold whole weights in model.safetensors, but they cannot be read ({error}); "
                "copy the checkpoint again"
            ) from error
        drafter, found = loaded
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found[problem]:
                names = ", ".join(str(key) for key in sorted(found[problem])[:3])
                raise ValueError(
                    f"{name_or_path} must hold exactly the weights its config.json describes, but there are "
                    f"{problem.replace('_', ' ')}: {names}; copy the checkpoint again"
                )
        return drafter.eval()
