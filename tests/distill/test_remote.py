"""Answers from a server: the same as an engine's here, in order, whatever befalls the requests."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from completions_server import CompletionsServer, Trouble
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.distill import remote
from headstart.distill import server as server_module
from headstart.distill import slots as slots_module
from headstart.distill.remote import respond_remotely
from headstart.distill.respond import make_settings, respond
from headstart.distill.select import read_answers
from headstart.distill.server import Reply, Server
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.target import Target

EOS, NEW = 5, 24
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def prompts(count: int = 12) -> list[dict]:
    return [{"id": f"p{i:02}", "prompt": " ".join([*WORDS[: 1 + i % 7], f"w{20 + i}"])} for i in range(count)]


def asked(
    served: CompletionsServer, folder: Path, rows: list[dict], in_flight: int = 4, most: int = 1536, **settings: Any
) -> dict[str, int]:
    with Server(served.url, settings.pop("model", None), "my-model", served.tokenizer, first_wait=0.001) as server:
        made = make_settings(
            "tiny",
            "as served",
            served.tokenizer,
            **{"max_new_tokens": NEW, "temperatures": (0.0, 0.8), **settings},
            server=server.description(),
        )
        return respond_remotely(server, rows, folder, made, (EOS,), in_flight, most, progress=False)


def answers_of(folder: Path) -> list[dict]:
    rows = list(read_answers([folder])[1])
    assert len({row["id"] for row in rows}) == len(rows), "an answer is there twice"
    return rows


def said(folder: Path) -> dict[str, tuple[list[int], list[int], str]]:
    return {row["id"]: (row["prompt_ids"], row["answer_ids"], row["finish_reason"]) for row in answers_of(folder)}


WAYS: dict[str, dict[str, Any]] = {
    "ids": {},
    "llama.cpp": {"kind": "llamacpp", "gives_ids": False},
    "ids in, text out": {"gives_ids": False},
    "text": {"gives_ids": False, "takes_ids": False},
    "plain text": {"gives_ids": False, "takes_ids": False, "strict": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_equal_those_of_an_engine_here(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "LOOK_EVERY", 4)
    monkeypatch.setattr(slots_module, "in_a_loop", lambda tokens: len(tokens) >= 8 and tokens[7] % 4 == 0)
    here = make_settings("tiny", "float64", tokenizer, NEW, (0.0,))
    respond(SpeculativeEngine(target), tokenizer, prompts(), tmp_path / "here", here, (EOS,), 4, progress=False)
    wanted = said(tmp_path / "here")
    assert {reason for _, _, reason in wanted.values()} == {"stop", "length", "loop"}
    with CompletionsServer(target, tokenizer, EOS, **WAYS[way]) as served:
        counts = asked(served, tmp_path / "there", prompts(), temperatures=(0.0,))
    assert said(tmp_path / "there") == wanted
    assert counts["answered"] == 12
    header = read_answers([tmp_path / "there"])[0]
    assert header["server"]["model"] == "tiny"
    assert header["server"]["answer_ids"].startswith("the server's" if way in ("ids", "llama.cpp") else "its text")
    assert served.url not in json.dumps(header)


def test_what_a_row_is_asked_with_is_what_it_says(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with CompletionsServer(target, tokenizer, EOS) as served:
        asked(served, tmp_path, prompts(), seed=7)
        bodies = {tuple(body["prompt"]): body for body in served.bodies}
    for row in answers_of(tmp_path):
        body = bodies[tuple(row["prompt_ids"])]
        assert (body["temperature"], body["seed"]) == (row["temperature"], row["seed"])
        assert body["seed"] < 2**31
        assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert Counter(row["temperature"] for row in answers_of(tmp_path)) == {0.0: 6, 0.8: 6}


def test_answers_stand_in_the_order_of_the_prompts_however_they_come(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def slow_first(number: int, _body: dict) -> Trouble | None:
        return Trouble(seconds=0.3) if number % 4 == 0 else None

    with CompletionsServer(target, tokenizer, EOS, trouble=slow_first) as served:
        asked(served, tmp_path, prompts(), in_flight=5)
    assert [row["id"] for row in answers_of(tmp_path)] == [f"p{i:02}" for i in range(12)]
    sizes = [path.read_text().count("\n") - 1 for path in sorted(tmp_path.glob("answers-*"))]
    assert sum(sizes) == 12 and len(sizes) > 1


@pytest.mark.parametrize("in_flight", [1, 3, 8])
def test_no_more_requests_are_in_flight_than_allowed(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, in_flight: int
) -> None:
    all_there = threading.Barrier(in_flight, timeout=60)

    def together(number: int, _body: dict) -> Trouble | None:
        if number < in_flight:
            all_there.wait()
        return Trouble(seconds=0.02)

    with CompletionsServer(target, tokenizer, EOS, trouble=together) as served:
        asked(served, tmp_path, prompts(), in_flight)
    assert served.most_at_once == in_flight


TROUBLES: dict[str, Callable[[int], Trouble]] = {
    "too many requests": lambda _: Trouble(429, headers={"Retry-After": "0.01"}),
    "errors": lambda n: Trouble(500 + n % 5),
    "dropped connections": lambda _: Trouble(drop=True),
    "slow answers": lambda _: Trouble(seconds=0.2),
}


@pytest.mark.slow  # races on a machine with too much to do
@pytest.mark.parametrize("kind", TROUBLES)
def test_requests_that_fail_are_sent_again_and_answers_are_the_same(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str
) -> None:
    with CompletionsServer(target, tokenizer, EOS) as served:
        asked(served, tmp_path / "whole", prompts())

    def every_other(number: int, _body: dict) -> Trouble | None:
        return TROUBLES[kind](number) if number % 2 == 0 else None

    with CompletionsServer(target, tokenizer, EOS, trouble=every_other) as served:
        counts = asked(served, tmp_path / "troubled", prompts())
        assert len(served.bodies) > 12 or kind == "slow answers"
    assert counts["answered"] == 12
    assert answers_of(tmp_path / "troubled") == answers_of(tmp_path / "whole")


def test_server_is_given_the_time_that_it_asks_for(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = server_module.asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(server_module.asyncio, "sleep", note)

    def busy(number: int, _body: dict) -> Trouble | None:
        return Trouble(429, headers={"Retry-After": "17"}) if number < 3 else None

    with CompletionsServer(target, tokenizer, EOS, trouble=busy) as served:
        asked(served, tmp_path, prompts(1))
    assert waits == [17.0] * 3


def test_waits_grow_and_are_never_alike_for_all(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    sleep = server_module.asyncio.sleep

    async def note(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(server_module.asyncio, "sleep", note)
    with CompletionsServer(target, tokenizer, EOS, trouble=lambda n, _b: Trouble(500) if n < 5 else None) as served:
        asked(served, tmp_path, prompts(1))
    bounds = [0.001 * 2**n for n in range(5)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert len({wait / bound for wait, bound in zip(waits, bounds, strict=True)}) == 5


def test_row_that_fails_again_and_again_is_counted_and_asked_for_the_next_time(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    poison = [*tokenizer("w23").input_ids][-1]

    def fail(_number: int, body: dict) -> Trouble | None:
        return Trouble(500, "it makes me ill") if poison in body["prompt"] else Trouble(seconds=0.02)

    with CompletionsServer(target, tokenizer, EOS, trouble=fail) as served:
        with pytest.warns(UserWarning, match="1 prompts got no answer; the first because of status 500: it makes me"):
            counts = asked(served, tmp_path, prompts(), in_flight=2)
        assert (counts["answered"], counts["failed"]) == (11, 1)
    with CompletionsServer(target, tokenizer, EOS) as served:
        assert asked(served, tmp_path, prompts())["answered"] == 1


def test_busy_server_that_answers_others_is_never_given_up(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def busy(number: int, body: dict) -> Trouble | None:
        return Trouble(429) if number % 5 else Trouble(seconds=0.01)

    with CompletionsServer(target, tokenizer, EOS, trouble=busy) as served:
        counts = asked(served, tmp_path, prompts(), in_flight=12)
    assert counts["answered"] == 12


@pytest.mark.slow  # races on a machine with too much to do
@pytest.mark.parametrize("answered", [0, 1, 5])
def test_server_that_goes_away_is_told_and_nothing_is_lost(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, answered: int
) -> None:
    with CompletionsServer(target, tokenizer, EOS) as served:
        asked(served, tmp_path / "whole", prompts())

    def gone(number: int, _body: dict) -> Trouble | None:
        return Trouble(drop=True) if number >= answered else None

    wanted = r"gave no answer in 8 tries \(\w+Error"
    with (
        CompletionsServer(target, tokenizer, EOS, trouble=gone) as served,
        pytest.raises(ConnectionError, match=wanted),
    ):
        asked(served, tmp_path / "broken", prompts())
    found = len(answers_of(tmp_path / "broken")) if answered else 0
    assert found == answered, "those behind a row that failed are kept too"
    with CompletionsServer(target, tokenizer, EOS) as served:
        counts = asked(served, tmp_path / "broken", prompts())
    assert (counts["found"], counts["answered"]) == (answered, 12 - answered)
    by_id = {row["id"]: row for row in answers_of(tmp_path / "broken")}
    assert by_id == {row["id"]: row for row in answers_of(tmp_path / "whole")}


def test_prompts_too_long_for_the_server_are_counted(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    lengths = []
    for tells in (False, True):
        with CompletionsServer(target, tokenizer, EOS, window=NEW + 9, tells_window=tells) as served:
            if tells:
                counts = asked(served, tmp_path / f"{tells}", prompts())
            else:
                with pytest.warns(UserWarning, match="maximum context length is 33 tokens"):
                    counts = asked(served, tmp_path / f"{tells}", prompts())
            lengths += [len(row["prompt_ids"]) for row in answers_of(tmp_path / f"{tells}")]
        assert 0 < counts["too_long"] < 12
        assert counts["answered"] + counts["too_long"] == 12
        assert not tells or len(served.bodies) == counts["answered"], "they are not sent"
    assert max(lengths) == 9
    assert said(tmp_path / "True") == said(tmp_path / "False")


def test_refused_prompt_is_counted_with_the_servers_words(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with CompletionsServer(
        target, tokenizer, EOS, trouble=lambda n, _b: Trouble(400, "I will not") if n == 3 else None
    ) as served:
        with pytest.warns(UserWarning, match="the first because of status 400: I will not"):
            counts = asked(served, tmp_path, prompts(), in_flight=1)
        assert len(served.bodies) == 12, "and not sent again"
    assert (counts["answered"], counts["refused"]) == (11, 1)


def test_text_that_its_tokens_do_not_give_back_is_dropped_by_name(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with CompletionsServer(
        target, tokenizer, EOS, gives_ids=False, trouble=lambda n, _b: Trouble(text="one  two") if n == 2 else None
    ) as served:
        counts = asked(served, tmp_path, prompts(), in_flight=1)
    assert (counts["answered"], counts["text_does_not_round_trip"]) == (11, 1)
    assert "p02" not in said(tmp_path)


def test_text_with_bytes_that_are_none_is_dropped() -> None:
    """A tokenizer of bytes gives the replacement character back, but not the bytes for which it stands."""
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    for text, whole in (("é 1", True), ("é \ufffd", False)):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
        reply = Reply(text, None, "length", None, None)
        if whole:
            assert len(remote._tokens(reply, tokenizer)) == 4
        else:
            with pytest.raises(remote._DroppedError, match="text_does_not_round_trip"):
                remote._tokens(reply, tokenizer)


def test_prompt_that_the_server_reads_as_other_tokens_is_dropped_by_name(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    class Cutting(CompletionsServer):
        def answer(self, path: str, body: dict[str, Any], text: str | None) -> tuple[int, dict[str, Any]]:
            return super().answer(path, {**body, "prompt": body["prompt"][-8:]}, text)

    with Cutting(target, tokenizer, EOS) as served:
        counts = asked(served, tmp_path, prompts())
    assert 0 < counts["prompt_read_otherwise"] == 12 - counts["answered"]
    assert max(len(row["prompt_ids"]) for row in answers_of(tmp_path)) == 8


def test_folder_with_answers_made_otherwise_is_refused_but_the_server_may_move(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for count in (3, 6):
        with CompletionsServer(target, tokenizer, EOS) as served:
            asked(served, tmp_path, prompts(count))
    wanted = r"differ in server: .* there, .*tokenised again.* now; use another folder"
    with CompletionsServer(target, tokenizer, EOS, gives_ids=False) as served, pytest.raises(ValueError, match=wanted):
        asked(served, tmp_path, prompts())
    with pytest.raises(ValueError, match="differ in dtype"):
        here = make_settings("tiny", "float64", tokenizer, NEW)
        respond(SpeculativeEngine(target), tokenizer, prompts(), tmp_path, here, (EOS,), progress=False)


@pytest.mark.slow  # races on a machine with too much to do
def test_stop_signal_saves_what_is_finished_and_cancels_the_rest(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_to_stop: list[int] = []

    def slow_second(number: int, _body: dict) -> Trouble | None:
        return Trouble(seconds=30) if number == 1 else None

    class Stopping(remote.Server):
        async def ask(self, *words: Any) -> Any:
            reply = await super().ask(*words)
            asked_to_stop.append(1)
            return reply

    with (
        CompletionsServer(target, tokenizer, EOS, trouble=slow_second) as served,
        Stopping(served.url, None, "my-model", tokenizer) as server,
    ):
        made = make_settings("tiny", "as served", tokenizer, NEW, server=server.description())
        todo = _as_prompts(tokenizer, prompts())
        steps = remote._answers(server, todo, made, (EOS,), 3, lambda: len(asked_to_stop) > 4, [])
        found = [prompt.row["id"] for step in steps for prompt, _ in step.answers]
    assert found == sorted(found) and found[0] == "p00" and "p01" not in found
    assert 5 <= len(found) < 11


def _as_prompts(tokenizer: PreTrainedTokenizerBase, rows: list[dict]) -> list[Any]:
    from headstart.distill.respond import _todo

    settings = make_settings("tiny", "as served", tokenizer, NEW)
    return [replace(prompt, seed=1) for prompt in _todo(rows, tokenizer, settings, set(), 99)[0]]
