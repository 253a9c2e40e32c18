"""Which tokens of a rendered conversation are trained: the assistant's own words and the token that ends them."""

from __future__ import annotations

import pytest
from chat_templates import STYLES, TOOLS, byte_level, chat, sentence_piece, trained_runs
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.prompts import normalise_row, render_conversation


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("style", STYLES)
def test_mask_covers_the_answers_and_the_tokens_that_end_them_and_nothing_else(tokenizers, style, make):
    tokenizer, end = tokenizers(style, make), STYLES[style][3]
    row = render_conversation(tokenizer, chat("Hello", "I am fine.", "the answer?", "42"))
    first, second = trained_runs(tokenizer, row)
    # A word token may hold the space that the template puts before the answer.
    assert (first.strip(), second.strip()) == (f"I am fine.{end}", f"42{end}")


@pytest.mark.parametrize("style", ["llama3", "gemma", "mistral"])
def test_white_space_that_the_template_strips_is_not_looked_for(tokenizers, style):
    tokenizer, end = tokenizers(style), STYLES[style][3]
    row = render_conversation(tokenizer, chat("Hello", "\n  I am fine. \n\n", "the answer?", "42"))
    assert [run.strip() for run in trained_runs(tokenizer, row)] == [f"I am fine.{end}", f"42{end}"]


def test_white_space_that_the_template_keeps_is_trained(tokenizers):
    tokenizer = tokenizers("chatml")
    assert trained_runs(tokenizer, render_conversation(tokenizer, chat("Hello", "fine\n\n"))) == ["fine\n\n<|im_end|>"]


def test_thinking_dropped_from_earlier_turns_is_not_trained_but_the_answer_after_it_is(tokenizers):
    tokenizer = tokenizers("qwen3")
    messages = chat(
        "Hello", "<think>\nuser is fine\n</think>\n\nI am fine.", "the answer?", "<think>\n6 x 7\n</think>\n\n42"
    )
    runs = trained_runs(tokenizer, render_conversation(tokenizer, messages))
    assert runs == ["I am fine.<|im_end|>", "<think>\n6 x 7\n</think>\n\n42<|im_end|>"]


def test_thinking_in_a_field_of_its_own_is_trained_with_the_answer(tokenizers):
    tokenizer = tokenizers("qwen3")
    messages = [*chat("the answer?"), {"role": "assistant", "reasoning_content": "6 x 7", "content": "42"}]
    assert trained_runs(tokenizer, render_conversation(tokenizer, messages)) == [
        "<think>\n6 x 7\n</think>\n\n42<|im_end|>"
    ]


def test_empty_thinking_block_of_the_template_is_not_trained(tokenizers):
    tokenizer = tokenizers("qwen3")
    runs = trained_runs(tokenizer, render_conversation(tokenizer, chat("the answer?", "42")))
    assert runs == ["42<|im_end|>"]


def test_thinking_that_the_template_drops_everywhere_leaves_the_answer(tokenizers):
    tokenizer = tokenizers("deepseek")
    row = render_conversation(tokenizer, chat("the answer?", "6 x 7</think>42"))
    assert trained_runs(tokenizer, row) == ["42</s>"]


def test_last_turn_alone_can_be_trained(tokenizers):
    tokenizer = tokenizers("chatml")
    row = render_conversation(tokenizer, chat("Hello", "I am fine.", "the answer?", "42"), train_on="last")
    assert trained_runs(tokenizer, row) == ["42<|im_end|>"]


def test_same_words_in_question_and_answer_are_told_apart(tokenizers):
    tokenizer = tokenizers("chatml")
    row = render_conversation(tokenizer, chat("42", "42", "42", "42"))
    assert trained_runs(tokenizer, row) == ["42<|im_end|>"] * 2
    assert not any(row.loss_mask[:4])


def test_empty_answer_trains_only_the_token_that_ends_the_turn(tokenizers):
    tokenizer = tokenizers("chatml")
    assert trained_runs(tokenizer, render_conversation(tokenizer, chat("Hello", ""))) == ["<|im_end|>"]


