"""Conversations in, token ids and the mask of trained tokens out, rendered once by the target's own chat template.

`render_prompt` gives what the target reads before it answers. `render_conversation` gives a whole conversation and
marks the assistant's own words with the token that ends each turn, exact on token level for any template.

Where an answer begins and ends in the rendered text is `spans.py`'s business. Answers that the target itself wrote, as
token ids, need none of this.

Without a chat template (base models) the messages are joined by empty lines, the tokenizer adds its own opening tokens,
and an answer begins right after the message before it. This module knows no model, no drafter and no file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from .rows import Message, check_text, normalise_row, prompt_part, read_jsonl, row_tools
from .spans import CLOSES, OPENS, Span, Template, answer_span, left_out

__all__ = [
    "Message", "RenderedRow", "check_text", "normalise_row", "prompt_part", "read_jsonl", "render_conversation",
    "render_prompt", "row_tools", "template_fingerprint", "tokenizer_fingerprint",
]  # fmt: skip

SEPARATOR = "\n\n"  # between messages where there is no chat template


@dataclass(frozen=True, slots=True)
class RenderedRow:
    """A conversation as the target reads it.

    input_ids: length T, token ids, equal to `apply_chat_template(tokenize=True)`.
    loss_mask: length T, True where the token is the assistant's own: learn to predict `input_ids[t]`.
    left_out: trained turns of which the chat template does not show all: the reasoning, or words beside tool calls.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    left_out: int = 0


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Render messages that end with a user or tool turn, and the opening of the assistant's turn, to token ids.

    tools: descriptions for templates that show them. template_options: more template variables, say `enable_thinking`.
    Returns the ids of `apply_chat_template(add_generation_prompt=True, tokenize=True)`: no special token comes twice.
    Raises ValueError when the template refuses the messages.
    """
    if not messages or messages[-1]["role"] == "assistant":
        found = "an assistant's; cut it off with prompt_part" if messages else "none"
        raise ValueError(f"a prompt must end with a user or tool message, found {found}")
    if tokenizer.chat_template is None:
        _refuse_tools(tools)
        return _encode_bare(tokenizer, SEPARATOR.join(message["content"] for message in messages))[0]
    text = Template(tokenizer, tools, template_options or {}).render(messages, generation_prompt=True)
    return _ids(tokenizer, text)


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    train_on: Literal["all", "last"] = "all",
    tools: list[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> RenderedRow:
    """Render a conversation with its answers to token ids and the mask of trained tokens.

    train_on: "all" assistant turns, or only the "last" (for templates that drop thinking from earlier ones). A token
        with characters of both template and answer is trained, since the target writes it too.
    Returns a `RenderedRow`; its mask is all False when there is no assistant turn.
    Raises ValueError when the template refuses the messages or does not show an answer word for word.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "last":
        answers = answers[-1:]
    if tokenizer.chat_template is None:
        _refuse_tools(tools)
        return _render_without_template(tokenizer, messages, answers)
    template = Template(tokenizer, tools, template_options or {})
    text = template.render(messages)
    if OPENS in text or CLOSES in text:
        raise ValueError(f"text must be free of the characters {OPENS!a} and {CLOSES!a}, found one; remove it")
    opening = template.turn_opening()
    spans = [answer_span(template, messages, i, text, opening) for i in answers]
    ids, offsets = _encode(tokenizer, text)
    mask = _mask(tokenizer, ids, offsets, spans, set(_ids(tokenizer, opening)))
    hidden = sum(left_out(messages[i], text[slice(*span)]) for i, span in zip(answers, spans, strict=True))
    return RenderedRow(ids, mask, hidden)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return `sha256:` and 16 digits that change with the vocabulary, the merges or the special tokens, not padding."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}  # pyright: ignore
    merges = backend["model"].get("merges") or []
    return _fingerprint(
        {
            "vocabulary": sorted(tokenizer.get_vocab().items()),
            "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
            "added": sorted((i, token.content) for i, token in tokenizer.added_tokens_decoder.items()),
            "special": [tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token],
        }
    )


def template_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return `sha256:` and 16 digits of the chat template's text, or `none` where the tokenizer has no template."""
    return "none" if tokenizer.chat_template is None else _fingerprint(tokenizer.get_chat_template())


def _fingerprint(value: Any) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])  # pyright: ignore


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[Span]]:
    """Tokenise rendered text; return ids and the characters of each token.

    Byte-level tokenizers leave leading white space out of their offsets: it is given back, so tokens tile the text.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"masks need character offsets, which only fast tokenizers give, found {type(tokenizer).__name__}; "
            "convert it, or train on the target's own answers (`headstart distill`)"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets: list[Span] = []
    reached = 0
    for start, end in encoded["offset_mapping"]:  # pyright: ignore
        offsets.append((min(start, reached), end))
        reached = max(reached, end)
    return list(encoded["input_ids"]), offsets  # pyright: ignore


def _mask(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], offsets: list[Span], spans: list[Span], openers: set[int]
) -> list[bool]:
    """Mark the tokens of each answer and the special token that ends its turn, white space between them included.

    openers: tokens that open an assistant turn; they never end one. Where several special tokens follow and EOS is
        among them, all up to EOS end the turn.
    """
    endings = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - openers
    if tokenizer.bos_token_id != tokenizer.eos_token_id:
        endings.discard(tokenizer.bos_token_id)  # pyright: ignore
    mask = [False] * len(ids)
    for start, end in spans:
        inside = [t for t, (a, b) in enumerate(offsets) if a < end and b > start]
        first = inside[0] if inside else next((t for t, (a, _) in enumerate(offsets) if a >= end), len(ids))
        last = inside[-1] + 1 if inside else first
        ending = last
        while ending < len(ids) and ids[ending] not in endings and not str(tokenizer.decode([ids[ending]])).strip():
            ending += 1
        ended = bool(inside) and ids[last - 1] in endings
        if not ended and ending < len(ids) and ids[ending] in endings:
            run = ids[ending : next((t for t in range(ending, len(ids)) if ids[t] not in endings), len(ids))]
            last = ending + 1 + (run.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in run else 0)
        mask[first:last] = [True] * (last - first)
    return mask


def _refuse_tools(tools: list[Any] | None) -> None:
    if tools:
        raise ValueError("tools must be shown by a chat template, but this tokenizer has none; leave `tools` out")


def _encode_bare(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], int]:
    """Tokenise text with the tokenizer's own opening tokens, not its closing ones; return the openings' count too."""
    bare, full = _ids(tokenizer, text), _ids(tokenizer, text, add_special_tokens=True)
    added = next((n for n in range(len(full) - len(bare) + 1) if full[n : n + len(bare)] == bare), 0)
    return full[:added] + bare, added


def _render_without_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answers: list[int]
) -> RenderedRow:
    """Join messages by empty lines; an answer is its separator and text, with EOS where it ends the conversation."""
    text, spans = "", []
    for i, message in enumerate(messages):
        start = len(text)
        text += (SEPARATOR if i else "") + message["content"]
        if i in answers:
            spans.append((start, len(text)))
    ids, added = _encode_bare(tokenizer, text)
    mask = [False] * added + _mask(tokenizer, *_encode(tokenizer, text), spans, set())
    if answers and answers[-1] == len(messages) - 1 and isinstance(tokenizer.eos_token_id, int):
        return RenderedRow([*ids, tokenizer.eos_token_id], [*mask, True])
    return RenderedRow(ids, mask)
