"""Conversations with tool calls and reasoning, rendered as Qwen3, Llama-3.1 and others do: what is trained of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_templates import byte_level, chat, trained_runs
from transformers import PreTrainedTokenizerFast

from headstart.core.prompts import RenderedRow, normalise_row, render_conversation

QWEN3 = (  # earlier turns lose their thinking; the last one always shows a block; tool results stand in a user's turn
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set thought = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ m.content.lstrip('\n') }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}"
    "{% endif %}}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA31 = (  # one call a turn, and no words beside it; results come from ipython; built-in tools end with <|eom_id|>
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
    "<|eot_id|>{% for m in messages %}{% if m.role == 'assistant' and 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls at once') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    "{% if builtin_tools is defined and call.name in builtin_tools %}<|python_tag|>{{ call.name }}.call("
    "{% for key, value in call.arguments | items %}{{ key }}={{ value | tojson }}{% endfor %})<|eom_id|>"
    '{% else %}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>{% endif %}'
    "{% elif m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ m.content | tojson }}<|eot_id|>"
    "{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (  # no opening of its own; a special token before the calls
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls is defined %}"
    "[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MORE = ["<|python_tag|>", "<|eom_id|>", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add"}}]


def wearing(template: str, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = byte_level(template, bos, eos)
    tokenizer.add_tokens(MORE, special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerFast:
    return wearing(QWEN3, None, "<|im_end|>")


@pytest.fixture(scope="module")
def llama31() -> PreTrainedTokenizerFast:
    return wearing(LLAMA31, "<s>", "<|eot_id|>")


def called(name: str = "add", content: str | None = None, thought: str | None = None, **arguments: Any) -> dict:
    """Return an assistant's turn with one call."""
    call = {"type": "function", "id": "c1", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "reasoning_content": thought, "tool_calls": [call]}


def result(text: str) -> dict:
    return {"role": "tool", "content": text}


def said(content: str, thought: str | None = None) -> dict:
    return {"role": "assistant", "content": content, "reasoning_content": thought}


def rendered(tokenizer: PreTrainedTokenizerFast, *messages: dict, **settings: Any) -> RenderedRow:
    """Render a row as it would stand in a file; what the target reads must be what the template makes of it."""
    row = json.loads(json.dumps({"messages": [*chat("add 6 and 7"), *messages]}))
    found = normalise_row(row)
    out = render_conversation(tokenizer, found, settings.pop("train_on", "all"), TOOLS, settings)
    plain: Any = tokenizer.apply_chat_template(found, tools=TOOLS, **settings)
    assert out.input_ids == plain["input_ids"]
    return out


