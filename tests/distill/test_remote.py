"""Answers from a server: the same as an engine's here, in order; what cannot be one is dropped by name."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from completions_server import CompletionsServer, Trouble
from remote_rows import EOS, NEW, answers_of, asked, prompts, said
from tiny_tokenizer import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.distill import remote
from headstart.distill import slots as slots_module
from headstart.distill.protocol import Reply
from headstart.distill.respond import make_settings, respond
from headstart.distill.select import read_answers
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.target import Target


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


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
    first = tokenizer("w20").input_ids[-1]

    def first_comes_fifth(_number: int, body: dict) -> None:
        if first in body["prompt"]:
            served.wait_for(4)
        elif not {tokenizer(f"w{20 + i}").input_ids[-1] for i in range(1, 5)} & {*body["prompt"]}:
            served.wait_for(5)

    with CompletionsServer(target, tokenizer, EOS, trouble=first_comes_fifth) as served:
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
