"""Rendering to token ids, on templates in the styles of the common families and on the reference target's."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_templates import STYLES, byte_level, chat, sentence_piece, trained_runs
from transformers import AutoTokenizer

from headstart.core.prompts import (
    prompt_part,
    render_conversation,
    render_prompt,
    template_fingerprint,
    tokenizer_fingerprint,
)

REFERENCE_TARGET = Path(__file__).parents[2] / ".cache" / "smollm2-135m-instruct"


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("style", STYLES)
def test_ids_equal_those_of_apply_chat_template(tokenizers, style, make):
    tokenizer, messages = tokenizers(style, make), chat("Hello", "I am fine.", "the answer?", "42")
    assert render_conversation(tokenizer, messages).input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    expected = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True)["input_ids"]
    ids = render_prompt(tokenizer, messages[:3])
    assert ids == expected
    assert ids[:2].count(tokenizer.bos_token_id) <= 1


def test_system_message_refused_by_the_template_opens_the_first_user_turn(tokenizers):
    tokenizer = tokenizers("gemma")
    messages = [{"role": "system", "content": "You are fine."}, *chat("Hello", "42")]
    with pytest.warns(UserWarning, match="refuses a system message"):
        row = render_conversation(tokenizer, messages)
    assert row == render_conversation(tokenizer, chat("You are fine.\n\nHello", "42"))
    with pytest.warns(UserWarning, match="refuses a system message"):
        assert render_prompt(tokenizer, messages[:2]) == render_prompt(tokenizer, chat("You are fine.\n\nHello"))


def test_roles_that_the_template_refuses_are_reported_in_its_words(tokenizers):
    messages = [*chat("Hello"), *chat("the answer?", "42")]
    with pytest.raises(ValueError, match="roles must alternate; found the roles"):
        render_conversation(tokenizers("mistral"), messages)


def test_template_options_reach_the_template():
    tokenizer = byte_level("{{ 'fine' if enable_thinking else 'Hello' }}")
    assert (
        render_prompt(tokenizer, chat("x"), template_options={"enable_thinking": True})
        == tokenizer("fine")["input_ids"]
    )
    assert render_prompt(tokenizer, chat("x")) == tokenizer("Hello")["input_ids"]


def test_without_a_template_text_is_joined_with_the_tokenizers_own_bos():
    tokenizer = sentence_piece()
    prompt = render_prompt(tokenizer, chat("Hello there"))
    assert prompt == tokenizer("Hello there")["input_ids"] and prompt[0] == tokenizer.bos_token_id
    row = render_conversation(tokenizer, chat("Hello there", "fine"))
    assert row.input_ids == [*tokenizer("Hello there\n\nfine")["input_ids"], tokenizer.eos_token_id]
    assert not row.loss_mask[0] and row.loss_mask[-1]
    assert [run.split() for run in trained_runs(tokenizer, row)] == [["fine</s>"]]


def test_prompt_that_ends_with_the_assistant_is_refused_and_can_be_cut(tokenizers):
    messages = chat("Hello", "fine")
    with pytest.raises(ValueError, match="must end with a user or tool message"):
        render_prompt(tokenizers("chatml"), messages)
    assert prompt_part(messages) == messages[:1]
    with pytest.raises(ValueError, match="line 7: a prompt must end with a user"):
        prompt_part([{"role": "system", "content": "x"}], "line 7")


def test_fingerprints_survive_saving_and_tell_changes_apart(tokenizers, tmp_path):
    tokenizer = tokenizers("chatml")
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.pad_token = loaded.eos_token
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)
    assert template_fingerprint(loaded) == template_fingerprint(tokenizer)
    assert tokenizer_fingerprint(sentence_piece()) != tokenizer_fingerprint(tokenizer)
    loaded.chat_template += " "
    assert template_fingerprint(loaded) != template_fingerprint(tokenizer)
    assert template_fingerprint(byte_level()) == "none"
    loaded.add_tokens(["<new>"])
    assert tokenizer_fingerprint(loaded) != tokenizer_fingerprint(tokenizer)


@pytest.mark.skipif(not (REFERENCE_TARGET / "tokenizer.json").exists(), reason="the reference target was not made")
def test_reference_target_renders_as_transformers_does_and_trains_its_answers():
    tokenizer = AutoTokenizer.from_pretrained(REFERENCE_TARGET)
    messages = chat("Hello", " It costs 3 €,\n\n안녕! ", "And now?", "```python\nx = 1\n```")
    row = render_conversation(tokenizer, messages)
    assert row.input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert trained_runs(tokenizer, row) == [f"{m['content']}<|im_end|>" for m in messages[1::2]]
    prompt = render_prompt(tokenizer, messages[:1])
    assert prompt == tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
    assert row.input_ids[: len(prompt)] == prompt and row.loss_mask[: len(prompt) + 1] == [False] * len(prompt) + [True]
