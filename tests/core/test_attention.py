"""Attention in groups gives what transformers' own gives, and leaves the model as it was."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from tiny_targets import COMMON, make_model, tiny_target
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from headstart.core import attention
from headstart.core.attention import GROUPED, MOST_QUERIES, STOCK, grouped, grouped_attention
from headstart.inference.target import Target


class Module(torch.nn.Module):
    """What transformers asks of a layer that attends."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def a_block(heads: int, groups: int, queries: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return query, key, value and a mask for 2 rows, laid out as layers do: queries transposed, keys in a buffer."""
    query = torch.randn(2, queries, heads, 8, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(2, groups, 40, 8, dtype=dtype)[:, :, :30] for _ in range(2))
    mask = torch.rand(2, 1, queries, 30) < 0.6
    mask[..., 0] = True
    return query, key, value, mask


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "queries"), [(4, 2, 5), (9, 3, 10), (4, 1, MOST_QUERIES), (8, 4, 2)])
def test_groups_attend_as_transformers_does(heads, groups, queries, dtype):
    module, (query, key, value, mask) = Module(heads // groups), a_block(heads, groups, queries, dtype)
    mine, none = grouped_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert none is None and mine.shape == (2, queries, heads, 8) and mine.is_contiguous()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


def test_additive_masks_count_as_well():
    query, key, value, mask = a_block(4, 2, 3)
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    module = Module(2)
    mine, theirs = (grouped_attention(module, query, key, value, one)[0] for one in (added, mask))
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("heads", "groups", "queries", "change"),
    [
        (4, 4, 5, {}),
        (4, 2, 1, {}),
        (4, 2, MOST_QUERIES + 1, {}),
        (4, 2, 5, {"attention_mask": None}),
        (4, 2, 5, {"dropout": 0.1}),
        (4, 2, 5, {"position_bias": torch.zeros(2, 4, 5, 30, dtype=torch.float64)}),
    ],
)
def test_what_is_no_pass_of_a_tree_goes_to_transformers(monkeypatch, heads, groups, queries, change):
    seen = []

    def spied(*args, **kwargs):
        seen.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    monkeypatch.setattr(attention, "sdpa_attention_forward", spied)
    query, key, value, mask = a_block(heads, groups, queries)
    grouped_attention(Module(heads // groups), query, key, value, **({"attention_mask": mask} | change))
    assert len(seen) == 1


def test_layers_use_it_inside_and_the_model_is_as_it_was_after_an_error():
    config = make_model("llama", COMMON).config
    with pytest.raises(RuntimeError, match="on purpose"), grouped(config, 5):
        assert config._attn_implementation == GROUPED
        raise RuntimeError("on purpose")
    assert config._attn_implementation == STOCK


@pytest.mark.parametrize(("settings", "implementation", "queries"), [
    (COMMON, "eager", 5), (COMMON | {"num_key_value_heads": 4}, "sdpa", 5), (COMMON, "sdpa", 1),
    (COMMON, "sdpa", MOST_QUERIES + 1),
])  # fmt: skip
def test_models_that_gain_nothing_keep_their_own(settings, implementation, queries):
    config = make_model("llama", settings, implementation).config
    with grouped(config, queries):
        assert config._attn_implementation == implementation


def test_models_that_name_no_heads_are_left_alone():
    config = SimpleNamespace(_attn_implementation=STOCK)
    with grouped(config, 5):
        assert config._attn_implementation == STOCK


def test_two_passes_at_once_leave_the_models_own():
    config = make_model("llama", COMMON).config
    first, second = ExitStack(), ExitStack()
    for stack in (first, second):
        stack.enter_context(grouped(config, 5))
    first.close()
    second.close()
    assert config._attn_implementation == STOCK


def test_a_pass_over_a_tree_attends_in_groups(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[1].shape)
        return grouped_attention(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, GROUPED, counted)
    target = Target(make_model("llama", COMMON))
    tokens = torch.arange(1, 6)[None]
    target.forward(tokens, tokens - 1, torch.ones(1, 5, 5, dtype=torch.bool).tril(), target.new_cache(1), ())
    target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ())  # in training layers may be run again
    assert calls == [(1, 4, 5, 8)] * 2 and tiny_target("llama").config._attn_implementation == STOCK
