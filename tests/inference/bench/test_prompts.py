import gzip
import json
from collections import Counter

import pytest

from headstart.inference.bench.prompts import (
    BenchPrompt,
    in_batches,
    in_turn,
    label,
    prompts_from_file,
    prompts_from_rows,
    shipped_held_out,
)


def rows(*categories):
    return [{"id": f"{c}{i}", "category": c, "turns": [f"w{5 + i}"]} for i, c in enumerate(categories)]


def test_each_kind_has_its_turn_and_keeps_its_order():
    assert in_turn(["a1", "a2", "a3", "b1", "c1", "b2"], lambda item: item[0]) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_prompts_are_balanced_over_categories(words):
    found = prompts_from_rows(rows("a", "a", "a", "a", "b", "c"), "rows", words, 4, None)
    assert [prompt.id for prompt in found.prompts] == ["a0", "b4", "c5", "a1"]
    assert found.to_dict()["categories"] == {"a": 2, "b": 1, "c": 1}


def test_rows_without_categories_are_taken_in_order(words):
    found = prompts_from_rows([{"prompt": "one"}, {"prompt": "two"}, {"prompt": "three"}], "rows", words, 2, None)
    assert [prompt.id for prompt in found.prompts] == ["prompt 1", "prompt 2"]


def test_first_of_several_turns_is_the_prompt(words):
    found = prompts_from_rows([{"turns": ["one two", "three"]}], "rows", words, 1, None)
    assert words.decode(found.prompts[0].ids) == "<|im_start|> user one two <|im_end|> <|im_start|> assistant"


def test_answer_that_closes_a_conversation_is_left_out(words):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    found = prompts_from_rows([{"messages": messages}], "rows", words, 1, None)
    assert "two" not in words.decode(found.prompts[0].ids)


def test_prompt_that_leaves_no_room_is_skipped_and_counted(words):
    long = {"id": "long", "turns": ["one " * 50]}
    found = prompts_from_rows([long, *rows("")], "rows", words, 2, 20)
    assert [prompt.id for prompt in found.prompts] == ["0"] and found.skipped == 1
    with pytest.raises(ValueError, match="all 1 are too long for the target's window"):
        prompts_from_rows([long], "rows", words, 2, 20)


def test_file_is_named_with_its_hash_and_errors_name_the_line(words, tmp_path):
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"turns": ["one"]}\n'))
    found = prompts_from_file(file, words, 5, None).to_dict()
    assert len(found["sha256"]) == len(found["tokens_sha256"]) == 64 and found["num_prompts"] == 1
    file.write_bytes(gzip.compress(b'{"turns": ["one"]}\n{"question": "one"}\n'))
    with pytest.raises(ValueError, match="line 2"):
        prompts_from_file(file, words, 5, None)
    with pytest.raises(ValueError, match="exists"):
        prompts_from_file(tmp_path / "none.jsonl", words, 5, None)


def test_empty_file_is_refused(words, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="there is none"):
        prompts_from_file(tmp_path / "prompts.jsonl", words, 5, None)


def test_shipped_prompts_are_the_held_out_ones_of_every_category():
    shipped = list(shipped_held_out())
    assert len(shipped) == 261 and {row["split"] for row in shipped} == {"held_out"}
    first = Counter(row["category"] for row in in_turn(shipped, lambda row: row["category"])[:40])
    assert len(first) == 18 and max(first.values()) - min(first.values()) <= 1


def test_hash_of_the_tokens_changes_with_the_template(words):
    import copy

    other = copy.deepcopy(words)
    other.chat_template = words.chat_template.replace("assistant", "user")
    hashes = {prompts_from_rows(rows("a"), "rows", one, 1, None).tokens_sha256 for one in (words, other)}
    assert len(hashes) == 2


def test_batches_keep_a_category_together():
    prompts = [BenchPrompt(str(i), kind, lang, [1]) for i, (kind, lang) in enumerate(["ax", "by", "ay", "by", "ax"])]
    batches = in_batches(prompts, 2)
    assert [[prompt.id for prompt in batch] for batch in batches] == [["0", "2"], ["4", "1"], ["3"]]
    assert [label(batch, "category") for batch in batches] == ["a", "mixed", "b"]
    assert [label(batch, "lang") for batch in batches] == ["mixed", "mixed", "y"]
    assert in_batches(prompts, 1) == [[prompt] for prompt in prompts]


def test_report_of_prompts_is_json(prompt_set):
    assert json.loads(json.dumps(prompt_set.to_dict()))["ids"] == ["p0", "p1", "p2", "p3"]
