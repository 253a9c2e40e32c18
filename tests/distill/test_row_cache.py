"""Rows on the disk are those in memory, take no memory until they are asked for, and are never another time's."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from headstart.distill import row_cache
from headstart.distill.dataset import TokenDataset, TokenRow, load_dataset, split_held_out
from headstart.distill.row_cache import cache_folder, load_mapped
from headstart.distill.table import ROWS_PER_BATCH, RowTable, write_rows

CHAT = {"id": "c", "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "six three"}]}
HEADER = {"headstart": "answers", "version": 1, "target": "tiny"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def answers(path: Path, count: int, length: int = 9) -> Path:
    """Write rows of unlike lengths and a header; every third has a category, some have no id."""
    rows: list[dict[str, Any]] = [HEADER]
    for i in range(count):
        told = {"category": "math", "source": "s"} if i % 3 == 0 else {}
        named = {"id": f"r{i // 2}"} if i % 5 else {}
        rows.append({**named, **told, "prompt_ids": [1, 3 + i % 40, 4], "answer_ids": [5 + i % 7] * (length + i % 4)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def kept() -> list[Path]:
    """Return what lies in the cache but for locks."""
    return [path for path in cache_folder().iterdir() if path.suffix != ".lock"]


def same(found: Sequence[TokenRow], wanted: Sequence[TokenRow]) -> bool:
    def content(row: TokenRow) -> tuple:
        arrays = [(part.tolist(), part.dtype) for part in (row.input_ids, row.loss_mask)]
        return row.id, arrays, row.category, row.source, row.prompt_length

    return [content(row) for row in found] == [content(row) for row in wanted]


def test_rows_on_the_disk_are_those_in_memory(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    data = answers(tmp_path / "a.jsonl", 3 * ROWS_PER_BATCH + 5)
    more = tmp_path / "b.jsonl"
    more.write_text(json.dumps(CHAT) + "\n" + json.dumps({"messages": CHAT["messages"][:1]}) + "\n", encoding="utf-8")
    wanted = load_dataset([data, more], tokenizer, max_length=11)
    found, told = load_mapped([str(data), str(more)], tokenizer, 11)
    assert "written in" in told and isinstance(found.rows, RowTable)
    assert len(found) == len(wanted) and same(found.rows, wanted.rows)
    assert found.report == wanted.report and found.report.truncated and found.report.dropped
    assert list(found.lengths) == wanted.lengths
    assert list(found.rows.ids()) == [row.id for row in wanted.rows]
    assert same(found.rows[3:700:50], wanted.rows[3:700:50])
    assert found.rows[-1].id == wanted.rows[-1].id
    with pytest.raises(IndexError):
        found.rows[len(wanted)]


@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.3])
def test_rows_on_the_disk_are_split_as_those_in_memory(tokenizer, tmp_path: Path, fraction: float) -> None:
    data = answers(tmp_path / "a.jsonl", 200)
    parts = split_held_out(load_mapped([str(data)], tokenizer)[0].rows, fraction)
    for found, wanted in zip(parts, split_held_out(load_dataset(data, tokenizer).rows, fraction), strict=True):
        assert isinstance(found, RowTable) and same(found, wanted)
        assert same(pickle.loads(pickle.dumps(found)), wanted), "as data-loading processes get it"


def test_second_time_the_rows_are_found_and_not_made(tokenizer, tmp_path: Path, monkeypatch) -> None:
    data = answers(tmp_path / "a.jsonl", 20)
    first, _ = load_mapped([str(data)], tokenizer)
    monkeypatch.setattr(row_cache, "token_rows", None)
    second, told = load_mapped([str(data)], tokenizer)
    assert "found in" in told and same(second.rows, first.rows) and second.report == first.report


def test_whatever_decides_the_rows_makes_them_anew(tokenizer, tmp_path: Path, monkeypatch) -> None:
    data = answers(tmp_path / "a.jsonl", 20)
    ways: list[Callable[[], tuple[TokenDataset, str]]] = [
        lambda: load_mapped([str(data)], tokenizer),
        lambda: load_mapped([str(data)], tokenizer, 8),
        lambda: load_mapped([str(data)], tokenizer, 8, "last"),
        lambda: load_mapped([str(answers(data, 21))], tokenizer),
    ]
    assert all("written in" in way()[1] for way in ways)
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + " ")
    assert "written in" in load_mapped([str(data)], tokenizer)[1]
    other = tmp_path / "code.py"
    other.write_text("changed", encoding="utf-8")
    monkeypatch.setattr(row_cache.dataset, "__file__", str(other))
    assert "written in" in load_mapped([str(data)], tokenizer)[1]


def test_rows_that_cannot_be_made_leave_nothing(tokenizer, tmp_path: Path) -> None:
    data = answers(tmp_path / "a.jsonl", 2 * ROWS_PER_BATCH)
    with data.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt_ids": [1], "answer_ids": [99_999]}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 514: `answer_ids` must lie below"):
        load_mapped([str(data)], tokenizer)
    assert kept() == []


def test_process_that_is_beaten_to_it_takes_the_others_rows(tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(row_cache, "locked", lambda *_, **__: nullcontext())  # as on a file system without locks
    data = answers(tmp_path / "a.jsonl", 20)
    make = row_cache.token_rows

    def beaten(*args: Any) -> Iterator[TokenRow]:
        monkeypatch.setattr(row_cache, "token_rows", make)
        load_mapped([str(data)], tokenizer)
        yield from make(*args)

    monkeypatch.setattr(row_cache, "token_rows", beaten)
    found, _ = load_mapped([str(data)], tokenizer)
    assert len(found) == 20 and len(kept()) == 1


def test_folder_that_cannot_be_written_is_named_with_what_to_do(tokenizer, tmp_path: Path, monkeypatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_cache, "write_rows", full)
    with pytest.raises(OSError, match=r"cannot be written .*No space left.*HF_DATASETS_CACHE"):
        load_mapped([str(answers(tmp_path / "a.jsonl", 20))], tokenizer)
    assert kept() == []


def test_data_set_of_the_hub_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="streaming reads data files and folders of them, but owner/name is none"):
        load_mapped(["owner/name"], tokenizer)


def made(count: int) -> Iterator[TokenRow]:
    for i in range(count):
        yield TokenRow(f"r{i}", np.full(1000 + i % 7, i % 50, dtype=np.int32), np.ones(1000 + i % 7, dtype=bool))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    peaks = []
    for count in (4 * ROWS_PER_BATCH, 16 * ROWS_PER_BATCH):  # 5 and 20 MB of tokens and masks
        tracemalloc.start()
        write_rows(made(count), tmp_path / str(count))
        rows = RowTable(tmp_path / str(count))
        train, held_out = split_held_out(rows, 0.1)
        assert sum(len(row.input_ids) for part in (train, held_out) for row in part) == sum(rows.lengths)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 200 * 12 * ROWS_PER_BATCH, "bytes for each row more"


def test_of_several_at_once_one_makes_the_rows_and_the_others_wait(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, made, at_work, may_go_on = answers(tmp_path / "a.jsonl", 7), [], Event(), Event()
    own = row_cache.token_rows

    def slow(*args: Any) -> Iterator[TokenRow]:
        made.append(args)
        at_work.set()
        may_go_on.wait()
        yield from own(*args)

    monkeypatch.setattr(row_cache, "token_rows", slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(load_mapped, [str(data)], tokenizer)
        at_work.wait()
        others = [pool.submit(load_mapped, [str(data)], tokenizer) for _ in range(2)]
        assert not any(wait([first, *others], timeout=0.5).done)
        may_go_on.set()
    told = [one.result()[1] for one in (first, *others)]
    assert len(made) == 1 and "written in" in told[0] and all("found in" in one for one in told[1:])
    assert all(same(one.result()[0].rows, first.result()[0].rows) for one in others)
