"""Target: a Hugging Face causal language model seen as features and logits.

Stock transformers classes, nothing copied, and nothing set on the model but how it attends while a tree passes through
(`core/attention.py`); family differences are in `core/hf.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..core import hf, masks
from ..core.kv_cache import RaggedCache
from ..drafters.base import FeatureLayer
from .checks import check_tree_logits


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One forward pass: final [B, Q, D] after the final norm; features [B, Q, F, D] in the order asked for."""

    final: Tensor
    features: Tensor


class Target:
    """The frozen language model whose text we keep.

    model: any loaded transformers causal language model; put into eval mode's behaviour by its owner.
    Raises ValueError when the model cannot verify a tree.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        hf.check_supported(model)
        self.model = model
        self._window = hf.window_of(model)
        self._rows = hf.HeadRows()
        self._proven = model.config.model_type in hf.PROVEN_FAMILIES

    @property
    def config(self) -> Any:
        """The language model's transformers configuration."""
        return hf.text_config(self.model)

    @property
    def width(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """V, the rows of the language-model head."""
        return int(self.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.model.dtype

    def self_check(self) -> None:
        """Check, once and for families that the tests do not hold, that a tree gives the model's own logits.

        Raises ValueError when it does not.
        """
        if not self._proven:
            check_tree_logits(self)
            self._proven = True

    def new_cache(self, batch_size: int) -> RaggedCache:
        """Return an empty cache for batch_size rows."""
        return RaggedCache(batch_size, self.device)

    def forward(
        self, tokens: Tensor, positions: Tensor, block: Tensor, cache: RaggedCache, layers: Sequence[FeatureLayer]
    ) -> TargetOutput:
        """Run one block behind the cache; the cache then holds it uncommitted.

        tokens, positions [B, Q] long; block [B, Q, Q] bool: who sees whom inside the block; every node also sees the
        row's committed tokens. layers: features to capture.
        """
        visible = masks.block_mask(cache.valid, block)
        columns = torch.cat([cache.positions, positions], dim=1)
        return self._run(tokens, positions, visible, columns, cache, layers)

    def encode(
        self,
        tokens: Tensor,
        token_mask: Tensor,
        layers: Sequence[FeatureLayer],
        positions: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> TargetOutput:
        """Run whole sequences without a cache, for training.

        tokens [B, T] long, token_mask [B, T] bool (right-padded), positions and segments [B, T] long for packed rows.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        visible = masks.causal(token_mask, segments)
        return self._run(tokens, positions, visible, positions, None, layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return input embeddings [..., D] of tokens [...]."""
        return self.model.get_input_embeddings()(tokens)

    def logits(self, final: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """Return logits [..., V] of states after the final norm [..., D]; only those of token_ids [M] if given."""
        return hf.head_logits(self.model, final, token_ids, self._rows)

    def head_rows(self, token_ids: Tensor | None) -> Tensor:
        """Return the head's weight rows [M, D] fp32 for the given ids [M]; all rows for None.

        Read through the module (a product with the unit vectors), so quantised and sharded heads work too.
        """
        unit = torch.eye(self.width, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            head = hf.output_head(self.model)
            rows = head(unit).float().T  # D x V -> V x D
            if getattr(head, "bias", None) is not None:
                rows = rows - head(torch.zeros_like(unit[:1])).float().T
        return rows.clone() if token_ids is None else rows[token_ids.to(rows.device)].clone()

    def typical_state(self) -> Tensor:
        """Return final states [M, D] fp32 of a few arbitrary tokens, to measure scales from."""
        step = max(1, self.vocab_size // 64)
        tokens = torch.arange(0, self.vocab_size, step, device=self.device)[None, :64]
        with torch.no_grad():
            return self.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final[0].float()

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        visible: Tensor,
        columns: Tensor,
        cache: RaggedCache | None,
        layers: Sequence[FeatureLayer],
    ) -> TargetOutput:
        windowed = None
        if self._window is not None:
            windowed = masks.within_window(visible, positions, columns, self._window)
        mask = hf.layer_masks(self.model, visible, windowed, self.dtype)
        blocks = [layer for layer in layers if isinstance(layer, int)]
        with hf.captured(self.model, blocks) as outputs:
            final = hf.run_base(self.model, tokens, positions, mask, None if cache is None else cache.kv)
        parts = [final if layer == "final" else outputs[layer].to(final.device) for layer in layers]  # type: ignore[index]
        features = torch.stack(parts, dim=2) if parts else final.new_empty(*final.shape[:2], 0, final.shape[2])
        return TargetOutput(final, features)
