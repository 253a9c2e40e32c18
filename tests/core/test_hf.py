"""What a tree cannot run on is refused by name, and what hf.py reads from a model is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_targets import BY_ALL_HEADS, COMMON, FAMILIES, LIMIT, VOCAB, WINDOW, make_model, tiny_target
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaModel,
    PreTrainedModel,
    T5Config,
)

from headstart.core import hf
from headstart.inference.checks import check_tree_logits
from headstart.inference.target import Target

SMALL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "vocab_size": VOCAB}
MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
JAMBA = COMMON | {"num_experts": 2, "num_experts_per_tok": 1, "mamba_d_state": 4, "use_mamba_kernels": False}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
QWEN_NEXT = (
    COMMON
    | LINEAR
    | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    | {
        "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
)
CHUNKED = (
    COMMON
    | {"layer_types": ["chunked_attention", "full_attention"], "intermediate_size_mlp": 48}
    | {
        "num_local_experts": 2,
        "attention_chunk_size": 8,
    }
)

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", SMALL | {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "mpt": ("mpt", SMALL | {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}, "ALiBi"),
    "falcon with alibi": (
        "falcon",
        SMALL | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "ALiBi",
    ),
    "mamba": ("mamba", SMALL | MAMBA, "state-space"),
    "mamba2": ("mamba2", SMALL | MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 1}, "state-space"),
    "jamba": ("jamba", JAMBA, "state-space"),
    "linear attention": ("qwen3_next", QWEN_NEXT, "linear-attention"),
    "chunked attention": ("llama4_text", CHUNKED, "layers of type chunked_attention"),
    "local attention by storage order": (
        "gpt_neo",
        SMALL | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "storage order",
    ),
    "embeddings of another width": ("opt", BY_ALL_HEADS | {"ffn_dim": 48, "word_embed_proj_dim": 16}, "another width"),
    "positions of its own": (
        "bart",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48},
        "positions itself",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_model_that_cannot_verify_trees_is_refused_by_name(case: str) -> None:
    model_type, settings, why = REFUSED[case]
    model = make_model(model_type, settings)
    with pytest.raises(ValueError, match=why) as caught:
        Target(model)
    assert type(model).__name__ in str(caught.value) and model.config.model_type in str(caught.value)
    assert "use a decoder-only attention model" in str(caught.value)


def test_encoder_decoder_is_refused() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=VOCAB)
    bart = BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=VOCAB)
    for each in (config, bart):
        with pytest.raises(ValueError, match="encoder-decoder"):
            Target(AutoModelForSeq2SeqLM.from_config(each))


def test_model_without_a_head_is_refused_with_the_class_to_load() -> None:
    with pytest.raises(ValueError, match="no language-model head; load it with AutoModelForCausalLM"):
        Target(LlamaModel(tiny_target("llama").config))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_that_takes_no_tree_mask_is_refused_with_the_setting_that_works(implementation: str) -> None:
    model = make_model("llama", COMMON)
    model.config._attn_implementation_internal = implementation
    with pytest.raises(ValueError, match=f"'{implementation}' takes no tree mask; .*attn_implementation='sdpa'"):
        Target(model)


def test_layers_take_the_same_settings_where_every_layer_has_a_window() -> None:
    settings = FAMILIES["gemma3-window"][1] | {"layer_types": ["sliding_attention"] * 2}
    assert hf.window_of(make_model("gemma3_text", settings)) == WINDOW
    assert hf.window_of(make_model("gemma3_text", settings | {"layer_types": ["full_attention"] * 2})) is None
    assert hf.window_of(make_model("qwen2", COMMON | {"sliding_window": 6, "use_sliding_window": False})) is None


def test_eager_attention_gets_an_additive_mask_and_sdpa_a_boolean_one() -> None:
    full = torch.tensor([[[True, False]]])
    eager = hf.layer_masks(make_model("llama", COMMON, "eager"), full, None, torch.float32)
    assert eager.tolist() == [[[[0.0, torch.finfo(torch.float32).min]]]]
    assert hf.layer_masks(tiny_target("llama").model, full, None, torch.float32).tolist() == [[[[True, False]]]]


def test_models_with_both_kinds_of_layers_get_a_mask_for_each() -> None:
    full, windowed = torch.tensor([[[True, True]]]), torch.tensor([[[False, True]]])
    masks = hf.layer_masks(tiny_target("gemma3-window").model, full, windowed, torch.float64)
    assert masks["full_attention"][0, 0].tolist() == [[True, True]]
    assert masks["sliding_attention"][0, 0].tolist() == [[False, True]]
    assert hf.layer_masks(tiny_target("mistral-window").model, full, windowed, torch.float64)[0, 0].tolist() == [
        [False, True]
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations_pass_the_check_of_tree_logits(attention: str) -> None:
    check_tree_logits(Target(make_model("llama", COMMON, attention)))


def test_position_limit_is_the_number_of_positions_the_model_was_built_for(family: str) -> None:
    assert hf.position_limit(tiny_target(family).model) == LIMIT


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def test_rope_switch_is_the_original_length_of_longrope_and_of_nothing_else() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    assert hf.rope_switch(make_model("llama", COMMON | rope("longrope", factor=2.0, **factors))) == 32
    assert hf.rope_switch(make_model("llama", COMMON | rope("dynamic", factor=2.0))) is None
    assert hf.rope_switch(tiny_target("llama").model) is None
    assert hf.rope_switch(tiny_target("gpt2").model) is None
    assert hf.rope_switch(tiny_target("gemma3-window").model) is None


def test_features_of_a_layer_that_is_not_there_are_refused() -> None:
    target = tiny_target("llama")
    tokens = torch.tensor([[1, 2]])
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"from 0 to 1, but are \[{layer}\]"):
            target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), [layer])


def test_model_whose_layers_cannot_be_found_is_refused() -> None:
    model = make_model("llama", COMMON)
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match="no list of 5 decoder layers"):
        hf.decoder_layers(model)


def test_no_hook_is_left_on_the_model() -> None:
    target = tiny_target("llama")
    tokens = torch.tensor([[1, 2]])
    target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), [0, 1])
    with pytest.raises(ValueError), hf.captured(target.model, [0, 9]):
        pass
    assert all(not layer._forward_hooks for layer in hf.decoder_layers(target.model))


def test_head_rows_are_the_heads_weights_without_its_bias(family_target: Target) -> None:
    weight = family_target.model.get_output_embeddings().weight  # type: ignore[union-attr]
    torch.testing.assert_close(family_target.head_rows(None), weight.detach().float())
    ids = torch.tensor([5, 0, 63])
    torch.testing.assert_close(family_target.head_rows(ids), weight.detach().float()[ids])


def test_head_rows_of_a_head_with_a_bias_leave_the_bias_out() -> None:
    model: PreTrainedModel = make_model("phi", BY_ALL_HEADS)
    head: Any = model.get_output_embeddings()
    torch.nn.init.normal_(head.bias)
    torch.testing.assert_close(Target(model).head_rows(None), head.weight.detach().float())


def test_logits_of_some_tokens_are_those_of_the_whole_vocabulary(family_target: Target) -> None:
    final, ids = torch.randn(2, 3, 32, dtype=torch.double), torch.tensor([5, 0, 63])
    with torch.inference_mode():
        whole = family_target.logits(final)
        torch.testing.assert_close(family_target.logits(final, ids), whole[..., ids], rtol=0, atol=1e-12)


def test_logits_of_some_tokens_come_from_any_kind_of_head() -> None:
    model = make_model("phi", BY_ALL_HEADS)
    head: Any = model.get_output_embeddings()
    torch.nn.init.normal_(head.bias)
    final, ids = torch.randn(3, 32, dtype=torch.double), torch.tensor([5, 0])
    with torch.inference_mode():
        whole = hf.head_logits(model, final)
        torch.testing.assert_close(hf.head_logits(model, final, ids), whole[:, ids], rtol=0, atol=1e-12)
        model.set_output_embeddings(torch.nn.Sequential(head))  # stands for a quantised head, which is no plain layer
        assert torch.equal(hf.head_logits(model, final, ids), whole[:, ids])


def test_rows_of_a_frozen_head_are_gathered_once_and_again_when_something_has_changed() -> None:
    head, ids, rows = torch.nn.Linear(8, 16).requires_grad_(False), torch.tensor([5, 0, 15]), hf.HeadRows()

    def gathered(token_ids: torch.Tensor) -> torch.Tensor:
        weight, bias = rows.of(head, token_ids)
        assert torch.equal(weight, head.weight[token_ids]) and torch.equal(bias, head.bias[token_ids])  # type: ignore[arg-type]
        return weight

    first = gathered(ids)
    assert gathered(ids) is first
    ids[1] = 3
    second = gathered(ids)
    assert second is not first
    assert gathered(torch.tensor([1])) is not second
    head.weight.mul_(2)
    gathered(torch.tensor([1]))
    head.weight.data = torch.randn(16, 8)
    gathered(torch.tensor([1]))


def test_rows_that_decoding_has_gathered_serve_training_and_a_trained_head_gets_its_gradient() -> None:
    head, ids, rows = torch.nn.Linear(8, 16).requires_grad_(False), torch.tensor([5, 0, 15]), hf.HeadRows()
    with torch.inference_mode():
        weight, _ = rows.of(head, ids)
    x = torch.randn(2, 8, requires_grad=True)
    torch.nn.functional.linear(x, *rows.of(head, ids)).sum().backward()
    assert rows.of(head, ids)[0] is weight
    torch.testing.assert_close(x.grad, head.weight[ids].sum(0).expand(2, -1))
    head.requires_grad_(True)
    torch.nn.functional.linear(x, *rows.of(head, ids)).sum().backward()
    assert head.weight.grad is not None and head.weight.grad[ids].any()


def test_embeddings_are_the_models_own(family_target: Target) -> None:
    tokens = torch.tensor([[5, 0], [63, 1]])
    assert torch.equal(family_target.embed(tokens), family_target.model.get_input_embeddings()(tokens))


def test_typical_state_is_what_the_head_multiplies_for_tokens_of_the_vocabulary(family_target: Target) -> None:
    state = family_target.typical_state()
    assert state.shape == (VOCAB, 32) and state.dtype == torch.float32
    tokens = torch.arange(VOCAB)[None]
    with torch.inference_mode():
        final = family_target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final
    torch.testing.assert_close(state, final[0].float())
