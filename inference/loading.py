"""Load a target by name: a folder, or a Hub id with a "/"; nothing else ever reaches for the network."""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core.prompts import template_fingerprint, tokenizer_fingerprint
from ..drafters.base import Drafter

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_name(name: str) -> str:
    """Return the name if it is a folder or a Hub id. Raises ValueError for anything else: a typo must not hang."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if "/" not in name.strip("/.") or name.startswith((".", "/", "~")):
        siblings = [p.name for p in path.parent.glob("*") if p.is_dir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, siblings, 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ValueError(f"a target must be a folder or a Hub id like 'owner/name', but {name!r} is neither{hint}")
    return name


def load_target(
    name: str,
    dtype: str = "auto",
    revision: str | None = None,
    device: str | None = None,
    bits: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, frozen and in eval mode.

    name: folder or Hub id. dtype: one of `DTYPES`; "auto" keeps the checkpoint's. device: where to put it; by default
        the first GPU if there is one. bits: 4 or 8 loads it quantised, which needs bitsandbytes and a GPU.

    Raises ValueError when the name is neither folder nor Hub id, or when bitsandbytes is asked for and not there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but is {dtype!r}")
    name = check_name(name)
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "revision": revision}
    if bits is not None:
        options["quantization_config"] = _quantised(bits)
    elif device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    if bits is None:
        model.to(device)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, padding_side="left")
    return model.eval().requires_grad_(False), tokenizer


def eos_ids(model: PreTrainedModel) -> list[int]:
    """Return the ids that end an answer, from the model's generation configuration."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def warn_of_other_text(drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn when a drafter was trained on text rendered otherwise: it stays lossless, but guesses badly."""
    config = drafter.config
    made_with = {
        "tokenizer": (config.tokenizer_fingerprint, tokenizer_fingerprint(tokenizer)),
        "chat template": (config.chat_template_fingerprint, template_fingerprint(tokenizer)),
    }
    for what, (then, now) in made_with.items():
        if then is not None and then != now:
            warnings.warn(
                f"the drafter was trained with another {what} ({then}) than this target's ({now}); the text stays the "
                "same, but fewer guesses will be right: use the target it was trained for, or train it again",
                stacklevel=2,
            )


def _quantised(bits: int) -> Any:
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, but is {bits}")
    if find_spec("bitsandbytes") is None:
        raise ValueError(
            "loading in 4 or 8 bit needs bitsandbytes and a GPU; run `pip install bitsandbytes`, or load in bfloat16"
        )
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.bfloat16)
