"""Rows in every accepted layout, and what a malformed one says."""

from __future__ import annotations

import json

import pytest

from headstart.core.rows import normalise_row, read_jsonl, row_tools


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


def test_rows_as_json_survive_the_round_trip_that_tables_make():
    row = {"messages": [{"role": "user", "content": "Hello", "name": None}, {"role": "assistant", "content": "42"}]}
    assert normalise_row(json.loads(json.dumps(row)))[0] == {"role": "user", "content": "Hello"}
