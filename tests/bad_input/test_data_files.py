"""Files of rows that are damaged, empty, of another kind or in another encoding: file and line are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headstart.core import rows
from headstart.core.prompts import render_prompt
from headstart.distill.dataset import load_dataset, read_rows

GOOD = json.dumps({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]})
ANSWER = {"id": "a", "prompt_ids": [1, 5], "answer_ids": [6, 2], "finish_reason": "stop"}


def lines(*rows: str | bytes) -> bytes:
    return b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in rows)


def refused(path: Path, complaint: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=complaint) as told:
        load_dataset(path, tokenizer)
    assert str(path) in str(told.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (lines(GOOD, '{"prompt": "é"}'.encode("latin-1")), r"line 2: text must be UTF-8.*convert the file"),
        (lines(GOOD).decode().encode("utf-16"), r"line 1: text must be UTF-8"),
        (lines(GOOD, "[1]"), r"line 2: .* found a list; write one row a line"),
        (json.dumps([{"prompt": "one"}], indent=1).encode(), r"line 1: every line must be a JSON object"),
        (lines(GOOD, "", "{"), r"line 3: every line must be a JSON object, but this is not JSON"),
        (lines("[" * 100_000), r"line 1: every line must be a JSON object"),
        (lines('{"a": ' + "9" * 5000 + "}"), r"line 1: every line must be a JSON object"),
        (lines('{"prompt": "\\ud800"}'), r"line 1: text must be whole characters, but holds '\\ud800' alone"),
        (lines('{"conversations": [{"from": [], "value": "x"}]}'), r"line 1: `from` must be one of"),
        (lines('{"messages": [{"role": "assistant", "tool_calls": [1]}]}'), r"line 1, .*`tool_calls` must be a list"),
        (lines('{"messages": [{"role": "assistant", "tool_calls": [{"function": 1}]}]}'), r"`tool_calls` must be a"),
        (lines('{"messages": [{"role": "assistant", "content": "", "reasoning_content": 1}]}'), r"`reasoning_content`"),
        (lines('{"prompt_ids": [true], "answer_ids": [1]}'), r"line 1: `prompt_ids` must be a list of token ids"),
        (lines('{"prompt_ids": [1], "answer_ids": [NaN]}'), r"line 1: `answer_ids` must be a list of token ids"),
        (
            lines('{"headstart": "answers", "version": 2}'),
            r"line 1: answers must be of version 1, but are of version 2",
        ),
        (b"", r"found no row at all"),
        (b"\n \n", r"found no row at all"),
        (b"\x00" * 64, r"line 1: every line must be a JSON object"),
    ],
)
def test_damaged_lines_are_refused_with_file_and_line(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, content: bytes, complaint: str
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    refused(tmp_path / "rows.jsonl", complaint, tokenizer)


def test_byte_order_mark_at_the_front_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + lines(GOOD))
    assert len(list(read_rows(tmp_path / "rows.jsonl"))) == 1


def test_escaped_pair_of_surrogates_is_one_whole_character(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines('{"prompt": "\\ud83d\\ude00"}'))
    ((_, row),) = read_rows(tmp_path / "rows.jsonl")
    assert row["prompt"] == "😀"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda data: data[:-12], r"must be whole gzip data, but after line \d"),
        (lambda data: data[:40], r"must be whole gzip data, but after line 0"),
        (lambda data: data[:30] + bytes([data[30] ^ 255]) + data[31:], r"must be whole gzip data"),
        (lambda _: lines(GOOD), r"must be whole gzip data, but after line 0 it is not \(Not a gzipped file"),
    ],
    ids=["end cut", "middle cut", "flipped", "not gzip"],
)
def test_damaged_gzip_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, damage: Any, complaint: str) -> None:
    (tmp_path / "rows.jsonl.gz").write_bytes(damage(gzip.compress(lines(*[GOOD] * 20), mtime=0)))
    refused(tmp_path / "rows.jsonl.gz", complaint, tokenizer)


def test_line_without_end_is_refused_before_it_fills_the_memory(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE", 1000)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"x" * 10_000))
    refused(tmp_path / "rows.jsonl.gz", "line 1: a line must have at most 1,000 bytes", tokenizer)


@pytest.mark.parametrize("kept", [0, 3, 60, -8])
def test_damaged_parquet_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, kept: int) -> None:
    import pyarrow
    import pyarrow.parquet

    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([json.loads(GOOD)] * 5), file)
    file.write_bytes(file.read_bytes()[:kept])
    refused(file, "must be a whole parquet file", tokenizer)


def test_folder_named_like_a_file_is_read_as_a_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    (tmp_path / "rows.jsonl").mkdir()
    refused(tmp_path / "rows.jsonl", "a data folder must hold files", tokenizer)


def test_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(GOOD))

    def denied(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: .*rows\.jsonl"):
        next(read_rows(tmp_path / "rows.jsonl"))


def test_prompts_with_tools_need_a_template(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="tools must be shown by a chat template, but this tokenizer has none"):
        render_prompt(tokenizer, [{"role": "user", "content": "one"}], tools=[{"name": "add"}])


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{% for", "{{ range(10**9) }}"])
def test_whatever_a_template_raises_is_told_with_the_roles(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=r"must accept the conversation, but said: .* found the roles \['user'\]"):
        render_prompt(tokenizer, [{"role": "user", "content": "one"}])