def qwen_call(name: str = "add", **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def test_reasoning_calls_and_answers_of_one_question_are_trained_and_results_are_not(qwen3) -> None:
    row = rendered(
        qwen3, called(thought="both?", a=6, b=7), result("13"), called("mul", "Now the rest.", "and 2", a=13),
        result("26"), said("It is 26.", "done"),
    )  # fmt: skip
    assert trained_runs(qwen3, row) == [
        f"<think>\nboth?\n</think>\n\n{qwen_call(a=6, b=7)}<|im_end|>",
        f"<think>\nand 2\n</think>\n\nNow the rest.\n{qwen_call(name='mul', a=13)}<|im_end|>",
        "<think>\ndone\n</think>\n\nIt is 26.<|im_end|>",
    ]
    assert row.left_out == 0


def test_reasoning_dropped_from_earlier_turns_does_not_shift_what_is_trained(qwen3) -> None:
    # Without the second question every turn shows its reasoning, so no rendering of a part is a prefix of the whole.
    first = [called(thought="both?", a=6), result("6"), called(thought="then 7", b="x"), result("13"), said("13", "so")]
    row = rendered(qwen3, *first, *chat("and 2?"), called(thought="again", a=2), result("15"), said("15", "easy"))
    assert trained_runs(qwen3, row) == [
        f"{qwen_call(a=6)}<|im_end|>",
        f"{qwen_call(b='x')}<|im_end|>",
        "13<|im_end|>",
        f"<think>\nagain\n</think>\n\n{qwen_call(a=2)}<|im_end|>",
        "<think>\neasy\n</think>\n\n15<|im_end|>",
    ]
    assert row.left_out == 3


@pytest.mark.parametrize(
    "arguments", [{}, {"a": 1}, {"a": {"b": [1, "two"]}}, {"a": []}, {"x": "</tool_call>"}], ids=str
)
def test_call_is_trained_to_its_end_whatever_its_arguments(qwen3, arguments: dict) -> None:
    first = [called(thought="hm", **arguments), result("6"), called(thought="so", **arguments), result("7"), said("8")]
    row = rendered(qwen3, *first, *chat("more?", "no"))
    assert trained_runs(qwen3, row)[:2] == [f"{qwen_call(**arguments)}<|im_end|>"] * 2


def test_several_calls_of_a_turn_are_trained_together(qwen3) -> None:
    both = called(a=1)
    both["tool_calls"].append({"type": "function", "function": {"name": "mul", "arguments": {"b": 2}}})
    runs = trained_runs(qwen3, rendered(qwen3, both, result("1"), result("2"), said("3"), *chat("more?", "no")))
    assert runs[0] == f"{qwen_call(a=1)}\n{qwen_call(name='mul', b=2)}<|im_end|>"


def test_last_turn_alone_is_trained_in_a_conversation_with_tools(qwen3) -> None:
    row = rendered(qwen3, called(thought="x", a=1), result("1"), said("2", "so"), train_on="last")
    assert trained_runs(qwen3, row) == ["<think>\nso\n</think>\n\n2<|im_end|>"]
    row = rendered(qwen3, said("first", "x"), *chat("and?"), called(thought="y", a=1), train_on="last")
    assert trained_runs(qwen3, row) == [f"<think>\ny\n</think>\n\n{qwen_call(a=1)}<|im_end|>"]
    assert row.left_out == 0, "of the turns that are trained"


def test_empty_thinking_block_before_a_call_is_not_trained(qwen3) -> None:
    for options in ({}, {"enable_thinking": False}):
        (run,) = trained_runs(qwen3, rendered(qwen3, called(a=1), **options))
        assert run == f"{qwen_call(a=1)}<|im_end|>"
    runs = trained_runs(qwen3, rendered(qwen3, called(a=1), result("1"), said("2"), enable_thinking=False))
    assert runs == [f"{qwen_call(a=1)}<|im_end|>", "2<|im_end|>"]


def test_arguments_as_json_text_are_what_they_say(qwen3, llama31) -> None:
    text = called()
    text["tool_calls"][0]["function"]["arguments"] = '{"a":1}'
    for tokenizer in (qwen3, llama31):
        assert rendered(tokenizer, text, result("1"), said("2")) == rendered(
            tokenizer, called(a=1), result("1"), said("2")
        )
    text["tool_calls"][0]["function"]["arguments"] = "not JSON"
    assert "not JSON" in trained_runs(qwen3, rendered(qwen3, text))[0]


def test_llama_calls_are_trained_to_their_end_token(llama31) -> None:
    row = rendered(
        llama31, called(a=6), result("6"), said("It is 6."), *chat("more?"), called(b=7), result("13"), said("13")
    )
    assert [run.strip() for run in trained_runs(llama31, row)] == [
        '{"name": "add", "parameters": {"a": 6}}<|eot_id|>',
        "It is 6.<|eot_id|>",
        '{"name": "add", "parameters": {"b": 7}}<|eot_id|>',
        "13<|eot_id|>",
    ]


def test_built_in_tools_of_llama_are_trained_from_the_python_tag_to_their_own_end_token(llama31) -> None:
    row = rendered(llama31, called("search", query="6 + 7"), result("13"), said("13"), builtin_tools=["search"])
    runs = [run.strip() for run in trained_runs(llama31, row)]
    assert runs == ['<|python_tag|>search.call(query="6 + 7")<|eom_id|>', "13<|eot_id|>"]


def test_words_and_reasoning_that_the_template_leaves_out_are_counted(llama31) -> None:
    row = rendered(llama31, called(content="I add.", a=6), result("6"), said("6", "thought"), *chat("more?", "no"))
    assert row.left_out == 2
    assert "I add." not in str(llama31.decode(row.input_ids))


def test_what_a_template_refuses_is_told_in_its_words(llama31) -> None:
    two = called(a=1)
    two["tool_calls"] *= 2
    with pytest.raises(ValueError, match="only single tool-calls at once"):
        rendered(llama31, two)


@pytest.mark.parametrize("nothing", [[], None])
def test_turn_with_an_empty_list_of_calls_is_an_ordinary_one(llama31, nothing: Any) -> None:
    row = rendered(llama31, {**said("13"), "tool_calls": nothing})
    assert [run.strip() for run in trained_runs(llama31, row)] == ["13<|eot_id|>"]


def test_calls_that_begin_with_a_special_token_are_trained_with_it() -> None:
    tokenizer = wearing(MISTRAL, "<s>", "</s>")
    row = rendered(tokenizer, called(a=6), result("6"), said("It is 6."))
    assert [run.strip() for run in trained_runs(tokenizer, row)] == [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 6}}]</s>',
        "It is 6.</s>",
    ]


def test_turns_keep_their_order(qwen3) -> None:
    words = [f"w{i}" for i in range(6)]
    row = rendered(
        qwen3,
        called(a=words[0]),
        result(words[1]),
        said(words[2]),
        *chat(words[3]),
        called(b=words[4]),
        result(words[5]),
    )
    text = str(qwen3.decode(row.input_ids))
    assert sorted(words, key=text.index) == words


def test_sharegpt_calls_become_tool_calls() -> None:
    turns = [
        ("human", "x"),
        ("function_call", '{"name": "add", "arguments": {"a": 1}}'),
        ("observation", "1"),
        ("gpt", "1"),
    ]
    found = normalise_row({"conversations": [{"from": role, "value": value} for role, value in turns]})
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant"]
    assert found[1]["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    with pytest.raises(ValueError, match="message 1: `tool_calls` must be a list of objects"):
        normalise_row({"conversations": [{"from": "function_call", "value": "add(1)"}]})
