"""Tiny random two-layer targets in float64, one per family, each made once per session."""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from headstart.core import masks
from headstart.core.kv_cache import BufferedLayer, RaggedCache
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

VOCAB, WIDTH, LIMIT, WINDOW = 64, 32, 64, 6
"""V, D, positions that the models are built for, and the sliding window of those that have one."""

# Large initial weights make logits that differ by much more than rounding, and texts that do not repeat one token.
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LIMIT,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
BY_ALL_HEADS = {key: value for key, value in COMMON.items() if key not in ("num_key_value_heads", "head_dim")}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8}
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "qwen2": ("qwen2", COMMON),
    "qwen3": ("qwen3", COMMON),
    "mistral-window": ("mistral", COMMON | {"sliding_window": WINDOW}),
    "phi3": ("phi3", COMMON | {"sliding_window": None}),
    "phi3-window": ("phi3", COMMON | {"sliding_window": WINDOW}),
    "gemma2-window": ("gemma2", COMMON | GEMMA | BOTH_KINDS),
    "gemma3-window": ("gemma3_text", COMMON | GEMMA | BOTH_KINDS | {"final_logit_softcapping": 3.0}),
    "gpt2": ("gpt2", BY_ALL_HEADS),
    "gpt_neox": ("gpt_neox", BY_ALL_HEADS | {"rotary_pct": 0.5}),
    "opt": ("opt", BY_ALL_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "init_std": 0.3}),
    "cohere": ("cohere", COMMON | {"logit_scale": 0.3}),
    "granite": ("granite", COMMON | {"logits_scaling": 3.0, "embedding_multiplier": 2.0}),
}
"""Name in the matrix -> `model_type` and settings of its configuration."""

EAGER_ONLY = {"bloom", "gemma2", "gpt_neo", "gptj", "mamba", "mamba2", "mpt", "openai-gpt"}


def make_model(model_type: str, settings: dict[str, Any], attention: str | None = None) -> PreTrainedModel:
    """Make a random model in float64; sdpa where transformers has it."""
    implementation = attention or ("eager" if model_type in EAGER_ONLY else "sdpa")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=implementation)
    return model.eval()


@cache
def tiny_target(family: str) -> Target:
    """Return the target of one row of `FAMILIES`; shared, so tests must not change it."""
    return Target(make_model(*FAMILIES[family]))


def logit_tolerance(target: Target) -> float:
    """Return what rounding may change in a logit: eager attention computes its softmax in float32."""
    return 1e-5 if target.config._attn_implementation == "eager" else 1e-7


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Make prompts of the given lengths from random token ids, never the padding id."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def own_text(target: Target, prompts: list[list[int]], new: int | list[int], **settings: Any) -> list[list[int]]:
    """Return each row's prompt followed by what the plain loop says: what test drafters are told."""
    return [
        prompt + more
        for prompt, more in zip(prompts, plain_generate(target, prompts, DecodingRules(new, **settings)), strict=True)
    ]


def transformers_text(
    target: Target, prompt: list[int], new: int, processors: LogitsProcessorList | None = None
) -> list[int]:
    """Return the new tokens of transformers' own greedy `generate`."""
    ids = torch.tensor([prompt])
    text: Tensor = target.model.generate(  # type: ignore[assignment]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, logits_processor=processors
    )
    return text[0, len(prompt) :].tolist()


@torch.inference_mode()
def path_logits(target: Target, tokens: list[int]) -> Tensor:
    """Return the logits [T, V] of one sequence without cache or tree, through the same masks as training."""
    ids = torch.tensor([tokens])
    return target.logits(target.encode(ids, torch.ones_like(ids, dtype=torch.bool), ()).final)[0]


@torch.inference_mode()
def committed_state(target: Target, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return keys and values per layer [heads, T, width] of a fresh pass over one sequence."""
    cache = target.new_cache(1)
    ids = torch.tensor([tokens])
    positions = torch.arange(len(tokens))[None]
    target.forward(ids, positions, masks.causal(torch.ones_like(ids, dtype=torch.bool)), cache, ())
    return [layer.keys[0] for layer in layers_of(cache)], [layer.values[0] for layer in layers_of(cache)]


def layers_of(cache: RaggedCache) -> list[BufferedLayer]:
    """Return the layers of a cache, by their true type."""
    assert all(isinstance(layer, BufferedLayer) for layer in cache.kv.layers)
    return cast(list[BufferedLayer], cache.kv.layers)
