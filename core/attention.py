"""Attention of a few nodes behind a long cache, for models whose query heads share keys and values.

Wherever a mask is given, transformers' `sdpa` first copies all cached keys and values once for every query head that
shares them: for a draft tree behind a long text far more bytes than the attention itself reads. Here the queries of the
heads that share are laid one behind the other, as further rows of one head, and only the small mask is repeated; the
arithmetic of each row is the same. transformers does so itself where there is a single query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

STOCK, GROUPED = "sdpa", "headstart_grouped"
"""Names among transformers' attention implementations."""

MOST_QUERIES = 128
"""Nodes up to which it is used: the mask, repeated, then stays smaller than the keys and values that need not be."""

UNUSUAL = ("position_bias", "softcap")
"""What a model may ask for that is left to transformers."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `sdpa` does; see transformers' attention interface.

    query [B, H, Q, D]; key and value [B, G, C, D], each shared by H / G heads; attention_mask [B, 1, Q, C] bool or
    additive. Returns [B, Q, H, D] and no weights.
    """
    batch, heads, queries, _ = query.shape
    shared = heads // key.shape[1]
    takes_all = attention_mask is not None and attention_mask.shape[1] == 1
    unusual = any(kwargs.get(name) is not None for name in UNUSUAL)
    if not takes_all or shared == 1 or not 1 < queries <= MOST_QUERIES or dropout or unusual:
        kwargs |= {"dropout": dropout, "scaling": scaling}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = query.reshape(batch, key.shape[1], shared * queries, -1)
    mask = attention_mask.repeat(1, 1, shared, 1)  # type: ignore[union-attr]
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)


@contextmanager
def grouped(config: Any, queries: int) -> Iterator[None]:
    """Let a model attend in groups during the forward passes inside, if it uses `sdpa` and its heads share keys.

    config: of the language model, which its layers read at every pass. queries: nodes of the pass, 0 if it is none over
    a tree. Another thread may run the model meanwhile: whatever is no tree's pass goes to transformers' own function.
    """
    shared = getattr(config, "num_key_value_heads", None) not in (None, getattr(config, "num_attention_heads", None))
    if not shared or config._attn_implementation not in (STOCK, GROUPED) or not 1 < queries <= MOST_QUERIES:
        yield
        return
    config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = STOCK
