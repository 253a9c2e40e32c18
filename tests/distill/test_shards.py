"""Shards: whole or not there, one writer, nothing lost when a disk fills up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headstart.distill import shards as shards_module
from headstart.distill.select import read_answers
from headstart.distill.shards import Shards, alone_in, write_lines

HEADER = {"headstart": "answers", "version": 1, "seed": 0}


def rows(*names: str) -> list[dict]:
    return [{"id": name, "answer_ids": [1], "finish_reason": "stop"} for name in names]


def ids_in(folder: Path) -> list[str]:
    return [row["id"] for row in read_answers([folder])[1]]


def test_shard_is_written_when_enough_answers_are_waiting_and_at_the_end(tmp_path: Path) -> None:
    with Shards(tmp_path, HEADER, size=3) as shards:
        shards.add(rows("a", "b"))
        assert not list(tmp_path.iterdir())
        shards.add(rows("c", "d"))
        assert ids_in(tmp_path) == ["a", "b", "c", "d"]
        shards.add(rows("e"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["answers-00000.jsonl", "answers-00001.jsonl"]
    assert ids_in(tmp_path) == ["a", "b", "c", "d", "e"]
    assert (shards.written, Shards(tmp_path, HEADER, 3).found) == (5, set("abcde"))


def test_shard_is_written_when_answers_have_waited_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, now = Shards(tmp_path, HEADER, size=100), [1000.0]
    monkeypatch.setattr(shards_module.time, "monotonic", lambda: now[0])
    shards.add(rows("a"))
    now[0] += shards_module.SHARD_SECONDS - 1
    shards.add([])
    assert not list(tmp_path.iterdir())
    now[0] += 1
    shards.add([])
    assert ids_in(tmp_path) == ["a"]


def test_answers_that_are_waiting_are_written_when_something_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"), Shards(tmp_path, HEADER, size=9) as shards:
        shards.add(rows("a"))
        raise RuntimeError("out of memory")
    assert ids_in(tmp_path) == ["a"]


def test_half_written_shard_is_never_read_and_its_place_is_taken(tmp_path: Path) -> None:
    with Shards(tmp_path, HEADER, size=1) as shards:
        shards.add(rows("a"))
    (tmp_path / "answers-00001.jsonl.partial").write_text('{"id": "b", "answ')
    assert ids_in(tmp_path) == ["a"]
    with Shards(tmp_path, HEADER, size=1) as shards:
        assert shards.found == {"a"}
        shards.add(rows("b"))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["answers-00000.jsonl", "answers-00001.jsonl"]
    assert ids_in(tmp_path) == ["a", "b"]


def test_shards_with_other_headers_are_refused_by_what_differs(tmp_path: Path) -> None:
    with Shards(tmp_path, HEADER, size=1) as shards:
        shards.add(rows("a"))
    with pytest.raises(ValueError, match=r"answers-00000.jsonl, line 1: .* seed: 0 there, 7 now; use another folder"):
        Shards(tmp_path, {**HEADER, "seed": 7}, 1)


def test_order_of_a_write_is_file_to_disk_then_its_name_then_the_folders_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves depends on this order."""
    fsync, done = os.fsync, []

    def note(handle: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "file"
        done.append((kind, sorted(path.name for path in tmp_path.iterdir())))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    write_lines(tmp_path / "a.jsonl", [{"x": 1}])
    assert done == [("file", ["a.jsonl.partial"]), ("folder", ["a.jsonl"])]


def test_full_disk_is_told_with_the_file_and_what_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with Shards(tmp_path, HEADER, size=2) as shards:
        shards.add(rows("a", "b"))
    wanted = (
        r"answers-00001.jsonl cannot be written \(No space left on device; [\d,.]+ MB are free there\); "
        "the 2 answers in the shards before it are safe, the 1 that it was to hold are lost: make room"
    )
    with Shards(tmp_path, HEADER, size=1) as shards:
        with monkeypatch.context() as patch, pytest.raises(OSError, match=wanted):
            patch.setattr(os, "fsync", full)
            shards.add(rows("c"))
        assert [path.name for path in tmp_path.iterdir()] == ["answers-00000.jsonl"], "nothing is left of the new one"
    assert ids_in(tmp_path) == ["a", "b", "c"], "a later attempt succeeds"


def test_older_file_is_unchanged_by_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "a.jsonl", [{"x": 1}])

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.jsonl cannot be written"):
        write_lines(tmp_path / "a.jsonl", [{"x": 2}])
    assert (tmp_path / "a.jsonl").read_text() == '{"x": 1}\n'


@pytest.mark.skipif(os.name == "nt", reason="Windows locks no folders")
def test_second_writer_of_a_folder_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    with alone_in(tmp_path):
        with pytest.raises(ValueError, match="another is at work there; wait for it, or use another folder"):
            alone_in(tmp_path).__enter__()
        other = tmp_path / "other"
        other.mkdir()
        with alone_in(other):
            pass
    with alone_in(tmp_path):
        pass


def test_compressed_file_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_lines(tmp_path / name, [{"x": 1}])
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
