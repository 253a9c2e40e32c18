"""Requests to a server that fail: which are sent again, which are given up, and when the server is held to be gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from completions_server import CompletionsServer, Trouble
from remote_rows import EOS, NEW, answers_of, asked, prompts
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart.distill import remote
from headstart.distill import server as server_module
from headstart.distill.respond import _todo, make_settings
from headstart.distill.server import LAST_TRIES, TRIES
from headstart.inference.target import Target

DROP = Trouble(drop=True)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def whole(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> list[dict]:
    """Return the answers of a server without troubles."""
    with CompletionsServer(target, tokenizer, EOS) as served:
        asked(served, tmp_path / "whole", prompts())
    return answers_of(tmp_path / "whole")


def has(tokenizer: PreTrainedTokenizerBase, number: int, body: dict) -> bool:
    """Tell whether a request is that of the prompt with this number."""
    return tokenizer(f"w{20 + number}").input_ids[-1] in body["prompt"]


TROUBLES: dict[str, Callable[[int], Trouble]] = {
    "too many requests": lambda _: Trouble(429, headers={"Retry-After": "0.01"}),
    "errors": lambda n: Trouble(500 + n % 5),
    "dropped connections": lambda _: DROP,
}


@pytest.mark.parametrize("kind", TROUBLES)
def test_requests_that_fail_are_sent_again_and_answers_are_the_same(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path, kind: str
) -> None:
    met: set[tuple[int, ...]] = set()

    def first_time(number: int, body: dict) -> Trouble | None:
        prompt = tuple(body["prompt"])
        if prompt in met:
            return None
        met.add(prompt)
        return TROUBLES[kind](number)

    with CompletionsServer(target, tokenizer, EOS, trouble=first_time) as served:
        counts = asked(served, tmp_path / "troubled", prompts())
        assert (len(served.bodies), served.probes) == (24, 1)
    assert counts["answered"] == 12
    assert answers_of(tmp_path / "troubled") == whole


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


@pytest.mark.parametrize("company", [True, False], ids=["among others", "alone"])
def test_row_that_fails_while_the_server_is_there_is_counted_and_asked_for_the_next_time(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path, company: bool
) -> None:
    def fail(_number: int, body: dict) -> Trouble | None:
        return Trouble(500, "it makes me ill") if has(tokenizer, 3, body) else None

    rows = prompts() if company else prompts()[3:4]
    with CompletionsServer(target, tokenizer, EOS, trouble=fail) as served:
        with pytest.warns(UserWarning, match="1 prompts got no answer; the first because of status 500: it makes me"):
            counts = asked(served, tmp_path / "a", rows, in_flight=2)
        assert (counts["answered"], counts["failed"]) == (len(rows) - 1, 1)
        assert len(served.bodies) == len(rows) - 1 + TRIES + LAST_TRIES
        assert served.probes == 1 + 1 + LAST_TRIES
    with CompletionsServer(target, tokenizer, EOS) as served:
        assert asked(served, tmp_path / "a", prompts())["answered"] == 12 - (len(rows) - 1)
    assert sorted(answers_of(tmp_path / "a"), key=lambda row: row["id"]) == whole


def test_row_that_is_answered_right_after_a_probe_has_not_failed(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path
) -> None:
    drops = [DROP] * (TRIES + LAST_TRIES - 1)

    def at_last(_number: int, body: dict) -> Trouble | None:
        return drops.pop() if has(tokenizer, 3, body) and drops else None

    with CompletionsServer(target, tokenizer, EOS, trouble=at_last) as served:
        assert asked(served, tmp_path / "a", prompts())["answered"] == 12
        assert served.probes == 1 + LAST_TRIES
    assert answers_of(tmp_path / "a") == whole


def test_busy_server_that_answers_others_is_never_given_up(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path
) -> None:
    told: list[int] = []
    turns = threading.Semaphore(0)

    def busy(_number: int, body: dict) -> Trouble | None:
        """Tell the first row so eleven times, and answer one of the others between any two."""
        if not has(tokenizer, 0, body):
            assert turns.acquire(timeout=300)
            return None
        if len(told) == 11:
            return None
        told.append(1)
        turns.release()
        served.wait_for(len(told))
        return Trouble(429)

    with CompletionsServer(target, tokenizer, EOS, trouble=busy) as served:
        assert asked(served, tmp_path / "a", prompts())["answered"] == 12
        assert len(told) == 11 > TRIES and served.probes == 1
    assert answers_of(tmp_path / "a") == whole


GONE = {
    "dropped": (DROP, DROP, r"\w+Error"),
    "engine dead": (Trouble(500, "engine dead"), Trouble(500, "engine dead"), "status 500: engine dead"),
    "busy for ever": (Trouble(429), Trouble(503), "status 503"),
    "probe refused": (DROP, Trouble(400, "what?"), "status 400: what"),
}


@pytest.mark.parametrize(
    ("answered", "how"), [*((n, "dropped") for n in (0, 1, 5, 9)), *((9, how) for how in list(GONE)[1:])]
)
def test_server_that_goes_away_is_told_and_nothing_is_lost(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path, answered: int, how: str
) -> None:
    trouble, at_probe, told = GONE[how]

    def gone(number: int, _body: dict) -> Trouble | None:
        if number < answered:
            return None
        served.wait_for(answered)
        return trouble

    wanted = (
        rf"answers neither our requests nor, in 8 tries, what it has answered at the start \({told}.*; what it has "
        r"answered is safe in .*broken, and the same command goes on from there"
    )
    with (
        CompletionsServer(target, tokenizer, EOS, trouble=gone, probed=lambda n: at_probe if n else None) as served,
        pytest.raises(ConnectionError, match=wanted),
    ):
        asked(served, tmp_path / "broken", prompts())
    found = answers_of(tmp_path / "broken") if answered else []
    assert len(found) == answered, "those behind a row that got none are kept too"
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    with CompletionsServer(target, tokenizer, EOS) as served:
        counts = asked(served, tmp_path / "broken", prompts())
    assert (counts["found"], counts["answered"]) == (answered, 12 - answered)
    assert sorted(answers_of(tmp_path / "broken"), key=lambda row: row["id"]) == whole


def test_server_that_comes_back_answers_every_row(
    target: Target, tokenizer: PreTrainedTokenizerBase, whole: list[dict], tmp_path: Path
) -> None:
    back = threading.Event()

    def away(number: int, _body: dict) -> Trouble | None:
        return DROP if number >= 5 and not back.is_set() else None

    def probed(number: int) -> Trouble | None:
        if number == TRIES:
            back.set()
        return DROP if 0 < number < TRIES else None

    with CompletionsServer(target, tokenizer, EOS, trouble=away, probed=probed) as served:
        counts = asked(served, tmp_path / "a", prompts())
    assert counts["answered"] == 12 and "failed" not in counts
    assert answers_of(tmp_path / "a") == whole


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


def test_stop_signal_saves_what_is_finished_and_cancels_the_rest(
    target: Target, tokenizer: PreTrainedTokenizerBase
) -> None:
    replies: list[int] = []
    end = threading.Event()

    def second_never_comes(_number: int, body: dict) -> None:
        if has(tokenizer, 1, body):
            end.wait(300)

    class Noting(remote.Server):
        async def ask(self, *words: Any) -> Any:
            reply = await super().ask(*words)
            replies.append(1)
            return reply

    with (
        CompletionsServer(target, tokenizer, EOS, trouble=second_never_comes) as served,
        Noting(served.url, None, "my-model", tokenizer) as server,
    ):
        made = make_settings("tiny", "as served", tokenizer, NEW, server=server.description())
        todo = [replace(prompt, seed=1) for prompt in _todo(prompts(), tokenizer, made, set(), 99)[0]]
        steps = remote._answers(server, todo, made, (EOS,), 3, lambda: len(replies) > 4, [])
        found = [prompt.row["id"] for step in steps for prompt, _ in step.answers]
        end.set()
    assert found == sorted(found) and found[0] == "p00" and "p01" not in found
    assert 5 <= len(found) <= 7, "no request is sent after the signal"
