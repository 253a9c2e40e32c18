"""Answers: the target's own, in shards that survive interruption, with their provenance; loops left out."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_targets import VOCAB
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart.core import hf
from headstart.core.prompts import render_prompt
from headstart.distill import shards as shards_module
from headstart.distill import slots as slots_module
from headstart.distill.dataset import load_dataset
from headstart.distill.respond import make_settings, respond
from headstart.distill.select import distinct_share, in_a_loop, read_answers, select
from headstart.drafters.base import Drafter
from headstart.drafters.registry import new_drafter
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules, EngineState
from headstart.inference.target import Target

WORDS = ["one two three", "four", "five six", "seven", "eight nine ten one", "two", "three four", "five"]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def heard() -> Iterator[None]:
    """Hear Ctrl-C even where the tests run in the background of a shell, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def prompts(count: int = 8) -> list[dict]:
    return [
        {"id": f"p{i}", "category": "chat", "messages": [{"role": "user", "content": WORDS[i]}]} for i in range(count)
    ]


def run(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rows: list[dict],
    batch_size: int = 3,
    drafter: Drafter | None = None,
    **settings,
) -> dict[str, int]:
    chosen = make_settings(
        "tiny", "float64", tokenizer, **{"max_new_tokens": 12, "temperatures": (0.0, 0.8), **settings}
    )
    engine = SpeculativeEngine(target, drafter)
    return respond(engine, tokenizer, rows, folder, chosen, (5,), batch_size, progress=False)


def answers_of(folder: Path) -> list[dict]:
    return list(read_answers([folder])[1])


def by_id(folder: Path) -> list[dict]:
    rows = sorted(answers_of(folder), key=lambda row: row["id"])
    assert len({row["id"] for row in rows}) == len(rows), "an answer is there twice"
    return rows


