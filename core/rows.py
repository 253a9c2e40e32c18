"""Rows of prompts and conversations in the layouts people keep them in, brought to one: a list of messages.

Knows neither tokenizers nor templates. Every error begins with the place of the row, such as `prompts.jsonl, line 3`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]  # role, content, and what a template may read besides: tool_calls, reasoning_content, name, …

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
LAYOUTS = "`messages` (role, content), `conversations` (from, value), `turns` (a list of user turns) or `prompt`"


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(place, row)` for each line of a .jsonl or .jsonl.gz file; `place` names file and line in errors.

    Raises ValueError for a line that is not a JSON object.
    """
    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{place}: every line must be a JSON object, but this is not JSON ({error})"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(f"{place}: every line must be a JSON object, found a {type(row).__name__}")
            yield place, row


def normalise_row(row: Mapping[str, Any], place: str = "row") -> list[Message]:
    """Turn a row of any accepted layout into messages with `role` and `content`.

    Accepted: `messages`, ShareGPT `conversations`, `turns` (the first is used), `prompt` (a text or messages).
    Raises ValueError, beginning with `place`, when the row has none of them or a message is malformed.
    """
    if row.get("messages") is not None:
        return _check_messages(row["messages"], place)
    if row.get("conversations") is not None:
        return _check_messages([_from_sharegpt(turn, place) for turn in _as_list(row["conversations"], place)], place)
    if row.get("turns") is not None:
        return _check_messages([{"role": "user", "content": turn} for turn in _as_list(row["turns"], place)[:1]], place)
    if isinstance(row.get("prompt"), str):
        return _check_messages([{"role": "user", "content": row["prompt"]}], place)
    if row.get("prompt") is not None:
        return _check_messages(row["prompt"], place)
    raise ValueError(f"{place}: a row must have {LAYOUTS}, found the fields {sorted(row)}")


def row_tools(row: Mapping[str, Any], place: str = "row") -> list[Any] | None:
    """Return the row's tool descriptions: a list, or the JSON text of one; None where it has none."""
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: `tools` must be a list or the JSON text of one ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"{place}: `tools` must be a list of descriptions, found a {type(tools).__name__}")
    return tools or None


def prompt_part(messages: Sequence[Message], place: str = "row") -> list[Message]:
    """Return the messages up to the last one that the assistant has yet to answer: its closing turns are dropped.

    Raises ValueError when no user or tool message is left.
    """
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] not in ("user", "tool"):
        roles = [message["role"] for message in messages]
        raise ValueError(f"{place}: a prompt must end with a user or tool message, found the roles {roles}")
    return list(messages[:end])


def _as_list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{place}: a conversation must be a list of at least one turn, found {_short(value)}")
    return value


def _from_sharegpt(turn: Any, place: str) -> Message:
    if not isinstance(turn, Mapping) or "from" not in turn or "value" not in turn:
        raise ValueError(f"{place}: a turn of `conversations` must have `from` and `value`, found {_short(turn)}")
    if turn["from"] not in SHAREGPT_ROLES:
        raise ValueError(f"{place}: `from` must be one of {sorted(SHAREGPT_ROLES)}, found {turn['from']!r}")
    return {"role": SHAREGPT_ROLES[turn["from"]], "content": turn["value"]}


def _check_messages(messages: Any, place: str) -> list[Message]:
    return [_check_message(message, f"{place}, message {i + 1}") for i, message in enumerate(_as_list(messages, place))]


def _check_message(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"{place}: a message must have `role` and `content`, found {_short(message)}")
    if message["role"] not in ROLES:
        raise ValueError(f"{place}: `role` must be one of {list(ROLES)}, found {message['role']!r}")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_of_part(part, place) for part in content)
    if content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{place}: `content` must be a text, found {_short(content)}")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{place}: a user message must say something, found an empty text; drop the row")
    # Tables (parquet) fill absent fields with None; a template would take `tool_calls: None` for a field that is there.
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}


def _text_of_part(part: Any, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"{place}: only parts of type 'text' can be rendered, found {_short(part)}")
    return part["text"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
