"""The borrowed decoder layer: the target's frequencies, and the same numbers at once, in pieces and in trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_targets import FAMILIES, WIDTH, make_model, tiny_target

from headstart.core import masks
from headstart.core.decoder_layer import DecoderLayer, layer_settings, rope_of
from headstart.core.kv_cache import RaggedCache
from headstart.core.tree import from_parents


def layer_of(**more: object) -> DecoderLayer:
    torch.manual_seed(0)
    return DecoderLayer(WIDTH, layer_settings(tiny_target("llama").config), **more).double().eval()  # type: ignore[arg-type]


def test_every_family_gives_a_layer(family: str) -> None:
    settings = layer_settings(tiny_target(family).config)
    layer = DecoderLayer(WIDTH, settings).double()
    x, positions = torch.randn(1, 4, WIDTH, dtype=torch.float64), torch.arange(4)[None]
    assert layer(x, positions, masks.causal(torch.ones(1, 4, dtype=torch.bool))).shape == (1, 4, WIDTH)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral-window", "phi3", "gemma2-window"])
def test_frequencies_are_the_targets(family: str) -> None:
    name, settings = FAMILIES[family]
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 54321.0}}
    model: Any = make_model(name, settings | theta)
    mine = DecoderLayer(WIDTH, layer_settings(model.config)).rotary(torch.device("cpu")).inv_freq
    assert torch.equal(mine, model.base_model.rotary_emb.inv_freq)


def test_old_spelling_and_scaled_kinds_are_understood() -> None:
    scaled = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    kinds = {"full_attention": plain, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    growing = {"rope_type": "dynamic", "rope_theta": 7e4, "factor": 2.0}
    assert rope_of(SimpleNamespace(rope_theta=5e5)) == {"rope_type": "default", "rope_theta": 5e5}
    assert rope_of(SimpleNamespace(rope_parameters=scaled)) == scaled
    assert rope_of(SimpleNamespace(rope_parameters=growing)) == {"rope_type": "default", "rope_theta": 7e4}
    assert rope_of(SimpleNamespace(rope_parameters=kinds)) == plain


def test_pieces_and_trees_behind_a_cache_give_the_numbers_of_one_pass() -> None:
    layer, x = layer_of(), torch.randn(1, 7, WIDTH, dtype=torch.float64)
    positions = torch.arange(7)[None]
    whole = layer(x, positions, masks.causal(torch.ones(1, 7, dtype=torch.bool)))
    cache = RaggedCache(1, torch.device("cpu"))
    first = layer(x[:, :4], positions[:, :4], masks.causal(torch.ones(1, 4, dtype=torch.bool)), cache.kv)
    cache.commit_first(4, torch.tensor([4]))
    tree = from_parents(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[-1, 0, 1, 0]]))
    block = torch.cat([x[:, 4:], torch.randn(1, 1, WIDTH, dtype=torch.float64)], dim=1)
    visible = masks.block_mask(cache.valid, tree.ancestors)
    second = layer(block, 4 + tree.depth, visible, cache.kv)
    assert torch.allclose(torch.cat([first, second[:, :3]], 1), whole, atol=1e-12)


def test_attention_may_read_something_else_than_the_residual_stream() -> None:
    layer = layer_of(attention_input=2 * WIDTH, input_norm=False)
    x, wide = torch.randn(1, 3, WIDTH, dtype=torch.float64), torch.randn(1, 3, 2 * WIDTH, dtype=torch.float64)
    visible = masks.causal(torch.ones(1, 3, dtype=torch.bool))
    out = layer(x, torch.arange(3)[None], visible, attended=wide)
    other = layer(x, torch.arange(3)[None], visible, attended=wide * 2)
    assert out.shape == x.shape and not torch.allclose(out, other)
    assert not any("layernorm" in name and "post" not in name for name, _ in layer.named_parameters())


def test_rotary_frequencies_are_in_no_checkpoint() -> None:
    layer = layer_of()
    layer.rotary(torch.device("cpu"))
    assert not any("inv_freq" in name for name in layer.state_dict())
