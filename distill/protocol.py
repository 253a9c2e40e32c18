"""What servers of the OpenAI completions protocol call things: the ways to ask, and what their answers say.

vLLM, SGLang, llama.cpp and others. Knows neither connections nor retries.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

LONGEST_RETRY_AFTER = 600.0
"""Seconds that a server may ask for at most."""

PLAIN_SAMPLING: dict[str, Any] = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
FULL_SAMPLING: dict[str, Any] = {**PLAIN_SAMPLING, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""The target's own law: servers have other defaults, and vLLM takes some from the model's generation_config.json."""

FULL_TEXT: dict[str, Any] = {
    "return_token_ids": True,  # vLLM, SGLang
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_special_tokens": False,  # to a prompt that is text: the template has put them there
}

FINISHED, CUT = "stop", "length"
NATIVE_REASONS = {"eos": FINISHED, "word": FINISHED, "limit": CUT}


@dataclass(frozen=True, slots=True)
class Way:
    """One way to ask. name: as the header of a shard tells it. native: llama.cpp's own endpoint, which returns ids."""

    name: str
    prompt_as_ids: bool
    full: bool
    native: bool = False


NATIVE = Way("llama.cpp, token ids", prompt_as_ids=True, full=True, native=True)
WAYS = (
    Way("token ids", prompt_as_ids=True, full=True),
    Way("token ids, plain options", prompt_as_ids=True, full=False),
    Way("text", prompt_as_ids=False, full=True),
    Way("text, plain options", prompt_as_ids=False, full=False),
)
"""The best first: a prompt in ids is read as our template and tokenizer made it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's answer. ids: None where it gave text alone. ended_by: the token it stopped at, where it says so."""

    text: str
    ids: list[int] | None
    reason: str
    ended_by: int | None
    prompt_tokens: int | None


def sampling_of(way: Way) -> dict[str, Any]:
    """Return the sampling options with which a way asks."""
    return FULL_SAMPLING if way.full else PLAIN_SAMPLING


def read_reply(found: Any, way: Way) -> Reply:
    """Read an answer. Raises KeyError, IndexError, TypeError or ValueError for anything but a whole one."""
    if way.native:
        text, ids, reason = found["content"], found["tokens"], NATIVE_REASONS[found["stop_type"]]
        ended_by, prompt_tokens = None, found.get("tokens_evaluated")
    else:
        choice = found["choices"][0]
        text, ids, reason = choice["text"], choice.get("token_ids"), choice["finish_reason"]
        ended_by = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's name, SGLang's
        prompt_tokens = (found.get("usage") or {}).get("prompt_tokens")
    if not isinstance(text, str) or reason not in (FINISHED, CUT):
        raise ValueError(f"it ends with {reason!r}")
    if ids is not None and not all(type(token) is int for token in ids):
        raise ValueError("its token ids are no whole numbers")
    return Reply(text, ids, reason, ended_by if type(ended_by) is int else None, prompt_tokens)


def retry_after(value: str | None) -> float:
    """Return the seconds that a `Retry-After` header asks for, as a number or a date; 0 where there is none."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
