"""Rows of prompts and conversations in the layouts people keep them in, brought to one: a list of messages.

Knows neither tokenizers nor templates. Every error begins with the place of the row, such as `prompts.jsonl, line 3`.
"""

from __future__ import annotations

import gzip
import json
import zlib
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
    "function_call": "assistant",  # its value is the JSON text of one call, or a list of them
}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant's message in which chat templates look for its reasoning."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put it before UTF-8 text
LAYOUTS = "`messages` (role, content), `conversations` (from, value), `turns` (a list of user turns) or `prompt`"


LONGEST_LINE = 64 * 2**20
"""Bytes. A longer line is no row: the file is of another kind, or was made to fill the memory."""


def read_jsonl(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(place, row)` for each line of a .jsonl or .jsonl.gz file; `place` names file and line in errors.

    Raises ValueError for a line that is not a JSON object in UTF-8, and for a damaged .gz file.
    """
    path = Path(path)
    number = 0
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        try:
            while line := lines.readline(LONGEST_LINE + 1):
                number += 1
                if row := line.removeprefix(BYTE_ORDER_MARK if number == 1 else b"").strip():
                    place = f"{path}, line {number}"
                    yield place, _parse(row, place)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"{path}: a file named .gz must be whole gzip data, but after line {number} it is not ({error}); "
                "copy or make it again"
            ) from error


def _parse(line: bytes, place: str) -> dict[str, Any]:
    if len(line) > LONGEST_LINE:
        raise ValueError(f"{place}: a line must have at most {LONGEST_LINE:,} bytes; is this one JSON object a line?")
    try:
        row = json.loads(line.decode("utf-8"))
        escaped = json.dumps(row, ensure_ascii=False) if b"\\u" in line else ""
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: text must be UTF-8, but is not ({error}); convert the file") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: every line must be a JSON object, but this is not JSON ({error})") from error
    if not isinstance(row, dict):
        hint = "; write one row a line" if isinstance(row, list) else ""
        raise ValueError(f"{place}: every line must be a JSON object, found a {type(row).__name__}{hint}")
    check_text(escaped, place)
    return row


def check_text(text: str, place: str) -> str:
    """Return the text. Raises ValueError for half of a surrogate pair: such text has no UTF-8, nor any tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{place}: text must be whole characters, but holds {half!a} alone; mend it") from error
    return text


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
        except (ValueError, RecursionError) as error:
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
    if not isinstance(turn["from"], str) or turn["from"] not in SHAREGPT_ROLES:
        raise ValueError(f"{place}: `from` must be one of {sorted(SHAREGPT_ROLES)}, found {turn['from']!r}")
    if turn["from"] == "function_call":
        called = _from_json(turn["value"])
        calls = called if isinstance(called, list) else [called]
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}
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
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise ValueError(f"{place}: `tool_calls` must be a list of objects, found {_short(calls)}")
    for name in THOUGHTS:
        if not isinstance(message.get(name) or "", str):
            raise ValueError(f"{place}: `{name}` must be a text, found {_short(message[name])}")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ValueError(f"{place}: `content` must be a text, found {_short(content)}")
    if message["role"] == "user" and not content.strip():
        raise ValueError(f"{place}: a user message must say something, found an empty text; drop the row")
    # Tables (parquet) fill absent fields with None; a template would take `tool_calls: None` for a field that is there.
    kept = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    return {**kept, "content": content, **({"tool_calls": [_read_call(call) for call in calls]} if calls else {})}


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)


def _read_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments, if they are JSON text as in OpenAI's layout, are read.

    Templates write them as JSON: text would come out quoted twice. Serving engines (vLLM, SGLang) read it too.
    """
    function = call.get("function", call)
    arguments = _from_json(function.get("arguments"))
    if isinstance(arguments, dict):
        function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else dict(function)


def _from_json(value: Any) -> Any:
    """Return what a JSON text says, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _text_of_part(part: Any, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f"{place}: only parts of type 'text' can be rendered, found {_short(part)}")
    return part["text"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
