"""A small server on loopback that speaks the OpenAI completions protocol and answers with a tiny target.

It can be as forthcoming as vLLM, as taciturn as a server that knows text alone, and as unreliable as a test wants.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import LogitsProcessorList, PreTrainedTokenizerBase, TemperatureLogitsWarper

from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

PLAIN = {"model", "prompt", "max_tokens", "temperature", "seed", "stream"}
PLAIN |= {"top_p", "presence_penalty", "frequency_penalty"}

KNOWN: dict[Any, list[int]] = {}
"""What the target has said before, so that tests that ask for the same do not wait for it again."""


@dataclass
class Trouble:
    """What befalls one request: an error status, a dropped connection, a pause, or another text than the target's."""

    status: int = 200
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False
    seconds: float = 0.0
    text: str | None = None


class CompletionsServer:
    """Serves until its block is left.

    gives_ids, takes_ids: token ids in answers and prompts. strict: unknown options are refused. kind: as the list of
    models tells it; "llamacpp" has that server's own endpoint too. window: tokens of prompt and answer, told in the
    list if `tells_window`. trouble: asked, with number and body, before the answer to each request for more than one
    token. probed: asked, with its number, before the answer to each request for one token; a client's first is 0.

    bodies: of requests for more than one token, in the order they came. probes: requests for one token. most_at_once:
    requests in the making at a time.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: PreTrainedTokenizerBase,
        eos: int,
        gives_ids: bool = True,
        takes_ids: bool = True,
        strict: bool = False,
        kind: str = "test",
        window: int = 64,
        tells_window: bool = False,
        key: str = "",
        trouble: Callable[[int, dict[str, Any]], Trouble | None] = lambda _number, _body: None,
        probed: Callable[[int], Trouble | None] = lambda _number: None,
    ) -> None:
        self.target, self.tokenizer, self.eos, self.kind, self.window = target, tokenizer, eos, kind, window
        self.gives_ids, self.takes_ids, self.strict, self.trouble = gives_ids, takes_ids, strict, trouble
        self.probed, self.probes, self._answered = probed, 0, 0
        self.tells_window, self.key = tells_window, key
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = self._at_once = 0
        self._lock, self._model = threading.Condition(), threading.Lock()
        handler = type("Handler", (_Handler,), {"served": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> CompletionsServer:
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def models(self) -> dict[str, Any]:
        """Return the list of models."""
        more = {"max_model_len": self.window} if self.tells_window else {}
        return {"object": "list", "data": [{"id": "tiny", "owned_by": self.kind, **more}]}

    def begin(self, body: dict[str, Any], most: int) -> Trouble:
        """Note a request; return what befalls it."""
        with self._lock:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            number = self.probes if most == 1 else len(self.bodies)
            if most == 1:
                self.probes += 1
            else:
                self.bodies.append(body)
        return (self.probed(number) if most == 1 else self.trouble(number, body)) or Trouble()

    def end(self, answered: bool) -> None:
        """Note that a request has ended. answered: it was one for more than one token, and got them."""
        with self._lock:
            self._at_once -= 1
            self._answered += answered
            self._lock.notify_all()

    def wait_for(self, answers: int) -> None:
        """Wait until so many requests for more than one token have been answered."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._answered >= answers, timeout=300), f"{self._answered} of {answers}"

    def answer(self, path: str, body: dict[str, Any], text: str | None) -> tuple[int, dict[str, Any]]:
        """Return status and body of an answer."""
        native, prompt = path == "/completion", body["prompt"]
        most = body["n_predict" if native else "max_tokens"]
        if not native and body["model"] != "tiny":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if isinstance(prompt, list) and not (self.takes_ids or native):
            return 400, {"detail": "prompt must be a string"}
        if self.strict and not body.keys() <= PLAIN:
            return 422, {"detail": [{"msg": "extra fields not permitted"}]}
        ids: list[int] = prompt if isinstance(prompt, list) else self._encode(prompt)
        if len(ids) + most > self.window:
            message = f"This model's maximum context length is {self.window} tokens, but you asked for more"
            return 400, {"error": {"message": message, "code": 400}}
        said = self._encode(text) if text is not None else self._generate(ids, most, body)
        stopped = said[-1:] == [self.eos]
        kept = said[:-1] if stopped else said
        words = text if text is not None else str(self.tokenizer.decode(kept, skip_special_tokens=False))
        if native:
            kind = "eos" if stopped else "limit"
            return 200, {"content": words, "tokens": said, "stop_type": kind, "tokens_evaluated": len(ids)}
        choice = {"index": 0, "text": words, "finish_reason": "stop" if stopped else "length", "stop_reason": None}
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": said, "prompt_token_ids": ids}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(ids), "completion_tokens": len(said)}}

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # pyright: ignore

    def _generate(self, ids: list[int], most: int, body: dict[str, Any]) -> list[int]:
        sampled = body["temperature"] > 0
        processors = LogitsProcessorList([TemperatureLogitsWarper(body["temperature"])] if sampled else [])
        asked = (id(self.target), *ids, most, self.eos, body["temperature"], body["seed"] if sampled else None)
        with self._model:
            if asked not in KNOWN:
                rules = DecodingRules(most, (self.eos,), processors, sampled, [body["seed"]])
                KNOWN[asked] = plain_generate(self.target, [ids], rules)[0]
            return KNOWN[asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: CompletionsServer

    def do_GET(self) -> None:
        self._send(200, self.served.models()) if self.path == "/v1/models" else self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        native = self.served.kind == "llamacpp" and self.path == "/completion"
        if self.served.key and self.headers["Authorization"] != f"Bearer {self.served.key}":
            self._send(401, {"error": {"message": f"wrong key: {self.headers['Authorization']}"}})
            return
        if not native and self.path != "/v1/completions":
            self._send(404, {"detail": "Not Found"})
            return
        most, answered = body["n_predict" if native else "max_tokens"], False
        trouble = self.served.begin(body, most)
        try:
            time.sleep(trouble.seconds)
            if trouble.drop:
                self.close_connection = True
                self.connection.close()
            elif trouble.status != 200:
                self._send(trouble.status, {"error": {"message": trouble.message}}, trouble.headers)
            else:
                self._send(*self.served.answer(self.path, body, trouble.text))
                answered = most > 1
        finally:
            self.served.end(answered)

    def _send(self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
