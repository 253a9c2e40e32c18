"""Load a target by name: a folder, or a Hub id with a "/"; nothing else ever reaches for the network."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..core.prompts import template_fingerprint, tokenizer_fingerprint
from ..drafters.base import Drafter
from ..drafters.checkpoint import first_line, kind_of, nearest_folder, pickles_in
from ..drafters.registry import HUB_NAME

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_name(name: str) -> str:
    """Return the name of a folder that can be a target, or of a Hub id, made ready for transformers.

    Raises ValueError for anything else: a typo must not hang, and a foreign folder is told by what it is.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if path.exists():
        raise ValueError(f"a target must be a folder with config.json and safetensors, but {name} is a file")
    if not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"a target must be a folder or a Hub id like 'owner/name', but {name!r} is neither{nearest_folder(path)}"
        )
    return name


def load_target(
    name: str,
    dtype: str = "auto",
    revision: str | None = None,
    device: str | None = None,
    bits: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, frozen and in eval mode.

    name: folder or Hub id; weights are read from safetensors only. dtype: one of `DTYPES`; "auto" keeps the
        checkpoint's. device: where to put it; by default the first GPU if there is one. bits: 4 or 8 loads it
        quantised, which needs bitsandbytes and a GPU.

    Raises ValueError when the name is neither folder nor Hub id, when files are missing, foreign or damaged, or when
    bitsandbytes is asked for and not there.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but is {dtype!r}")
    name = check_name(name)
    with _told(name):
        AutoConfig.from_pretrained(name, revision=revision)
    tokenizer = load_tokenizer(name, revision)  # what is quick and may be missing comes before the weights
    options: dict[str, Any] = {"dtype": dtype if dtype == "auto" else getattr(torch, dtype), "revision": revision}
    if bits is not None:
        options["quantization_config"] = _quantised(bits)
    elif device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _load_model(name, options)
    if bits is None:
        model.to(device)  # type: ignore[arg-type]
    return model.eval().requires_grad_(False), tokenizer


def bfloat16_is_slow() -> bool:
    """Whether there is no GPU, and a CPU that has no instructions for products in bfloat16 and converts instead.

    Passes over many tokens then take several times as long as in float32; one over a single token, which waits for
    memory, does not.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return x86 and not torch.accelerator.is_available() and "AVX512" not in torch.backends.cpu.get_cpu_capability()


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer. Raises ValueError when it has none, or a damaged one."""
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, padding_side="left")
    except Exception as error:  # readers of tokenizers raise anything, plain Exception included
        raise ValueError(
            f"{name} must hold the target's tokenizer (tokenizer.json, tokenizer_config.json), but it cannot be loaded "
            f"({first_line(error)}); copy the files from where the model comes from"
        ) from error


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn whatever a damaged file or a foreign configuration makes of transformers' code into an error for users."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{name} cannot be loaded as a target: it must be a causal language model with weights in safetensors, but "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error


def _load_model(name: str, options: dict[str, Any]) -> PreTrainedModel:
    with _told(name):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    model, found = loaded
    for problem in ("missing_keys", "mismatched_keys"):  # transformers would go on with random numbers
        if found[problem]:
            names = ", ".join(str(key) for key in sorted(found[problem], key=str)[:3])
            raise ValueError(
                f"{name} must hold every weight of {type(model).__name__}, but {len(found[problem])} are "
                f"{problem.removesuffix('_keys')}: {names}; copy the checkpoint again"
            )
    return model


def _check_folder(folder: Path) -> None:
    """Raise ValueError for a folder that is no target, saying what it is instead."""
    kind = kind_of(folder)
    if kind is None:
        raise ValueError(f"{folder} must hold a target's config.json, but has none; give the folder of a model")
    if not kind.startswith("a transformers model"):
        remedy = "merge it into its base model and save that" if "adapter" in kind else "give the model it was made for"
        raise ValueError(f"{folder} must be a causal language model, but is {kind}; {remedy}")
    if not any(folder.glob("*.safetensors")):
        found = ", ".join(pickles_in(folder)[:3])
        why = f"only {found}: pickles can run code and are never opened; save the model with safetensors"
        raise ValueError(f"{folder} must hold weights in safetensors files, but there is {why if found else 'none'}")


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
    if not torch.cuda.is_available():
        raise ValueError("loading in 4 or 8 bit needs a GPU, but there is none here; load in bfloat16")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.bfloat16)
