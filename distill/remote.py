"""Answers from a server: many requests in flight, answers in the order of the prompts.

The rows are those that an engine here would make (`respond.py`): our template and tokenizer, the same rule for loops,
the end-of-sequence token where the target ended. Knows `Server`, not how it is asked.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from .protocol import FINISHED, Reply
from .respond import TOO_LONG, Prompt, ResponseSettings, Step, write_answers
from .select import LOOP
from .server import RefusedError, Server
from .slots import Answer, loop_between

LOOK_SECONDS = 0.5
"""Seconds between looks for a stop signal while no answer comes."""

SEEDS = 2**31 - 1
"""Seeds are sent below this: some servers hold them in 32 bits."""

FAILED, REFUSED, OTHER_PROMPT, NO_ROUND_TRIP = "failed", "refused", "prompt_read_otherwise", "text_does_not_round_trip"
ABOUT_LENGTH = re.compile(r"context|too long|too large|length|max_model_len|exceed", re.IGNORECASE)


class _DroppedError(Exception):
    """A prompt that gets no answer. why: as it is counted; told: the server's words, empty where there are none."""

    def __init__(self, why: str, told: str = "") -> None:
        super().__init__(why)
        self.why, self.told = why, told


def respond_remotely(
    server: Server,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    settings: ResponseSettings,
    eos_token_ids: Sequence[int],
    in_flight: int = 64,
    max_prompt_tokens: int = 1536,
    progress: bool = True,
) -> dict[str, int]:
    """Have a server answer every prompt, at most `in_flight` at a time; see `write_answers`.

    A shard is filled in the order of the prompts, so an answer may wait for one before it. Warns of prompts that the
    server refused. Raises ConnectionError, saying how to go on, when the server is gone; what is finished is written.
    """
    refusals: list[str] = []

    def steps(prompts: list[Prompt], stopped: Callable[[], bool]) -> Iterator[Step]:
        asked = [replace(prompt, seed=prompt.seed % SEEDS) for prompt in prompts]
        return _answers(server, asked, settings, eos_token_ids, in_flight, stopped, refusals)

    longest = max_prompt_tokens
    if server.window is not None:
        longest = min(longest, server.window - settings.max_new_tokens)
        if longest < 1:
            raise ValueError(
                f"max_new_tokens must leave room for a prompt in the server's window of {server.window}, but is "
                f"{settings.max_new_tokens}; lower it"
            )
    try:
        counts = write_answers(steps, server.tokenizer, rows, folder, settings, in_flight, longest, progress)
    except ConnectionError as error:
        raise ConnectionError(
            f"{error}; what it has answered is safe in {folder}, and the same command goes on from there"
        ) from error
    if refusals:
        warnings.warn(f"{len(refusals)} prompts got no answer; the first because of {refusals[0]}", stacklevel=2)
    return counts


def ending_ids(target: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end an answer, the tokenizer's own first, without loading the model."""
    at = revision or "main"
    try:
        config = GenerationConfig.from_pretrained(target, revision=at)
    except OSError:  # as a model without a generation configuration gets one
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(target, revision=at))
    ids = config.eos_token_id
    found = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    own = tokenizer.eos_token_id
    return sorted(found or ([own] if isinstance(own, int) else []), key=lambda token: token != own)


def _answers(
    server: Server,
    prompts: Sequence[Prompt],
    settings: ResponseSettings,
    eos_token_ids: Sequence[int],
    in_flight: int,
    stopped: Callable[[], bool],
    refusals: list[str],
) -> Iterator[Step]:
    """Yield answers in the order of the prompts, at the end those too that came before their turn."""

    async def one(prompt: Prompt) -> Answer:
        return await _answer(server, prompt, settings, eos_token_ids)

    open_: dict[asyncio.Task[Answer], int] = {}
    ended: dict[int, Answer | None] = {}
    started = written = 0
    failure: Exception | None = None
    try:
        while failure is None and not stopped() and written < len(prompts):
            for place in range(started, min(len(prompts), started + in_flight - len(open_))):
                open_[server.loop.create_task(one(prompts[place]))] = place
                started = place + 1
            waiting = asyncio.wait(open_, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            done, _ = server.loop.run_until_complete(waiting)
            tokens, dropped = 0, []
            for task in done:
                place = open_.pop(task)
                try:
                    ended[place] = answer = task.result()
                    tokens += len(answer.tokens)
                except _DroppedError as error:
                    ended[place] = None
                    dropped.append(error.why)
                    refusals += [error.told] if error.told else []
                except (ConnectionError, ValueError) as error:
                    failure = error
            ready = []
            while written in ended:
                ready.append((prompts[written], ended.pop(written)))
                written += 1
            answers = [(prompt, answer) for prompt, answer in ready if answer is not None]
            yield Step(answers, len(done) - (failure is not None), tokens, dropped)
        late = [(prompts[place], answer) for place, answer in sorted(ended.items()) if answer is not None]
        yield Step(late, 0, 0)
    finally:
        for task in open_:
            task.cancel()
        if open_:
            server.loop.run_until_complete(asyncio.wait(open_))
    if failure is not None:
        raise failure


async def _answer(server: Server, prompt: Prompt, settings: ResponseSettings, eos_token_ids: Sequence[int]) -> Answer:
    """Ask for one answer and read it. Raises _DroppedError where there will be none."""
    try:
        reply = await server.ask(prompt.ids, settings.max_new_tokens, prompt.temperature, prompt.seed)
    except RefusedError as error:
        about_length = error.status == 413 or (error.status and ABOUT_LENGTH.search(error.told))
        raise _DroppedError(TOO_LONG if about_length else REFUSED if error.status else FAILED, error.told) from error
    if reply.prompt_tokens not in (None, len(prompt.ids)):
        raise _DroppedError(OTHER_PROMPT)
    tokens = _tokens(reply, server.tokenizer)[: settings.max_new_tokens]
    if reply.reason == FINISHED and not set(tokens[-1:]) & {*eos_token_ids, reply.ended_by}:
        tokens += [token for token in eos_token_ids if token == reply.ended_by] or eos_token_ids[:1]
    length = loop_between(tokens, 0, ended=True) if settings.stop_loops else None
    return Answer(0, tokens[:length], reply.reason if length is None else LOOP)


def _tokens(reply: Reply, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a reply. Raises _DroppedError for text that is not what its tokens say.

    A replacement character stands for bytes that are no text: which ones is lost.
    """
    if reply.ids is not None:
        return list(reply.ids)
    ids: list[int] = tokenizer(reply.text, add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    again = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if again != reply.text or "\ufffd" in reply.text:
        raise _DroppedError(NO_ROUND_TRIP)
    return list(ids)
