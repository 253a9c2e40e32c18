"""One decoder layer with rotary positions, borrowed from transformers, for drafters that are small transformers.

Attention over [cache, block] with a mask of our own, as for targets (`core/masks.py`). The layer's sizes and rotary
settings follow the target's unless a configuration says otherwise; they are kept in the drafter's config.json.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .attention import GROUPED

DEFAULT_THETA = 10_000.0
PLAIN_ROPE = {"default", "linear", "llama3", "yarn"}
"""Kinds of rotary embedding whose frequencies do not depend on how long the text has become."""

_parameters = inspect.signature(LlamaDecoderLayer.forward).parameters
CACHE_ARGUMENT = "cache" if "cache" in _parameters else "past_key_values"


def layer_settings(target: Any) -> dict[str, Any]:
    """Return the settings of a layer like the target's own, ready for JSON.

    target: the target's transformers configuration, of any family. Families without rotary positions, or with such that
    depend on the length of the text, get plain ones.
    """
    heads = int(target.num_attention_heads)
    width = int(target.hidden_size)
    told = {name: getattr(target, name, None) for name in ("num_key_value_heads", "head_dim", "intermediate_size")}
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": int(told["num_key_value_heads"] or heads),
        "head_dim": int(told["head_dim"] or width // heads),
        "intermediate_size": int(told["intermediate_size"] or 4 * width),
        "rms_norm_eps": float(getattr(target, "rms_norm_eps", None) or 1e-5),
        "rope_parameters": rope_of(target),
    }


def rope_of(target: Any) -> dict[str, Any]:
    """Return the target's rotary parameters as transformers 5 spells them; plain ones where it has none to copy."""
    told = getattr(target, "rope_parameters", None) or {}
    if "full_attention" in told:  # one set for each kind of layer
        told = told["full_attention"]
    theta = told.get("rope_theta") or getattr(target, "rope_theta", None) or DEFAULT_THETA
    kind = told.get("rope_type", "default")
    if kind not in PLAIN_ROPE:
        return {"rope_type": "default", "rope_theta": float(theta)}
    return {
        **{k: v for k, v in told.items() if k != "partial_rotary_factor"},
        "rope_type": kind,
        "rope_theta": float(theta),
    }


class DecoderLayer(nn.Module):
    """Llama's decoder layer: attention and MLP with residuals, RMS norms before both.

    width: D. settings: see `layer_settings`. attention_input: width of what attention reads, if not D.
    input_norm: whether attention's input is normalised here.
    """

    def __init__(
        self, width: int, settings: dict[str, Any], attention_input: int | None = None, input_norm: bool = True
    ) -> None:
        super().__init__()
        told = {**settings, "hidden_size": width, "attn_implementation": GROUPED}
        self._config = LlamaConfig(**told)
        self.layer = LlamaDecoderLayer(self._config, layer_idx=0)
        if not input_norm:
            self.layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        if attention_input is not None:
            attention = self.layer.self_attn
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(attention, name, nn.Linear(attention_input, getattr(attention, name).out_features, bias=False))
        # frequencies are made on first use: a checkpoint carries no buffer, and loading would leave garbage in one
        self._rotary: list[LlamaRotaryEmbedding] = []

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: Cache | None = None,
        attended: Tensor | None = None,
    ) -> Tensor:
        """Run a block behind the cache.

        x [B, Q, D]: the residual stream. positions [B, Q] long. visible [B, Q, C] bool: who sees which of the cache's
        columns and the block's, in this order. attended [B, Q, D or attention_input]: what attention reads, if not x.

        Returns [B, Q, D]; the cache then holds the block.
        """
        rotary = self.rotary(x.device)(x, positions)
        told: dict[str, Any] = {
            "attention_mask": visible[:, None],
            "position_embeddings": rotary,
            CACHE_ARGUMENT: cache,
        }
        read = self.layer.input_layernorm(x) if attended is None else attended
        x = x + self.layer.self_attn(hidden_states=read, **told)[0]
        return x + self.layer.mlp(self.layer.post_attention_layernorm(x))

    def rotary(self, device: torch.device) -> LlamaRotaryEmbedding:
        """Return the rotary embedding on a device."""
        if not self._rotary or self._rotary[0].inv_freq.device != device:
            self._rotary[:] = [LlamaRotaryEmbedding(self._config).to(device)]
        return self._rotary[0]
