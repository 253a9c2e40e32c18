"""The only file that spells transformers' differences between model families.

Everything is read from a loaded causal language model; nothing is set on it but, for the length of a pass, the function
by which it attends (`core/attention.py`). What a tree cannot run on is refused here, by name, with what would work
instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import GROUPED, STOCK, grouped

TREE_LAYER_TYPES = {"full_attention", "sliding_attention"}
ALIBI_FAMILIES = {"bloom", "mpt"}
NEEDS_SUPPORTED = "use a decoder-only attention model: Llama, Qwen, Mistral, Gemma, Phi-3, GPT-2, GPT-NeoX, OPT, ..."

PROVEN_FAMILIES = {"cohere", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "opt"} | {
    "phi3",
    "qwen2",
    "qwen3",
}
"""Values of `model_type` that the test matrix holds; any other family proves itself first (`inference/checks.py`)."""


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the language model itself (for multi-modal wrappers, the text part's)."""
    return model.config.get_text_config(decoder=True)


def check_supported(model: PreTrainedModel) -> None:
    """Raise ValueError when this model cannot verify a tree, naming the reason and what would work."""
    name, config = type(model).__name__, text_config(model)

    def refuse(why: str, remedy: str = NEEDS_SUPPORTED) -> None:
        raise ValueError(f"{name} ({config.model_type}) cannot verify draft trees: {why}; {remedy}")

    if model.config.is_encoder_decoder:
        refuse("it is an encoder-decoder model")
    if model.get_output_embeddings() is None:
        refuse("it has no language-model head", "load it with AutoModelForCausalLM")
    if getattr(model, "_is_stateful", False):
        refuse("its recurrent (state-space or linear-attention) state cannot follow several branches at once")
    other_layers = set(getattr(config, "layer_types", None) or ()) - TREE_LAYER_TYPES
    if other_layers:
        refuse(f"it has layers of type {', '.join(sorted(other_layers))}, which take no tree mask")
    if config.model_type in ALIBI_FAMILIES or getattr(config, "alibi", False):
        refuse("its ALiBi position bias is tied to storage order, so nodes of one depth would get different positions")
    if "local" in (getattr(config, "attention_layers", None) or ()):
        refuse("the window of its local attention is tied to storage order, not to positions")
    if getattr(config, "word_embed_proj_dim", config.hidden_size) != config.hidden_size:
        refuse("its head reads states of another width than its layers write")
    if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
        refuse("it numbers positions itself, in storage order")
    attention = attention_implementation(model)
    if attention not in ("sdpa", "eager"):
        refuse(
            f"its attention implementation '{attention}' takes no tree mask",
            "load the model with attn_implementation='sdpa' (or 'eager' where sdpa is not available)",
        )


def attention_implementation(model: PreTrainedModel) -> str:
    """Return the name of the attention implementation the model was loaded with, such as "sdpa" or "eager"."""
    name = text_config(model)._attn_implementation or "eager"
    return STOCK if name == GROUPED else name


def window_of(model: PreTrainedModel) -> int | None:
    """Return the sliding window in positions, or None if every layer attends to everything."""
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", True) is False:
        return None
    return None if kinds == {"full_attention"} else int(window)


def layer_masks(model: PreTrainedModel, full: Tensor, windowed: Tensor | None, dtype: torch.dtype) -> Any:
    """Turn boolean masks into what this model's forward takes as `attention_mask`.

    full [B, Q, C] bool; windowed [B, Q, C] bool for sliding-window layers, None when there are none.

    Returns one 4-D mask, or a dict of them by layer type where layers differ. sdpa takes booleans; eager attention adds
    the mask to its scores and would be silently wrong with booleans.
    """
    additive = attention_implementation(model) == "eager"

    def shaped(mask: Tensor) -> Tensor:
        mask = mask[:, None]
        if not additive:
            return mask
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)

    if windowed is None:
        return shaped(full)
    kinds = set(getattr(text_config(model), "layer_types", None) or ("sliding_attention",))
    if kinds == {"full_attention", "sliding_attention"}:
        return {"full_attention": shaped(full), "sliding_attention": shaped(windowed)}
    return shaped(windowed)


def run_base(model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: Any, cache: Any) -> Tensor:
    """Run the model below its head.

    tokens [B, Q] long, positions [B, Q] long, mask as made by `layer_masks`, cache a transformers cache or None.

    Returns [B, Q, D]: the state after the final norm, what the head multiplies.
    """
    base = model.base_model
    cache_name = _cache_argument(type(base))
    few = tokens.shape[1] if cache is not None else 0  # in training layers may run again, outside of this
    with grouped(text_config(model), few):
        out = base(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            use_cache=cache is not None,
            **{cache_name: cache},
        )
    return out.last_hidden_state


@lru_cache(maxsize=64)
def _cache_argument(base: type[nn.Module]) -> str:
    """Return how this family's forward spells its cache argument; looked up once, as it costs 0.1 ms."""
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"


