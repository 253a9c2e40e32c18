"""The prompts that come with the package: counts, licences, balance, and no held-out prompt in training."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from headstart.core.prompts import normalise_row, read_jsonl
from headstart.distill.dataset import SHIPPED, shipped_prompts

PERMISSIVE = {"MIT", "Apache-2.0", "BSD-3-Clause", "CC-BY-3.0", "CC-BY-4.0", "CC0-1.0", "ODC-By-1.0"}
SHARE_ALIKE = {"CC-BY-SA-3.0", "CC-BY-SA-4.0"}
CATEGORIES = {
    "chitchat", "code", "constrained", "extraction", "instruction", "math", "multi_turn", "multi_turn_user", "qa",
    "rag", "reasoning", "rewriting", "roleplay", "short_query", "summarization", "tool_use", "translation", "writing",
}  # fmt: skip


def words(row):
    return re.findall(r"\w+", " ".join(message["content"] for message in row["messages"]).lower())


def runs(row, length=8):
    found = words(row)
    return {tuple(found[i : i + length]) for i in range(len(found) - length + 1)}


def licences(name):
    return {part for _, row in read_jsonl(SHIPPED / name) for part in row["license"].split(" AND ")}


@pytest.fixture(scope="module")
def rows():
    return shipped_prompts()


def test_there_are_enough_prompts_and_they_stay_small(rows):
    assert len(rows) >= 3000
    assert 500_000 < sum(file.stat().st_size for file in SHIPPED.iterdir() if file.suffix == ".gz") < 2_000_000
    assert max(sum(len(message["content"]) for message in row["messages"]) for row in rows) <= 3500


def test_every_row_is_a_prompt_with_all_its_fields(rows):
    for row in rows:
        assert set(row) == {"id", "source", "category", "lang", "license", "split", "messages"}
        assert normalise_row(row) == row["messages"] and row["messages"][-1]["role"] == "user"
        assert row["lang"] in ("en", "ko", "other") and row["split"] in ("train", "held_out")
    assert len({row["id"] for row in rows}) == len(rows)


def test_share_alike_rows_stand_in_a_file_of_their_own():
    assert licences("prompts.jsonl.gz") <= PERMISSIVE
    assert licences("prompts_sharealike.jsonl.gz") <= SHARE_ALIKE | {"Apache-2.0"}
    assert all(
        any(licence in row["license"] for licence in SHARE_ALIKE)
        for _, row in read_jsonl(SHIPPED / "prompts_sharealike.jsonl.gz")
    )
    assert "CC-BY-SA-4.0" in (SHIPPED / "LICENSE-sharealike.md").read_text(encoding="utf-8")
    assert not any("SA" in row["license"] for row in shipped_prompts(share_alike=False))


def test_every_source_is_listed_with_its_licence_and_count(rows):
    listed = (SHIPPED / "SOURCES.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (\w+)\*? \| (\d+) \| \d+ \| ([A-Z][\w. -]+) \|", listed, flags=re.MULTILINE)
    counted = Counter((row["source"], row["license"]) for row in rows)
    assert {(source, licence): int(count) for source, count, licence in table} == counted


def test_categories_are_balanced_in_the_whole_and_in_every_prefix(rows):
    total = Counter(row["category"] for row in rows)
    assert set(total) == CATEGORIES
    assert max(total.values()) <= 400 and sum(count < 100 for count in total.values()) <= 1
    train = shipped_prompts("train")
    share = {category: count / len(train) for category, count in Counter(row["category"] for row in train).items()}
    for size in (100, 500, 2000):
        prefix = Counter(row["category"] for row in train[:size])
        assert all(abs(prefix[category] - share[category] * size) <= 2 for category in CATEGORIES)


def test_forty_held_out_prompts_take_two_or_so_of_each_category():
    held_out = shipped_prompts("held_out")
    assert len(held_out) >= 240
    first = Counter(row["category"] for row in held_out[:40])
    assert set(first) == CATEGORIES and max(first.values()) <= 3


def test_no_held_out_prompt_is_near_a_training_prompt(rows):
    where, texts = defaultdict(set), set()
    for i, row in enumerate(rows):
        if row["split"] == "train":
            texts.add(tuple(words(row)))
            for run in runs(row):
                where[run].add(i)
    for row in rows:
        if row["split"] == "held_out":
            assert tuple(words(row)) not in texts
            shared = Counter(i for run in runs(row) for i in where.get(run, ()))
            assert not shared or max(shared.values()) <= len(runs(row)) / 2, row["id"]


def test_prompts_are_found_wherever_the_package_is_imported_from(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Path(SHIPPED).is_absolute() and shipped_prompts("held_out")
