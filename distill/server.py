"""Ask a server that speaks the OpenAI completions protocol: vLLM, SGLang, llama.cpp and others.

Knows requests, retries and what servers call things; neither how many requests are in flight nor what is done with the
answers. Only the URL that is given is contacted: no proxy, no redirect, no password file.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.prompts import render_prompt

try:
    import httpx2 as httpx
except ImportError:  # the same library under its older name, for Python 3.10
    import httpx  # pyright: ignore[reportMissingImports]

KEY_VARIABLE = "HEADSTART_API_KEY"
"""Environment variable that holds the server's key; a key is taken from nowhere else, and never told."""

TRIES, OPENING_TRIES = 8, 4
"""Times that a request is sent before it is given up: in a run, about two minutes; at its start, a few seconds."""

FIRST_WAIT, LONGEST_WAIT, LONGEST_RETRY_AFTER = 0.5, 60.0, 600.0
"""Seconds before the second try, doubled each time up to the longest, and what a server may ask for at most."""

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 1800.0
"""Seconds to wait for a connection, and for an answer: a busy server lets requests wait before it begins."""

BUSY = (429, 503)
NOT_NOW = (408, 409, 425, *BUSY)
"""Statuses after which the same request may succeed; so it may after all from 500 up."""

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


class RefusedError(ValueError):
    """The server will not answer this request. status: of HTTP, 0 when it failed again and again in other ways."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status, self.told = status, told


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


class Server:
    """A server and the way it is asked; a context manager that closes its connections.

    url: up to and including `/v1`. model: its name there; None takes the only one, or that of the target.
    opening: a few tokens with which the ways are tried. Raises ValueError when it cannot be asked, ConnectionError when
    it cannot be reached.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        target: str,
        tokenizer: PreTrainedTokenizerBase,
        first_wait: float = FIRST_WAIT,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self.url, self._key = _checked(url), os.environ.get(KEY_VARIABLE, "")
        self.tokenizer, self._first_wait = tokenizer, first_wait
        self._jitter, self._answered = random.Random(), 0
        self.loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        try:
            self.model, self.kind, self.window = self.loop.run_until_complete(self._choose(model, target))
            self.way, self.gives_ids = self.loop.run_until_complete(self._find_way())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a server then stops working on what was asked."""
        self.loop.run_until_complete(self._client.aclose())
        self.loop.close()

    def description(self) -> dict[str, Any]:
        """Return what decides an answer, for the header of a shard. The URL does not: a server may move."""
        return {
            "model": self.model,
            "kind": self.kind,
            "asked_with": self.way.name,
            "answer_ids": "the server's" if self.gives_ids else "its text, tokenised again",
            "sampling": _sampling(self.way),
        }

    async def ask(self, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Reply:
        """Ask for one answer, again where it may help.

        Raises RefusedError for what this server will never answer, ValueError when it answers none of our requests any
        more (its key, its model), ConnectionError when it is gone.
        """
        url, body = self._request(self.way, ids, max_new_tokens, temperature, seed)
        return await self._tried(url, body, TRIES, self.way)

    async def _choose(self, model: str | None, target: str) -> tuple[str, str, int | None]:
        """Return the model's name, who serves it, and its window where the server tells."""
        try:
            listed = (await self._tried(f"{self.url}/models", None, OPENING_TRIES))["data"]
            served = {str(one["id"]): one for one in listed}
        except RefusedError as error:
            if error.status not in (404, 405, 501):
                raise
            served = {}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{self.url}/models must list models in `data`; does --server end in /v1?") from error
        if not served:
            return model or target, "unknown", None
        name = model or (target if target in served or len(served) > 1 else next(iter(served)))
        if name not in served:
            raise ValueError(
                f"{self.url} must serve the model {name!r}, but has {', '.join(map(repr, sorted(served)))}; name one "
                "with --server_model"
            )
        window = served[name].get("max_model_len") or (served[name].get("meta") or {}).get("n_ctx")
        return name, str(served[name].get("owned_by", "unknown")), window if isinstance(window, int) else None

    async def _find_way(self) -> tuple[Way, bool]:
        """Return the first way in which the server answers, and whether it returns token ids."""
        ids = render_prompt(self.tokenizer, [{"role": "user", "content": "1"}])
        told = []
        for way in (NATIVE, *WAYS) if self.kind == "llamacpp" else WAYS:
            url, body = self._request(way, ids, 1, 0.0, 0)
            try:
                reply = await self._tried(url, body, OPENING_TRIES, way)
            except RefusedError as error:
                told.append(f"{way.name}: {error.told}")
                continue
            if reply.prompt_tokens in (None, len(ids)):
                return way, reply.ids is not None
            told.append(f"{way.name}: reads {reply.prompt_tokens} tokens where the target's tokenizer has {len(ids)}")
        raise ValueError(
            f"{self.url} must complete prompts in this target's tokens, but does not ({'; '.join(told)}); is it this "
            "model's server, and does the URL end in /v1?"
        )

    def _request(
        self, way: Way, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int
    ) -> tuple[str, dict[str, Any]]:
        prompt = list(ids) if way.prompt_as_ids else self.tokenizer.decode(list(ids), skip_special_tokens=False)
        body = {"prompt": prompt, "temperature": temperature, "seed": seed, "stream": False, **_sampling(way)}
        if way.native:
            body |= {"n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False}
            return f"{self.url.removesuffix('/v1')}/completion", body
        more = FULL_TEXT if way.full else {}
        return f"{self.url}/completions", {"model": self.model, **body, "max_tokens": max_new_tokens, **more}

    async def _tried(self, url: str, body: dict[str, Any] | None, tries: int, way: Way | None = None) -> Any:
        """Send a request until it is answered or given up; return the reply, or without a way what was sent.

        A busy server that goes on answering others is not given up.
        """
        wait, tried, answered, failing_since = self._first_wait, 0, self._answered, None
        while True:
            try:
                found = await self._once(url, body, way)
                self._answered += 1
                return found
            except _Passing as error:
                failing_since = self._answered if failing_since is None else failing_since
                tried = 1 if error.busy and self._answered > answered else tried + 1
                answered = self._answered
                if tried >= tries:
                    if answered > failing_since and not error.busy:  # others are answered: it is this request
                        raise RefusedError(0, error.told) from error
                    raise ConnectionError(
                        f"{self.url} gave no answer in {tried} tries ({error.told}); see whether the server is up"
                    ) from error
                await asyncio.sleep(max(error.wait, wait * self._jitter.uniform(0.5, 1.0)))
                wait = min(2 * wait, LONGEST_WAIT)

    async def _once(self, url: str, body: dict[str, Any] | None, way: Way | None) -> Any:
        method = "GET" if body is None else "POST"
        try:
            response = await self._client.request(method, url, json=body)
        except httpx.RequestError as error:
            raise _Passing(self._without_key(f"{type(error).__name__}: {error}".removesuffix(": "))) from error
        status = response.status_code
        if status == 200:
            try:
                return response.json() if way is None else _reply(response.json(), way)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise _Passing(f"its answer is no completion: {type(error).__name__} {error}") from error
        told = f"status {status}: {self._without_key(_message(response))}"
        if status in NOT_NOW or status >= 500:
            raise _Passing(told, _retry_after(response.headers.get("retry-after")), status in BUSY)
        if status in (401, 403):
            raise ValueError(
                f"{self.url} must accept our key, but says {told}; put the key into the variable {KEY_VARIABLE}"
            )
        if status == 404 and url.endswith("/completions"):
            raise ValueError(f"{url} must answer for {self.model!r}, but says {told}; see --server_model")
        raise RefusedError(status, told)

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


class _Passing(Exception):
    """A failure that may pass. wait: seconds that the server asks for. busy: it has too much to do."""

    def __init__(self, told: str, wait: float = 0.0, busy: bool = False) -> None:
        super().__init__(told)
        self.told, self.wait, self.busy = told, wait, busy


def _checked(url: str) -> str:
    """Return the URL without a closing slash. Raises ValueError for what is none, or holds a password."""
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"--server must be a URL like http://127.0.0.1:8000/v1, but {error}") from error
    if parts.userinfo:
        raise ValueError(f"--server must hold no password; put the server's key into the variable {KEY_VARIABLE}")
    if parts.scheme not in ("http", "https") or not parts.host or parts.query:
        raise ValueError(f"--server must be a URL like http://127.0.0.1:8000/v1, but is {url!r}")
    return url.rstrip("/")


def _sampling(way: Way) -> dict[str, Any]:
    return FULL_SAMPLING if way.full else PLAIN_SAMPLING


def _reply(found: Any, way: Way) -> Reply:
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


def _message(response: httpx.Response) -> str:
    """Return what a server says of an error, in whichever of the usual places, on one line."""
    try:
        found = response.json()
        found = found.get("error", found)
        text = found if isinstance(found, str) else found.get("message") or found.get("detail") or found
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]


def _retry_after(value: str | None) -> float:
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