class HeadRows:
    """The head's rows for the tokens asked for last: gathering them takes about as long as three products with them.

    Kept only for a frozen, plain linear head; gathered again when the head or the tokens have changed.
    """

    def __init__(self) -> None:
        self._told: list[Tensor] = []
        self._state: list[tuple[int, int]] = []
        self._rows: tuple[Tensor, Tensor | None] | None = None

    def of(self, head: nn.Linear, token_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return weight [M, D] and bias [M] of the tokens [M] long."""
        weight, bias = head.weight, head.bias
        told = [token_ids, weight] if bias is None else [token_ids, weight, bias]
        if any(t.requires_grad or t.is_inference() for t in told):  # the latter do not tell whether they have changed
            return weight[token_ids], None if bias is None else bias[token_ids]
        state = [(t.data_ptr(), t._version) for t in told]
        same = len(told) == len(self._told) and all(a is b for a, b in zip(told, self._told, strict=True))
        if self._rows is None or not same or state != self._state:
            with torch.inference_mode(False):  # what decoding has gathered, training may use
                self._rows = weight.detach()[token_ids], None if bias is None else bias.detach()[token_ids]
            self._told, self._state = told, state
        return self._rows


def head_logits(
    model: PreTrainedModel, final: Tensor, token_ids: Tensor | None = None, rows: HeadRows | None = None
) -> Tensor:
    """Return the model's own logits, scaled and soft-capped, for states after the final norm [..., D].

    token_ids [M] long: only these tokens' logits; None means all. Where the head is a plain linear layer with its
    weights at hand (neither quantised nor sharded), other tokens' logits are not even computed. rows: keeps the
    weights of these tokens for the next call.

    Returns [..., V] or [..., M].
    """
    config, head = text_config(model), output_head(model)
    if token_ids is None:
        logits = head(final)
    elif type(head) is nn.Linear and head.weight.numel() > 0:
        logits = nn.functional.linear(final, *(rows or HeadRows()).of(head, token_ids))
    else:
        logits = head(final)[..., token_ids]
    scale = getattr(config, "logit_scale", None)  # Cohere
    if scale is not None:
        logits = logits * scale
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if divisor is not None:
        logits = logits / divisor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma-2, Gemma-3
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits


def output_head(model: PreTrainedModel) -> nn.Module:
    """Return the language-model head."""
    head = model.get_output_embeddings()
    assert head is not None, "check_supported refuses models without one"
    return head


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers, found by its length: the first ModuleList with `num_hidden_layers` entries."""
    wanted = text_config(model).num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return module
    raise ValueError(f"{type(model).__name__} has no list of {wanted} decoder layers; {NEEDS_SUPPORTED}")


@contextmanager
def captured(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Collect the raw outputs [B, Q, D] of the given decoder layers (0-based) during the forward passes inside.

    Raises ValueError for a layer that the model does not have.
    """
    found: dict[int, Tensor] = {}

    def keep(layer: int):
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    blocks = decoder_layers(model) if layers else ()
    if any(not 0 <= layer < len(blocks) for layer in layers):
        raise ValueError(f"feature layers must be block numbers from 0 to {len(blocks) - 1}, but are {list(layers)}")
    handles = [blocks[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class SoftLimit(int):
    """A number of positions that a model can go beyond, though it was not trained to: it has no table of positions."""


def position_limit(model: PreTrainedModel) -> int | None:
    """Return how many positions the model was built for, or None where its configuration names no limit.

    A `SoftLimit` for rotary embeddings; those of type "dynamic" are held to it, since beyond it they turn every angle
    whenever the text grows, so that what is cached no longer fits.
    """
    config = text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        return None
    kinds = {kind.get("rope_type", "default") for kind in _rotary_kinds(config)}
    return SoftLimit(limit) if kinds and "dynamic" not in kinds else int(limit)


def rope_switch(model: PreTrainedModel) -> int | None:
    """Return the position from which on rotary embeddings use other angles (longrope), or None.

    Such models choose the angles of every token by the last position of the whole forward pass, so one pass, and one
    cache, must lie on one side. ("dynamic" embeddings change beyond `position_limit` only.)
    """
    config = text_config(model)
    for kind in _rotary_kinds(config):
        if kind.get("rope_type") == "longrope":
            original = kind.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return int(original)
    return None


def _rotary_kinds(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings: none, one, or one for each layer type where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [kind for kind in rope.values() if isinstance(kind, dict)] or ([rope] if rope else [])


def recompute_layers(model: PreTrainedModel) -> None:
    """Have the decoder layers recompute their insides in the backward pass, where they are set to: less memory.

    Its older name is deprecated in newer releases.
    """
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def set_recomputing(model: PreTrainedModel, recomputing: bool) -> None:
    """Let layers that recompute their insides do so, or not: they do in training mode, which here holds for them alone.

    Everything inside of them stays in its own mode, so that no dropout comes with it.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = recomputing and layer.gradient_checkpointing
