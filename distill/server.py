"""Ask a server that speaks the OpenAI completions protocol: vLLM, SGLang, llama.cpp and others.

Knows requests and retries; neither what servers call things, nor how many requests are in flight, nor what is done with
the answers. Only the URL that is given is contacted: no proxy, no redirect, no password file.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..core.prompts import render_prompt
from .protocol import FULL_TEXT, NATIVE, WAYS, Reply, Way, read_reply, retry_after, sampling_of

try:
    import httpx2 as httpx
except ImportError:  # the same library under its older name, for Python 3.10
    import httpx  # pyright: ignore[reportMissingImports]

KEY_VARIABLE = "HEADSTART_API_KEY"
"""Environment variable that holds the server's key; a key is taken from nowhere else, and never told."""

TRIES, OPENING_TRIES = 8, 4
"""Times that a request is sent before it is doubted, and then a probe: about a minute each; at the start, seconds."""

LAST_TRIES = 2
"""Times that a request which has failed so often is sent once more, right after the server has answered a probe."""

FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0
"""Seconds before the second try, doubled each time up to the longest."""

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 1800.0
"""Seconds to wait for a connection, and for an answer: a busy server lets requests wait before it begins."""

BUSY = (429, 503)
NOT_NOW = (408, 409, 425, *BUSY)
"""Statuses after which the same request may succeed; so it may after all from 500 up."""


class RefusedError(ValueError):
    """The server will not answer this request. status: of HTTP, 0 when it failed again and again in other ways."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status, self.told = status, told


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
        self._known_good = render_prompt(tokenizer, [{"role": "user", "content": "1"}])
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
            "sampling": sampling_of(self.way),
        }

    async def ask(self, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> Reply:
        """Ask for one answer, again where it may help.

        A request that fails again and again is given up only if the server answers a probe before and after that.

        Raises RefusedError for what this server will never answer, ValueError when it answers none of our requests any
        more (its key, its model), ConnectionError when it is gone: it does not answer the probe either.
        """
        url, body = self._request(self.way, ids, max_new_tokens, temperature, seed)
        told, tries = "", TRIES
        for _ in range(1 + LAST_TRIES):
            try:
                reply = await self._tried(url, body, tries, self.way)
                self._answered += 1
                return reply
            except _Passing as error:
                told, tries = error.told, TRIES if error.busy else 1
            await self._outlast()
        raise RefusedError(0, told)

    async def _choose(self, model: str | None, target: str) -> tuple[str, str, int | None]:
        """Return the model's name, who serves it, and its window where the server tells."""
        try:
            listed = (await self._opened(f"{self.url}/models", None))["data"]
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
        ids, told = self._known_good, []
        for way in (NATIVE, *WAYS) if self.kind == "llamacpp" else WAYS:
            url, body = self._request(way, ids, 1, 0.0, 0)
            try:
                reply = await self._opened(url, body, way)
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
        body = {"prompt": prompt, "temperature": temperature, "seed": seed, "stream": False, **sampling_of(way)}
        if way.native:
            body |= {"n_predict": max_new_tokens, "return_tokens": True, "cache_prompt": False}
            return f"{self.url.removesuffix('/v1')}/completion", body
        more = FULL_TEXT if way.full else {}
        return f"{self.url}/completions", {"model": self.model, **body, "max_tokens": max_new_tokens, **more}

    async def _outlast(self) -> None:
        """Wait until the server gives one token for what it has answered at the start: the probe.

        A list of models would tell less: what stands before the engine may still send it when the engine is gone.
        Raises ConnectionError when it does not come.
        """
        try:
            await self._tried(*self._request(self.way, self._known_good, 1, 0.0, 0), TRIES, self.way)
        except (_Passing, RefusedError) as error:
            raise ConnectionError(
                f"{self.url} answers neither our requests nor, in {TRIES} tries, what it has answered at the start "
                f"({error.told}); see whether the server is up"
            ) from error

    async def _opened(self, url: str, body: dict[str, Any] | None, way: Way | None = None) -> Any:
        """Send a request of the start until it is answered. Raises ConnectionError when it is not."""
        try:
            return await self._tried(url, body, OPENING_TRIES, way)
        except _Passing as error:
            raise ConnectionError(
                f"{self.url} gave no answer in {OPENING_TRIES} tries ({error.told}); see whether the server is up"
            ) from error

    async def _tried(self, url: str, body: dict[str, Any] | None, tries: int, way: Way | None = None) -> Any:
        """Send a request until it is answered, with waits that grow; return the reply, or without a way what was sent.

        Tries at a busy server that goes on answering others do not count. Raises _Passing after the last one.
        """
        wait, tried, answered = self._first_wait, 0, self._answered
        while True:
            try:
                return await self._once(url, body, way)
            except _Passing as error:
                tried = 1 if error.busy and self._answered > answered else tried + 1
                answered = self._answered
                if tried >= tries:
                    raise
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
                return response.json() if way is None else read_reply(response.json(), way)
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise _Passing(f"its answer is no completion: {type(error).__name__} {error}") from error
        told = f"status {status}: {self._without_key(_message(response))}"
        if status in NOT_NOW or status >= 500:
            raise _Passing(told, retry_after(response.headers.get("retry-after")), status in BUSY)
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


def _message(response: httpx.Response) -> str:
    """Return what a server says of an error, in whichever of the usual places, on one line."""
    try:
        found = response.json()
        found = found.get("error", found)
        text = found if isinstance(found, str) else found.get("message") or found.get("detail") or found
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:300]
