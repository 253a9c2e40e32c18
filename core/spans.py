"""Where the assistant's words stand in a conversation that a chat template has rendered, to the character.

An answer is wrapped in two private-use characters and rendered again. If that text without them equals the plain
rendering, they stand where the answer begins and ends. (Rendering prefixes, the usual way, fails where a template
rewrites earlier turns.) Tool calls, which every template spells in its own way, are marked inside: the turn is what
stands around the marks. Knows templates, but neither tokens nor masks.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .rows import THOUGHTS, Message

Span = tuple[int, int]  # characters [start, end) of a rendered text

OPENS, CLOSES = "\ue8f1", "\ue8f2"  # the marks: private-use characters; text that contains them is refused
EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>\s*")
THOUGHT_OPENED = re.compile(r"<think>\s*(</think>\s*)?$")  # at the end of a generation prompt
LONGEST_OPENER = 40  # characters that a target writes before its answer: `<think>`, the name of a channel


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer's chat template with the variables of one conversation."""

    tokenizer: PreTrainedTokenizerBase
    tools: list[Any] | None
    options: Mapping[str, Any]

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Render to text. A template without a system role gets the system text before the first user turn's."""
        options = {**self.options, "tools": self.tools, "add_generation_prompt": generation_prompt, "tokenize": False}
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # a template is a program of its own and may fail in any way
            roles = [message["role"] for message in messages]
            if roles[:2] == ["system", "user"]:
                folded = f"{messages[0]['content']}\n\n{messages[1]['content']}"
                text = self.render([{**messages[1], "content": folded}, *messages[2:]], generation_prompt)
                warnings.warn(
                    f"the chat template refuses a system message ({error}): put before the user's text", stacklevel=2
                )
                return text
            raise ValueError(
                f"the chat template must accept the conversation, but said: {error}; found the roles {roles}"
            ) from error

    def turn_opening(self) -> str:
        """Return the text that `add_generation_prompt` adds; some templates (Mistral's) add none."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        without = self.render(question)
        opened = self.render(question, generation_prompt=True)
        return opened[len(without) :] if opened.startswith(without) else ""

    def next_special(self, text: str, begin: int) -> int:
        """Return where the next special token stands, from `begin` on; the end of the text if there is none."""
        specials = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        return min((at for special in specials if (at := text.find(special, begin)) >= 0), default=len(text))


def answer_span(template: Template, messages: Sequence[Message], index: int, text: str, opening: str) -> Span:
    """Find the characters of the assistant's turn `messages[index]` in `text`, the plain rendering.

    opening: what `Template.turn_opening` returns. Raises ValueError when the template does not show the turn.
    """
    if messages[index].get("tool_calls"):
        return _tool_call_span(template, messages, index, text, opening)
    for marked_message in _marked(messages[index]):
        found = _places_of_marks(template, messages, index, marked_message, text)
        if found is not None:
            return _after_opening(template, text, opening, found[0]), found[1]
    raise ValueError(
        f"message {index + 1} must stand in the rendered conversation word for word, but the chat template rewrites "
        "it; train on the target's own answers (`headstart distill`), or on the last turn if only earlier ones change"
    )


def left_out(message: Message, shown: str) -> bool:
    """Say whether the template leaves out a part of an assistant's turn: its reasoning, or words beside tool calls.

    shown: the turn as it is rendered.
    """
    content: str = message["content"]
    thought, closed, words = content.rpartition("</think>")
    parts = [message.get(name) or "" for name in THOUGHTS]
    parts += [thought.partition("<think>")[2] or thought] if closed else []
    parts += [words] if message.get("tool_calls") else []
    return any(part.strip() not in shown for part in parts)


def _places_of_marks(
    template: Template, messages: Sequence[Message], index: int, marked_message: Message, text: str
) -> Span | None:
    """Return the places in `text` that are marked when a message is rendered in the place of its own, or None."""
    try:
        marked = template.render([*messages[:index], marked_message, *messages[index + 1 :]])
    except ValueError:
        return None
    start, end = marked.find(OPENS), marked.find(CLOSES)
    once = marked.count(OPENS) == 1 == marked.count(CLOSES) and start < end
    return (start, end - 1) if once and marked.replace(OPENS, "").replace(CLOSES, "") == text else None


def _after_opening(template: Template, text: str, opening: str, start: int) -> int:
    """Move `start` left to where the turn's opening ends: what stands between, such as `<think>`, the target writes.

    An empty thinking block stays out: templates add it to answers without thinking, and the target may not write it.
    """
    opened = text.rfind(opening, 0, start) if opening else -1
    between = text[opened + len(opening) : start]
    other_turn = len(between) > LONGEST_OPENER or str(template.tokenizer.eos_token) in between
    return start if opened < 0 or other_turn or EMPTY_THOUGHT.fullmatch(between) else start - len(between)


def _tool_call_span(template: Template, messages: Sequence[Message], index: int, text: str, opening: str) -> Span:
    """Find a turn with tool calls by what stands before and after it, and by marks in its calls.

    Where other turns are rendered otherwise when it is the last one (their thinking is dropped, it closes differently),
    it begins after the opening before its calls and ends at the special token after them.
    """
    before = template.render(messages[:index], generation_prompt=True) if index else ""
    after = template.render(messages[: index + 1]).rstrip()
    begin = len(before) if before and text.startswith(before) else None
    calls = _place_of_calls(template, messages, index, text, begin)
    start = None if calls is None else _turn_start(template, text, begin, opening, calls[0])
    if calls is None or start is None:
        raise ValueError(
            f"the tool calls of message {index + 1} must be shown by the chat template right after the turn's opening, "
            "but are not; train on the target's own answers (`headstart distill`)"
        )
    whole = text.startswith(after) and len(after) >= calls[1]
    empty = EMPTY_THOUGHT.match(text, start)
    return empty.end() if empty else start, len(after) if whole else template.next_special(text, calls[1])


def _place_of_calls(
    template: Template, messages: Sequence[Message], index: int, text: str, begin: int | None
) -> Span | None:
    """Return where the first call's name stands and what is certain of the last one's end; None if not shown.

    Marks tell. Where the template changes them, the names are looked for from where the turn begins, if that is known,
    to the next special token.
    """
    for marked_message in _marked_calls(messages[index]):
        found = _places_of_marks(template, messages, index, marked_message, text)
        if found is not None:
            return found
    if begin is None:
        return None
    first, end, limit = None, begin, template.next_special(text, begin)
    for name in (str(_function(call).get("name")) for call in messages[index]["tool_calls"]):
        at = text.find(name, end, limit)
        if at < 0:
            return None
        first, end = at if first is None else first, at + len(name)
    return None if first is None else (first, end)


def _turn_start(template: Template, text: str, begin: int | None, opening: str, calls: int) -> int | None:
    """Return where a turn begins whose calls stand at `calls`; None where neither `begin` nor an opening tells."""
    if begin is not None and begin <= calls:
        return begin
    openings = [one for one in (opening, THOUGHT_OPENED.sub("", opening)) if one.strip()]
    start = max((at + len(one) for one in openings if (at := text.rfind(one, 0, calls)) >= 0), default=None)
    return None if start is None or str(template.tokenizer.eos_token) in text[start:calls] else start


def _marked(message: Message) -> Iterator[Message]:
    """Yield the message with marks around what a template may show of it, the most first."""
    content: str = message["content"]
    for name in THOUGHTS:
        reasoning = message.get(name)
        if isinstance(reasoning, str) and reasoning.strip():
            lead = len(reasoning) - len(reasoning.lstrip())
            opened = {**message, name: reasoning[:lead] + OPENS + reasoning[lead:]}
            yield {**opened, "content": _wrap(content, "", CLOSES, trim_end=True)}
    for trim_start, trim_end in ((False, False), (True, False), (False, True), (True, True)):
        yield {**message, "content": _wrap(content, OPENS, CLOSES, trim_start, trim_end)}
    if thought := re.match(r"\s*<think>\s*", content):
        yield {**message, "content": thought[0] + _wrap(content[thought.end() :], OPENS, CLOSES, trim_end=True)}
    head, closing, rest = content.rpartition("</think>")
    if closing:
        yield {**message, "content": head + closing + _wrap(rest, OPENS, CLOSES, trim_start=True, trim_end=True)}


def _marked_calls(message: Message) -> Iterator[Message]:
    """Yield the message with one mark early in the first call and one late in the last, the furthest apart first.

    The early one stands before the name or, for templates that ask which tool it is, before the first argument.
    """
    calls: list[Any] = message["tool_calls"]
    last = _function(calls[-1])
    ends = [{"arguments": arguments} for arguments in _closed(last.get("arguments"))]
    for end in [*ends, {"name": f"{last.get('name')}{CLOSES}"}]:
        first, *rest = [*calls[:-1], _with(calls[-1], end)]
        name, arguments = _function(first).get("name"), _function(first).get("arguments")
        openings: list[dict[str, Any]] = [{"name": f"{OPENS}{name}"}]
        if isinstance(arguments, Mapping) and arguments:
            (key, value), *others = arguments.items()
            openings.append({"arguments": {f"{OPENS}{key}": value, **dict(others)}})
        yield from ({**message, "tool_calls": [_with(first, opening), *rest]} for opening in openings)


def _closed(value: Any) -> Iterator[Any]:
    """Yield a value with a mark at its end; of a mapping that ends with a number, after its last key."""
    if isinstance(value, str) and value:
        yield value + CLOSES
    elif isinstance(value, list) and value:
        yield from ([*value[:-1], last] for last in _closed(value[-1]))
    elif isinstance(value, Mapping) and value:
        *rest, (key, last) = value.items()
        yield from ({**dict(rest), key: closed} for closed in _closed(last))
        yield {**dict(rest), f"{key}{CLOSES}": last}


def _function(call: Any) -> Mapping[str, Any]:
    """Return name and arguments of a call, which some leave unwrapped."""
    return call.get("function", call)


def _with(call: Any, changes: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], **changes}} if "function" in call else {**call, **changes}


def _wrap(text: str, opens: str, closes: str, trim_start: bool = False, trim_end: bool = False) -> str:
    """Put marks around the text, leaving outside the white space that a template may strip."""
    start = len(text) - len(text.lstrip()) if trim_start else 0
    end = max(start, len(text.rstrip())) if trim_end else len(text)
    return text[:start] + opens + text[start:end] + closes + text[end:]