def test_conversation_without_an_answer_has_no_trained_token(tokenizers):
    assert not any(render_conversation(tokenizers("chatml"), chat("Hello")).loss_mask)


@settings(deadline=None)
@given(
    answer=st.text(st.characters(exclude_categories=["Cs", "Co", "Cn"], exclude_characters="<[|")),
    question=st.text(min_size=1),
)
def test_any_unicode_answer_is_trained_whole(tokenizers, answer, question):
    tokenizer = tokenizers("chatml")
    row = render_conversation(
        tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    )
    (trained,) = trained_runs(tokenizer, row)
    # The template's line break before the answer may share a token with it, never more.
    assert trained in (f"{answer}<|im_end|>", f"\n{answer}<|im_end|>")


def test_tool_calls_are_trained_and_tool_results_are_not():
    tokenizer = byte_level(TOOLS, "<|im_start|>", "<|im_end|>")
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = normalise_row(
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "fine"},
                {"role": "assistant", "content": "42", "tool_calls": None},
            ]
        }
    )
    row = render_conversation(tokenizer, messages, tools=[{"name": "add"}])
    called, answered = trained_runs(tokenizer, row)
    assert called.startswith("<tool_call>\n") and called.endswith("\n</tool_call><|im_end|>")
    assert answered == "42<|im_end|>"
    assert str(tokenizer.decode(row.input_ids)).startswith('<|im_start|>system\n[{"name": "add"}]')


def test_tool_call_whose_turn_closes_differently_at_the_end_runs_to_the_special_token():
    tokenizer = byte_level(
        TOOLS.replace("</tool_call>{% endfor %}", "</tool_call>{% endfor %}{{ loop.last }}"), None, "<|im_end|>"
    )
    messages = [*chat("Hello"), {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}]
    messages.append({"role": "tool", "content": "fine"})
    (called,) = trained_runs(tokenizer, render_conversation(tokenizer, messages))
    assert called == '<tool_call>\n{"name": "add"}\n</tool_call>False<|im_end|>'


def test_tool_calls_that_the_template_drops_are_refused(tokenizers):
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    with pytest.raises(ValueError, match="tool calls of message 2 must be shown by the chat template"):
        render_conversation(tokenizers("chatml"), [*chat("Hello"), message, *chat("add")])


def test_what_the_target_writes_before_its_answer_is_trained():
    template = (
        "{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
        "{% if m['role'] == 'assistant' %}<|user|>final{% endif %}<|end|>{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant{% endif %}"
    )
    tokenizer = byte_level(template, "<s>", "<|eot_id|>")
    runs = trained_runs(tokenizer, render_conversation(tokenizer, chat("Hello", "fine", "more", "42")))
    assert runs == ["<|user|>final<|end|>fine<|eot_id|>", "<|user|>final<|end|>42<|eot_id|>"]


def test_special_tokens_up_to_eos_end_a_turn():
    template = "{% for m in messages %}<|start_header_id|>{{ m['content'] }}<|end|><|eot_id|><|user|>{% endfor %}"
    tokenizer = byte_level(template, "<s>", "<|eot_id|>")
    assert trained_runs(tokenizer, render_conversation(tokenizer, chat("Hello", "42"))) == ["42<|end|><|eot_id|>"]


def test_answer_that_the_template_rewrites_is_refused():
    tokenizer = byte_level("{% for m in messages %}{{ m['content'] | title }}{% endfor %}")
    with pytest.raises(ValueError, match="message 2 must stand in the rendered conversation word for word"):
        render_conversation(tokenizer, chat("hello", "fine", "more", "42"))


def test_text_with_the_marks_in_it_is_refused(tokenizers):
    with pytest.raises(ValueError, match="ue8f1"):
        render_conversation(tokenizers("chatml"), chat("Hello \ue8f1", "42"))
