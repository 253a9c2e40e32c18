"""Answers: the target's own, in shards that survive interruption, with their provenance; loops left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_targets import VOCAB
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart.distill import respond as respond_module
from headstart.distill.dataset import load_dataset
from headstart.distill.respond import make_settings, read_answers, respond, write_lines
from headstart.distill.select import distinct_share, in_a_loop, select
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

WORDS = ["one two three", "four", "five six", "seven", "eight nine ten one", "two", "three four", "five"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def prompts(count: int = 8) -> list[dict]:
    return [
        {"id": f"p{i}", "category": "chat", "messages": [{"role": "user", "content": WORDS[i]}]} for i in range(count)
    ]


def run(target: Target, tokenizer: PreTrainedTokenizerBase, folder: Path, rows: list[dict], **settings):
    chosen = make_settings(
        "tiny", "float64", tokenizer, **{"max_new_tokens": 12, "temperatures": (0.0, 0.8), **settings}
    )
    return respond(SpeculativeEngine(target), tokenizer, rows, folder, chosen, (5,), batch_size=3, progress=False)


def test_answers_are_the_targets_own(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    counts = run(target, tokenizer, tmp_path, prompts(), temperatures=(0.0,))
    rows = list(read_answers(tmp_path))
    assert counts["answered"] == len(rows) == 8
    for row in rows:
        assert [row["answer_ids"]] == plain_generate(target, [row["prompt_ids"]], DecodingRules(12, (5,)))
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == 5 else "length")
        assert (row["target"], row["dtype"], row["category"]) == ("tiny", "float64", "chat")


def test_half_is_greedy_and_half_is_sampled(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts())
    by_id = {row["id"]: row["temperature"] for row in read_answers(tmp_path)}
    assert [by_id[f"p{i}"] for i in range(8)] == [0.0, 0.8] * 4


def test_killed_run_goes_on_and_neither_loses_nor_repeats_a_row(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(target, tokenizer, whole, prompts())
    written = []

    def write_or_die(path: Path, rows: list[dict]) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        written.append(path)
        write_lines(path, rows)

    monkeypatch.setattr(respond_module, "write_lines", write_or_die)
    with pytest.raises(KeyboardInterrupt):
        run(target, tokenizer, broken, prompts())
    monkeypatch.undo()
    counts = run(target, tokenizer, broken, prompts())
    assert counts["found"] == 3
    assert counts["answered"] == 5
    key = lambda row: row["id"]  # noqa: E731
    assert sorted(read_answers(broken), key=key) == sorted(read_answers(whole), key=key)


def test_more_prompts_extend_a_folder(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts(3))
    assert run(target, tokenizer, tmp_path, prompts(8))["answered"] == 5


def test_folder_with_answers_made_otherwise_is_refused(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    run(target, tokenizer, tmp_path, prompts(3))
    with pytest.raises(ValueError, match="seed: 0 there, 7 now; use another folder"):
        run(target, tokenizer, tmp_path, prompts(3), seed=7)


def test_half_written_shard_is_never_seen(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts(3))
    (tmp_path / "answers-00001.jsonl.partial").write_text('{"id": "p3", "answ')
    assert len(list(read_answers(tmp_path))) == 3
    assert run(target, tokenizer, tmp_path, prompts(4))["answered"] == 1


def test_prompts_too_long_are_skipped_and_counted(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    settings = make_settings("tiny", "float64", tokenizer, max_new_tokens=4)
    engine = SpeculativeEngine(target)
    counts = respond(
        engine, tokenizer, prompts(), tmp_path, settings, (), max_prompt_tokens=1, progress=False
    )  # fmt: skip
    assert counts["too_long"] == 8


def test_answers_are_training_rows(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts())
    data = load_dataset(tmp_path, tokenizer)
    assert data.report.answers == 8
    assert data.report.trained_tokens == sum(len(row["answer_ids"]) for row in read_answers(tmp_path))


def test_compressed_file_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_lines(tmp_path / name, [{"x": 1}])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def answer(ids: list[int], reason: str = "stop") -> dict:
    return {"answer_ids": ids, "finish_reason": reason}


def test_loops_are_dropped_finished_answers_kept_and_cut_ones_rationed() -> None:
    rows = [answer(list(range(i, i + 20))) for i in range(9)]
    rows += [answer([1, 2] * 20), answer([1, 2, 3] * 20, "length")]
    rows += [answer(list(range(i, i + 20)), "length") for i in range(3)]
    selection = select(rows)
    assert selection.report() == {
        "found_rows": 14,
        "found_tokens": 9 * 20 + 40 + 60 + 60,
        "kept_rows": 10,
        "kept_tokens": 200,
        "kept_cut": 1,
        "dropped": {"loop": 2, "cut": 2},
    }


def test_row_that_falls_into_a_loop_is_ended_there(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The tiny target's window is short, so the look for loops is made as sharp as it allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(respond_module, "LOOK_EVERY", 4)
        patch.setattr(respond_module, "in_a_loop", lambda tokens: len(tokens) >= 9)
        run(target, tokenizer, tmp_path, prompts(), max_new_tokens=30)
    rows = list(read_answers(tmp_path))
    assert {row["finish_reason"] for row in rows} <= {"stop", "loop"}
    assert all(len(row["answer_ids"]) == 9 for row in rows if row["finish_reason"] == "loop")
    assert select(rows, 0.5).dropped["loop"] == sum(row["finish_reason"] == "loop" for row in rows) > 0


def test_repeated_tail_is_a_loop_and_a_list_is_not() -> None:
    assert in_a_loop(list(range(300)) + list(range(20)) * 5)
    assert not in_a_loop(list(range(300)) + list(range(20)) * 2)
    assert not in_a_loop([1] * 50)


def test_short_answers_are_no_loops() -> None:
    assert distinct_share([7]) == 1.0
    assert distinct_share(list("abababab")) == pytest.approx(0.4)  # type: ignore[arg-type]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_impossible_share_of_cut_answers_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="cut_share"):
        select([], share)


def test_shards_say_how_they_were_made(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts(2))
    header = json.loads((tmp_path / "answers-00000.jsonl").read_text().splitlines()[0])
    assert (header["headstart"], header["version"], header["max_new_tokens"]) == ("answers", 1, 12)
    assert len(tokenizer) == VOCAB
