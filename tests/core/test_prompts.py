"""Rendering and masks, on templates written here in the styles of the common families and on the reference target's."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from headstart.core.prompts import (
    normalise_row,
    prompt_part,
    read_jsonl,
    render_conversation,
    render_prompt,
    row_tools,
    template_fingerprint,
    tokenizer_fingerprint,
)

REFERENCE_TARGET = Path(__file__).parents[2] / ".cache" / "smollm2-135m-instruct"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'].strip() }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # earlier turns lose their thinking; the last one always shows a block, empty or not
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{% set thought = m['reasoning_content'] if m['reasoning_content'] is defined else "
    "(parts[0].split('<think>')[-1] if parts | length > 1 else '') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # opens the thinking itself, drops it from every turn
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] is defined %}{% for c in m['tool_calls'] %}<tool_call>\n"
    "{{ c['function'] | tojson }}\n</tool_call>{% endfor %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# style: template, BOS, EOS, what ends an assistant turn
STYLES = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<s>", "<|eot_id|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<s>", "</s>", "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>", "</s>"),
    "phi3": (PHI3, "<s>", "</s>", "<|end|>"),
    "qwen3": (QWEN3, None, "<|im_end|>", "<|im_end|>"),
    "deepseek": (DEEPSEEK, "<s>", "</s>", "</s>"),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>",
    "<|User|>", "<|Assistant|>",
]  # fmt: skip
TEXT = [
    "Hello there, how are you today?\n\nI am fine, thank you.\n",
    "the answer is 42. 42 is the answer",
    "user\nassistant\nmodel",
]


def byte_level(template: str | None = None, bos: str | None = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A byte-level BPE, as Llama-3, Qwen and SmolLM2 have; leaves white space out of its offsets."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return wrap(core, template, bos, eos)


def sentence_piece(template: str | None = None, bos: str | None = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A unigram model over "▁" words, as the first Mistral and Llama models have; it adds BOS by itself."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    alphabet = sorted(set("".join(TEXT)) | set("abcdefghijklmnopqrstuvwxyzT<>/|[]"))
    core.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=["<unk>", *SPECIAL],
            unk_token="<unk>",
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return wrap(core, template, bos, eos)


def wrap(core: Tokenizer, template: str | None, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def trained_runs(tokenizer, row) -> list[str]:
    assert len(row.input_ids) == len(row.loss_mask)
    runs = groupby(zip(row.input_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in run]) for trained, run in runs if trained]


@pytest.fixture(scope="module")
def tokenizers():
    built = {}

    def get(style: str, make=byte_level):
        if (style, make) not in built:
            template, bos, eos, _ = STYLES[style]
            built[style, make] = make(template, bos, eos)
        return built[style, make]

    return get


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("style", STYLES)
def test_mask_covers_the_answers_and_the_tokens_that_end_them_and_nothing_else(tokenizers, style, make):
    tokenizer, end = tokenizers(style, make), STYLES[style][3]
    row = render_conversation(tokenizer, chat("Hello", "I am fine.", "the answer?", "42"))
    first, second = trained_runs(tokenizer, row)
    # A word token may hold the space that the template puts before the answer.
    assert (first.strip(), second.strip()) == (f"I am fine.{end}", f"42{end}")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("style", STYLES)
def test_ids_equal_those_of_apply_chat_template(tokenizers, style, make):
    tokenizer, messages = tokenizers(style, make), chat("Hello", "I am fine.", "the answer?", "42")
    assert render_conversation(tokenizer, messages).input_ids == tokenizer.apply_chat_template(messages)["input_ids"]
    expected = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True)["input_ids"]
    ids = render_prompt(tokenizer, messages[:3])
    assert ids == expected
    assert ids[:2].count(tokenizer.bos_token_id) <= 1


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


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]},
        {"conversations": [{"from": "human", "value": "Hello"}]},
        {"turns": ["Hello", "and then?"]},
        {"prompt": "Hello"},
        {"prompt": [{"role": "user", "content": "Hello"}], "messages": None},
    ],
)
def test_every_accepted_layout_gives_the_same_messages(row):
    assert normalise_row(row) == [{"role": "user", "content": "Hello"}]


def test_sharegpt_roles_become_ours():
    row = {"conversations": [{"from": name, "value": "x"} for name in ("system", "human", "gpt", "observation")]}
    assert [message["role"] for message in normalise_row(row)] == ["system", "user", "assistant", "tool"]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"text": "Hello"}, r"must have `messages`.*found the fields \['text'\]"),
        ({"messages": []}, "at least one turn, found \\[\\]"),
        ({"messages": ["Hello"]}, "message 1: a message must have `role` and `content`, found 'Hello'"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "message 1: `role` must be one of .* found 'bot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "`content` must be a text, found 3"),
        ({"messages": [{"role": "assistant", "content": None}]}, "`content` must be a text, found None"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "a user message must say something"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only parts of type 'text'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "`from` must be one of .* found 'alien'"),
        ({"conversations": [{"role": "user", "content": "x"}]}, "must have `from` and `value`"),
    ],
)
def test_malformed_row_is_named_with_what_was_found(row, complaint):
    with pytest.raises(ValueError, match=f"^prompts.jsonl, line 3.*{complaint}"):
        normalise_row(row, "prompts.jsonl, line 3")


def test_tools_are_read_from_a_list_or_from_json():
    assert row_tools({"tools": '[{"name": "add"}]'}) == row_tools({"tools": [{"name": "add"}]}) == [{"name": "add"}]
    assert row_tools({}) is row_tools({"tools": ""}) is row_tools({"tools": []}) is None
    for wrong in ("[", {"name": "add"}):
        with pytest.raises(ValueError, match="line 3: `tools` must be a list"):
            row_tools({"tools": wrong}, "line 3")


def test_json_lines_name_file_and_line_of_a_broken_row(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "é"}\n\n[1]\n', encoding="utf-8")
    rows = read_jsonl(file)
    assert next(rows) == (f"{file}, line 1", {"prompt": "é"})
    with pytest.raises(ValueError, match=r"rows.jsonl, line 3: every line must be a JSON object, found a list"):
        next(rows)
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1: .* not JSON"):
        next(read_jsonl(file))


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


def test_rows_as_json_survive_the_round_trip_that_tables_make(tokenizers):
    row = {"messages": [{"role": "user", "content": "Hello", "name": None}, {"role": "assistant", "content": "42"}]}
    assert normalise_row(json.loads(json.dumps(row)))[0] == {"role": "user", "content": "Hello"}
