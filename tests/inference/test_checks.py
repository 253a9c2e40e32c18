"""Prompts are checked with messages that help, and unknown families prove themselves before the first tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_drafters import RandomDrafter
from tiny_targets import BY_ALL_HEADS, COMMON, LIMIT, make_model, own_text, prompts_of, tiny_target

from headstart.inference.checks import check_tree_logits
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 4, "at least one row"),
        ([[1], []], 4, "prompt 1 is empty"),
        ([[1, 64]], 4, "prompt 0 holds a token id outside 0 to 63"),
        ([[-1]], 4, "prompt 0 holds a token id outside 0 to 63"),
        ([[1]], 0, "at least 1, but is 0 for prompt 0"),
        ([[1], [2]], [4], "1 for 2 prompts"),
        ([[1] * 60], 5, "60 tokens and may grow by 5, but .* 64; .* at most 4"),
    ],
)
def test_prompts_that_cannot_run_are_refused(prompts: list[list[int]], new: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeEngine(tiny_target("gpt2")).prefill(prompts, DecodingRules(new))


def test_dynamic_rotary_embeddings_are_held_to_the_length_they_were_built_for() -> None:
    rope = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    target = Target(make_model("llama", COMMON | rope))
    prompts = prompts_of(LIMIT - 6, 5)
    texts = own_text(target, prompts, 6)
    state = SpeculativeEngine(target, RandomDrafter(texts)).generate(prompts, DecodingRules(6))
    assert state.outputs == [text[-6:] for text in texts]
    with pytest.raises(ValueError, match="may grow by 7"):
        SpeculativeEngine(target).generate(prompts, DecodingRules(7))


def test_proven_families_are_not_checked_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Target) -> None:
        raise AssertionError("the matrix proves this family")

    monkeypatch.setattr("headstart.inference.target.check_tree_logits", fail)
    Target(tiny_target(family).model).self_check()


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
UNPROVEN = {
    "olmo2": COMMON,
    "starcoder2": COMMON,
    "stablelm": COMMON,
    "gptj": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
    "falcon": BY_ALL_HEADS,
}


@pytest.mark.parametrize("model_type", UNPROVEN)
def test_unproven_family_that_passes_its_check_generates_the_plain_text(model_type: str) -> None:
    target = Target(make_model(model_type, UNPROVEN[model_type]))
    prompts = prompts_of(7, 3)
    texts = own_text(target, prompts, 16)
    state = SpeculativeEngine(target, RandomDrafter(texts)).generate(prompts, DecodingRules(10))
    assert state.outputs == [text[len(prompt) :][:10] for text, prompt in zip(texts, prompts, strict=True)]


def test_check_runs_once_when_an_engine_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Target] = []
    monkeypatch.setattr("headstart.inference.target.check_tree_logits", checked.append)
    target = Target(make_model("olmo2", COMMON))
    assert not checked
    SpeculativeEngine(target)
    SpeculativeEngine(target)
    assert checked == [target]


def test_family_whose_logits_are_not_the_heads_alone_is_refused() -> None:
    settings = {key: COMMON[key] for key in SIZES} | {"pad_token_id": 0}
    with pytest.raises(ValueError, match=r"ModernBertDecoderForCausalLM .* differ from those of its own forward pass"):
        SpeculativeEngine(Target(make_model("modernbert-decoder", settings)))


def test_family_that_fails_on_a_tree_is_refused_with_the_reason() -> None:
    settings = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    with pytest.raises(ValueError, match=r"OpenAIGPTLMHeadModel \(openai-gpt\) cannot verify draft trees"):
        SpeculativeEngine(Target(make_model("openai-gpt", settings)))


def test_model_in_training_mode_is_found_by_its_dropout() -> None:
    model = make_model("olmo2", COMMON | {"attention_dropout": 0.5}).train()
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        SpeculativeEngine(Target(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_check_of_tree_logits_allows_for_the_rounding_of_the_dtype(dtype: torch.dtype) -> None:
    check_tree_logits(Target(make_model("llama", COMMON).to(dtype)))  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["mask", "positions", "cache"])
def test_check_of_tree_logits_sees_what_it_is_there_for(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    target = Target(make_model("llama", COMMON))
    forward = target.forward

    def wrong(tokens, positions, block, cache, layers):
        if broken == "mask":
            block = block | torch.ones_like(block[0]).tril()
        elif broken == "positions":
            positions = positions[:, :1] + torch.arange(positions.shape[1])
        else:
            cache.valid = torch.ones_like(cache.valid)
        return forward(tokens, positions, block, cache, layers)

    monkeypatch.setattr(target, "forward", wrong)
    with pytest.raises(ValueError, match="cannot verify draft trees"):
        check_tree_logits(target)


def test_plain_loop_stops_after_the_end_token_and_keeps_it() -> None:
    target, prompts = tiny_target("llama"), prompts_of(5)
    text = plain_generate(target, prompts, DecodingRules(8))[0]
    place = next(i for i, token in enumerate(text) if i and token not in text[:i])
    assert plain_generate(target, prompts, DecodingRules(8, [text[place]])) == [text[: place + 1]]
