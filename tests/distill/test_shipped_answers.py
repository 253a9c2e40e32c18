"""The answers that come with the package: the target's own, enough of them, none to a held-out prompt, no loops."""

from __future__ import annotations

from collections import Counter

import pytest

from headstart.core.prompts import read_jsonl
from headstart.distill.dataset import SHIPPED, shipped_prompts
from headstart.distill.select import LOOP_BELOW, distinct_share

FILES = {
    "smollm2_answers.jsonl.gz": "prompts.jsonl.gz",
    "smollm2_answers_sharealike.jsonl.gz": "prompts_sharealike.jsonl.gz",
    "smollm2_more_answers.jsonl.gz": "prompts.jsonl.gz",
    "smollm2_more_answers_sharealike.jsonl.gz": "prompts_sharealike.jsonl.gz",
}


def answers(name: str) -> list[dict]:
    return [row for _, row in read_jsonl(SHIPPED / name) if "headstart" not in row]


def test_there_are_at_least_300_000_answer_tokens_and_no_prompt_is_answered_twice() -> None:
    rows = [row for name in FILES for row in answers(name)]
    assert sum(len(row["answer_ids"]) for row in rows) >= 300_000
    assert len({row["id"] for row in rows}) == len(rows)


def test_there_are_at_least_100_000_answer_tokens_outside_the_share_alike_file() -> None:
    assert sum(len(row["answer_ids"]) for row in answers("smollm2_answers.jsonl.gz")) >= 100_000


@pytest.mark.parametrize("name", FILES)
def test_every_answer_belongs_to_a_training_prompt_of_the_file_under_the_same_licence(name: str) -> None:
    prompts = {row["id"]: row for _, row in read_jsonl(SHIPPED / FILES[name])}
    for row in answers(name):
        prompt = prompts[row["id"]]
        assert prompt["split"] == "train"
        assert (row["messages"], row["license"]) == (prompt["messages"], prompt["license"])


@pytest.mark.parametrize("name", FILES)
def test_answers_tell_how_they_were_made(name: str) -> None:
    _, header = next(iter(read_jsonl(SHIPPED / name)))
    assert (header["max_new_tokens"], header["temperatures"]) == (512, [0.0, 0.8])
    kept = answers(name)
    assert header["selection"]["kept_rows"] == len(kept)
    assert header["selection"]["kept_tokens"] == sum(len(row["answer_ids"]) for row in kept)
    for row in kept:
        assert row["dtype"] == "bfloat16"
        assert row["temperature"] in (0.0, 0.8)
        assert isinstance(row["seed"], int)


@pytest.mark.parametrize("name", FILES)
def test_finished_answers_end_cut_ones_are_few_and_none_is_a_loop(name: str) -> None:
    rows = answers(name)
    reasons = Counter(row["finish_reason"] for row in rows)
    assert set(reasons) == {"stop", "length"}
    assert reasons["length"] <= 0.1 * len(rows)
    for row in rows:
        ids = row["answer_ids"]
        assert (ids[-1] == 2) == (row["finish_reason"] == "stop")
        assert 2 not in ids[:-1]
        assert len(ids) <= 512
        assert distinct_share(ids) >= LOOP_BELOW


def test_every_category_has_answers() -> None:
    seen = Counter(row["category"] for name in FILES for row in answers(name))
    assert set(seen) == {row["category"] for row in shipped_prompts()}
