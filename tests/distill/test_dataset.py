"""Training rows: both kinds, every container, what is dropped, what is refused, splits and batches."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import torch

from headstart.core.prompts import tokenizer_fingerprint
from headstart.core.shapes import STEP
from headstart.distill.dataset import (
    Collator,
    TokenRow,
    load_dataset,
    read_rows,
    split_held_out,
    token_frequencies,
)

CHAT = {
    "id": "c",
    "category": "math",
    "source": "made up",
    "messages": [{"role": "user", "content": "one four two"}, {"role": "assistant", "content": "six three"}],
}
ANSWER = {
    "id": "a",
    "category": "qa",
    "prompt_ids": [1, 3, 5, 2, 1, 4],
    "answer_ids": [7, 8, 2],
    "finish_reason": "stop",
}
HEADER = {"headstart": "answers", "version": 1, "target": "tiny"}


def write(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def row(id="r", length=4, trained=2):
    return TokenRow(id, np.arange(length, dtype=np.int32), np.arange(length) >= length - trained)


def test_answers_of_the_target_are_taken_as_they_are(tokenizer, tmp_path):
    (loaded,) = load_dataset(write(tmp_path / "a.jsonl", HEADER, ANSWER), tokenizer).rows
    assert loaded.input_ids.tolist() == [1, 3, 5, 2, 1, 4, 7, 8, 2]
    assert loaded.loss_mask.tolist() == [False] * 6 + [True] * 3
    assert (loaded.id, loaded.category, loaded.prompt_length) == ("a", "qa", 6)


def test_conversations_are_rendered_and_their_answers_trained(tokenizer, tmp_path):
    (loaded,) = load_dataset(write(tmp_path / "a.jsonl", CHAT), tokenizer).rows
    assert tokenizer.decode(loaded.input_ids[loaded.loss_mask]).split() == ["six", "three", "<|im_end|>"]
    assert (loaded.source, loaded.prompt_length) == ("made up", 8)


def test_report_counts_what_was_kept_and_what_was_dropped(tokenizer, tmp_path):
    unanswered = {"messages": CHAT["messages"][:1]}
    empty = {**ANSWER, "answer_ids": []}
    report = load_dataset(write(tmp_path / "a.jsonl", HEADER, CHAT, ANSWER, unanswered, empty), tokenizer).report
    assert (report.rows, report.answers, report.tokens, report.trained_tokens) == (2, 1, 11 + 9, 3 + 3)
    assert report.headers == [HEADER]
    assert list(report.dropped.values()) == [2]
    assert "2 rows (1 answers of a target, 1 conversations), 20 tokens, 6 trained; dropped 2: no trained" in str(report)


def test_reasoning_that_the_template_leaves_out_is_counted_and_the_answer_stays(tokenizer, tmp_path):
    question, answer = CHAT["messages"]
    thoughtful = {"messages": [question, {**answer, "reasoning_content": "seven"}]}
    data = load_dataset(write(tmp_path / "a.jsonl", thoughtful, CHAT), tokenizer)
    assert data.rows[0].input_ids.tolist() == data.rows[1].input_ids.tolist()
    assert data.report.left_out == 1
    assert "of 1 turns the chat template leaves out reasoning" in str(data.report)


def test_long_rows_keep_their_front_and_rows_without_a_trained_token_go(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", ANSWER, {**CHAT, "id": "short prompt"})
    dataset = load_dataset(file, tokenizer, max_length=8)
    (kept,) = dataset.rows
    assert kept.input_ids.tolist() == [1, 3, 5, 2, 1, 4, 7, 8]
    assert dataset.report.truncated == 1
    assert dict(dataset.report.dropped) == {"no trained token among the first 8 (max_length)": 1}
    assert "1 rows cut" in str(dataset.report)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_every_container_gives_the_same_rows(tokenizer, tmp_path, name):
    if name.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{**dict.fromkeys(ANSWER), **CHAT}, ANSWER]), tmp_path / name
        )
    else:
        write(tmp_path / name, CHAT, ANSWER)
    chat, answer = load_dataset(tmp_path / name, tokenizer).rows
    assert (chat.id, answer.id) == ("c", "a")
    assert answer.input_ids.tolist() == ANSWER["prompt_ids"] + ANSWER["answer_ids"]


def test_folder_of_shards_is_read_in_order_of_names_and_sources_in_order_given(tokenizer, tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write(folder / "00001.jsonl.gz", HEADER, {**ANSWER, "id": "second"})
    write(folder / "00000.jsonl", HEADER, {**ANSWER, "id": "first"})
    write(folder / "notes.txt", "not data")
    more = write(tmp_path / "more.jsonl", {**ANSWER, "id": "third"})
    assert [loaded.id for loaded in load_dataset([folder, str(more)], tokenizer)] == ["first", "second", "third"]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({**ANSWER, "answer_ids": [7, 99]}, r"`answer_ids` must lie below the tokenizer's size 64, found 99"),
        ({**ANSWER, "answer_ids": [-100, 7]}, r"`answer_ids` must lie below the tokenizer's size 64, found -100"),
        ({**ANSWER, "prompt_ids": "one"}, r"`prompt_ids` must be a list of token ids, found 'one'"),
        ({"answer_ids": [7]}, r"`prompt_ids` must be a list of token ids, found None"),
        ({"text": "one"}, r"a row must have `messages`"),
        ({"messages": [{"role": "user", "content": "one \ue8f1"}]}, r"text must be free of the characters"),
    ],
)
def test_malformed_row_is_refused_with_file_and_line(tokenizer, tmp_path, wrong, complaint):
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {complaint}"):
        load_dataset(write(tmp_path / "a.jsonl", CHAT, wrong), tokenizer)


def test_data_without_a_trained_token_is_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"must hold a row with a trained token .* found 1 dropped: no trained token"):
        load_dataset(write(tmp_path / "a.jsonl", {"messages": CHAT["messages"][:1]}), tokenizer)
    with pytest.raises(ValueError, match=r"found no row at all"):
        load_dataset(write(tmp_path / "a.jsonl"), tokenizer)


def test_answers_made_with_another_tokenizer_are_refused(tokenizer, tmp_path):
    same = {**HEADER, "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}
    assert len(load_dataset(write(tmp_path / "a.jsonl", same, ANSWER), tokenizer)) == 1
    other = {**HEADER, "tokenizer_fingerprint": "sha256:0"}
    with pytest.raises(ValueError, match=r"line 1: .* made with another \(sha256:0, target tiny\)"):
        load_dataset(write(tmp_path / "a.jsonl", other, ANSWER), tokenizer)


@pytest.mark.parametrize("name", ["answers", "no_such_file.jsonl", "folder/no_such_file.jsonl", "a/b/c"])
def test_name_that_is_no_path_and_no_hub_name_never_goes_to_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"must be a file or folder that exists, or a Hugging Face data set named"):
        next(read_rows(name))


def test_hub_name_is_read_by_the_datasets_library(monkeypatch):
    asked = []
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: asked.append((name, split)) or [CHAT])
    assert list(read_rows("owner/name")) == [("owner/name, row 1", CHAT)]
    assert asked == [("owner/name", "train")]


def test_folder_without_data_and_file_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a data folder must hold files ending in \.jsonl"):
        next(read_rows(tmp_path))
    with pytest.raises(ValueError, match=r"a data file must end in \.jsonl"):
        next(read_rows(write(tmp_path / "rows.csv")))


def test_split_depends_on_the_id_alone_and_keeps_answers_to_one_prompt_together():
    rows = [row(str(i // 2)) for i in range(400)]
    train, held_out = split_held_out(rows, 0.1)
    assert {r.id for r in train}.isdisjoint(r.id for r in held_out)
    assert 20 <= len(held_out) <= 60 and len(train) + len(held_out) == 400
    _, again = split_held_out(rows[100:300][::-1], 0.1)
    assert {r.id for r in again} == {r.id for r in held_out} & {r.id for r in rows[100:300]}


def test_split_of_a_few_rows_still_holds_one_out_and_fraction_zero_none():
    train, held_out = split_held_out([row(str(i)) for i in range(3)], 0.01)
    assert (len(train), len(held_out)) == (2, 1)
    assert split_held_out([row()], 0.5)[0] or split_held_out([row()], 0.5)[1]
    assert split_held_out([row("a"), row("b")], 0.0)[1] == []
    with pytest.raises(ValueError, match="held_out_fraction must be at least 0 and below 1, found 1"):
        split_held_out([row()], 1)


def test_token_frequencies_count_trained_tokens_only():
    counts = token_frequencies([row(length=4, trained=2), row(length=3, trained=1)], vocab_size=6)
    assert counts.tolist() == [0, 0, 2, 1, 0, 0]


def test_rows_without_ids_get_one_from_their_tokens(tokenizer, tmp_path):
    same = {key: value for key, value in ANSWER.items() if key != "id"}
    rows = load_dataset(write(tmp_path / "a.jsonl", same, same, {**same, "answer_ids": [7, 2]}), tokenizer).rows
    assert rows[0].id == rows[1].id != rows[2].id


def test_collator_pads_on_the_right_and_trains_no_padding():
    batch = Collator(pad_id=9)([row(length=4, trained=2), row(length=2, trained=1)])
    assert {name: (value.shape, value.dtype) for name, value in batch.items()} == {
        "tokens": ((2, 4), torch.long),
        "token_mask": ((2, 4), torch.bool),
        "loss_mask": ((2, 4), torch.bool),
        "positions": ((2, 4), torch.long),
    }
    assert batch["tokens"].tolist() == [[0, 1, 2, 3], [0, 1, 9, 9]]
    assert batch["token_mask"].tolist() == [[True] * 4, [True, True, False, False]]
    assert batch["loss_mask"].tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]


def test_even_batches_are_as_wide_as_others_before_them_and_stay_in_the_window() -> None:
    batch = Collator(pad_id=9, even=True)([row(length=4, trained=2), row(length=2, trained=1)])
    assert batch["tokens"].shape == (2, STEP)
    assert batch["token_mask"].sum(1).tolist() == [4, 2]
    assert int(batch["positions"].max()) == 3


def test_collated_batches_come_from_a_data_loader(tokenizer, tmp_path):
    dataset = load_dataset(write(tmp_path / "a.jsonl", CHAT, ANSWER), tokenizer)
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=2, collate_fn=Collator(tokenizer.eos_token_id))
    assert batch["tokens"].shape == (2, 11)
    assert int(batch["loss_mask"].sum()) == dataset.report.trained_tokens