def test_answers_are_the_targets_own(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    counts = run(target, tokenizer, tmp_path, prompts(), temperatures=(0.0,))
    rows = answers_of(tmp_path)
    assert counts["answered"] == len(rows) == 8
    for row in rows:
        assert [row["answer_ids"]] == plain_generate(target, [row["prompt_ids"]], DecodingRules(12, (5,)))
        assert row["finish_reason"] == ("stop" if row["answer_ids"][-1] == 5 else "length")
        assert (row["target"], row["dtype"], row["category"]) == ("tiny", "float64", "chat")


def test_half_is_greedy_and_half_is_sampled(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts())
    assert [row["temperature"] for row in by_id(tmp_path)] == [0.0, 0.8] * 4


@pytest.mark.parametrize("kind", ["none", "medusa"])
def test_answers_do_not_depend_on_the_number_of_slots_or_the_drafter(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "LOOK_EVERY", 4)
    monkeypatch.setattr(slots_module, "in_a_loop", lambda tokens: len(tokens) >= 8 and tokens[7] % 2 == 0)
    drafter = None if kind == "none" else new_drafter("medusa", target).double().eval()
    run(target, tokenizer, tmp_path / "alone", prompts(), batch_size=1, max_new_tokens=20)
    expected = by_id(tmp_path / "alone")
    assert {row["finish_reason"] for row in expected} >= {"loop", "length"}
    for slots in (2, 3, 8, 50):
        run(target, tokenizer, tmp_path / f"{slots}", prompts(), slots, drafter, max_new_tokens=20)
        assert by_id(tmp_path / f"{slots}") == expected


@pytest.mark.parametrize("shards", [0, 1, 2])
def test_run_that_dies_in_a_write_goes_on_and_neither_loses_nor_repeats_a_row(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(target, tokenizer, whole, prompts())
    write_lines, written = shards_module.write_lines, []

    def write_or_die(path: Path, rows: list[dict]) -> None:
        if len(written) == shards:
            raise OSError("the disk is full")
        written.append(path)
        write_lines(path, rows)

    monkeypatch.setattr(shards_module, "write_lines", write_or_die)
    with pytest.raises(OSError, match=r"the disk is full; the \d+ answers in the shards before it are safe"):
        run(target, tokenizer, broken, prompts())
    monkeypatch.undo()
    found = len(answers_of(broken)) if shards else 0
    assert found >= 3 * shards
    counts = run(target, tokenizer, broken, prompts())
    assert (counts["found"], counts["answered"]) == (found, 8 - found)
    assert by_id(broken) == by_id(whole)


@pytest.mark.parametrize("passes", [1, 12, 30])
@pytest.mark.parametrize(
    ("number", "ending"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["Ctrl-C", "SIGTERM"]
)
def test_stop_signal_saves_what_is_finished_and_says_how_to_go_on(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    heard: None,
    number: signal.Signals,
    ending: type[BaseException],
    passes: int,
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run(target, tokenizer, whole, prompts())
    step, taken = SpeculativeEngine.step, []

    def step_and_signal(self: SpeculativeEngine, state: EngineState) -> None:
        step(self, state)
        taken.append(state)
        if len(taken) == passes:
            signal.raise_signal(number)

    monkeypatch.setattr(SpeculativeEngine, "step", step_and_signal)
    with pytest.raises(ending):
        run(target, tokenizer, stopped, prompts(), batch_size=2)
    monkeypatch.undo()
    assert len(taken) == passes, "the pass is finished, and none follows"
    finished = len(answers_of(stopped)) if list(stopped.glob("answers-*")) else 0
    assert f"{finished} of 8 answers were made and are safe in {stopped}" in capsys.readouterr().err
    assert finished > 0 or passes == 1
    assert run(target, tokenizer, stopped, prompts())["answered"] == 8 - finished
    assert by_id(stopped) == by_id(whole)


def test_of_prompts_with_one_id_the_first_is_answered_and_the_others_are_counted(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [*prompts(4), prompts(4)[1], prompts(4)[3]]
    counts = run(target, tokenizer, tmp_path / "a", rows)
    assert (counts["answered"], counts["repeated"]) == (4, 2)
    run(target, tokenizer, tmp_path / "b", prompts(4))
    assert by_id(tmp_path / "a") == by_id(tmp_path / "b")
    with pytest.warns(UserWarning, match="1 have that of an earlier prompt with another text"):
        run(target, tokenizer, tmp_path / "c", [*prompts(4), {"id": "p0", "prompt": "ten nine"}])


def test_prompts_without_an_id_are_known_by_their_text(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"prompt": word} for word in WORDS]
    assert run(target, tokenizer, tmp_path, rows)["answered"] == 8
    counts = run(target, tokenizer, tmp_path, [*rows, {"prompt": "one"}])
    assert (counts["found"], counts["answered"]) == (8, 1)


def test_more_prompts_extend_a_folder(target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    run(target, tokenizer, tmp_path, prompts(3))
    assert run(target, tokenizer, tmp_path, prompts(8))["answered"] == 5


def test_folder_with_answers_made_otherwise_is_refused(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    run(target, tokenizer, tmp_path, prompts(3))
    with pytest.raises(ValueError, match="seed: 0 there, 7 now; use another folder"):
        run(target, tokenizer, tmp_path, prompts(3), seed=7)


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
    assert data.report.trained_tokens == sum(len(row["answer_ids"]) for row in answers_of(tmp_path))


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


def test_measurements_may_leave_loops_alone(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "LOOK_EVERY", 4)
    monkeypatch.setattr(slots_module, "in_a_loop", lambda tokens: True)
    run(target, tokenizer, tmp_path / "ended", prompts())
    run(target, tokenizer, tmp_path / "left", prompts(), stop_loops=False)
    ended, left = by_id(tmp_path / "ended"), by_id(tmp_path / "left")
    assert {len(row["answer_ids"]) for row in ended if row["finish_reason"] == "loop"} == {4}
    assert "loop" not in {row["finish_reason"] for row in left}
    assert select(ended, 0.5).dropped["loop"] == sum(row["finish_reason"] == "loop" for row in ended) > 0
    with pytest.raises(ValueError, match="stop_loops: False there, None now"):
        run(target, tokenizer, tmp_path / "left", prompts())


def test_prompts_stay_below_a_switch_of_rotary_embeddings(
    target: Target, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = sorted(len(render_prompt(tokenizer, row["messages"])) for row in prompts())
    monkeypatch.setattr(hf, "rope_switch", lambda model: lengths[0] + 12)
    counts = run(target, tokenizer, tmp_path, prompts())
    assert counts["answered"] == lengths.count(lengths[0]) > 0
    assert counts["too_long"] == 8 - counts["answered"]


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
