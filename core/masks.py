"""Boolean attention masks [B, Q, C]: query row q may look at column c. True means "attend".

Masks are made from validity and positions alone, never from storage order, so holes in the cache and ragged rows need
no special case. How a mask is handed to a model is `core/hf.py`'s business.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(cache_valid: Tensor, block: Tensor) -> Tensor:
    """Mask of a block over the cache and itself.

    cache_valid [B, L] bool: columns that hold committed tokens, open to every node.
    block [B, N, N] bool: who sees whom inside the block; the ancestors of a tree, or `causal` for a prompt.

    Returns [B, N, L + N] bool.
    """
    batch, nodes, _ = block.shape
    return torch.cat([cache_valid[:, None, :].expand(batch, nodes, -1), block], dim=-1)


def causal(token_mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """Causal mask of whole sequences, for prefill and training.

    token_mask [B, T] bool: False for padding. segments [B, T] long: only tokens of one segment see each other
    (packed documents); None means one segment a row.

    Returns [B, T, T] bool. Padding rows see themselves, so no row is empty (an empty row would be NaN).
    """
    length = token_mask.shape[1]
    lower = torch.ones(length, length, dtype=torch.bool, device=token_mask.device).tril()
    visible = lower & token_mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    return visible | torch.eye(length, dtype=torch.bool, device=token_mask.device)


def within_window(visible: Tensor, query_positions: Tensor, column_positions: Tensor, window: int) -> Tensor:
    """Close the columns that lie `window` or more positions before the query (sliding-window attention).

    visible [B, Q, C] bool; query_positions [B, Q] long; column_positions [B, C] long.
    Positions decide, not columns: with window 4, position 9 sees positions 6, 7, 8 and 9.

    Returns [B, Q, C] bool.
    """
    return visible & (query_positions[:, :, None] - column_positions[:, None, :] < window)
