"""A folder of shards that survives a killed process: every file is whole or not there, no answer is lost or repeated.

Knows files, not how answers are made.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..core.prompts import read_jsonl

SHARD_SECONDS = 60.0
"""Finished answers wait no longer than this for a shard to fill up."""


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write a .jsonl or .jsonl.gz file whole or not at all: to a temporary name, flushed to disk, then renamed.

    Raises OSError naming the file when it cannot be written; then nothing is left of it, and an older one is unchanged.
    """
    temporary = path.with_name(path.name + ".partial")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    try:
        with temporary.open("wb") as file:
            # without a time stamp, so that the same rows give the same bytes
            file.write(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_names(path.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written ({error.strerror or error}; {_free(path.parent)})") from error


class Shards:
    """Answers waiting to be written, and the folder they go into; leaving the block writes what is waiting.

    size: answers that make a shard. Raises ValueError for a folder with answers made otherwise, and when another
    process is writing there.

    found: ids answered in the folder already. written: answers written since.
    """

    def __init__(self, folder: Path, header: dict[str, Any], size: int) -> None:
        self.folder, self.header, self.size = folder, header, size
        self.found: set[str] = set()
        self.written = 0
        self._waiting: list[dict[str, Any]] = []
        self._failed = False
        self._since = time.monotonic()
        paths = sorted(folder.glob("answers-*.jsonl"))
        for path in paths:
            self._read(path)
        self._number = 1 + max((int(path.stem.split("-")[1]) for path in paths), default=-1)
        for leftover in folder.glob("answers-*.partial"):
            leftover.unlink()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not self._failed:  # a second attempt would only raise again
            self.flush()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take finished answers; write a shard when enough are waiting, or when they have waited long enough."""
        if rows and not self._waiting:
            self._since = time.monotonic()
        self._waiting += rows
        if len(self._waiting) >= self.size or time.monotonic() - self._since >= SHARD_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what is waiting. Raises OSError saying what is safe when the disk takes no more."""
        if not self._waiting:
            return
        try:
            write_lines(self.folder / f"answers-{self._number:05d}.jsonl", [self.header, *self._waiting])
        except OSError as error:
            self._failed = True
            raise OSError(
                f"{error}; the {len(self.found) + self.written} answers in the shards before it are safe, the "
                f"{len(self._waiting)} that it was to hold are lost: make room, and the same command goes on from there"
            ) from error
        self._number += 1
        self.written += len(self._waiting)
        self._waiting = []

    def _read(self, path: Path) -> None:
        for place, row in read_jsonl(path):
            if "headstart" not in row:
                self.found.add(row["id"])
                continue
            keys = {**self.header, **row}
            told = ", ".join(
                f"{key}: {row.get(key)!r} there, {self.header.get(key)!r} now"
                for key in keys
                if row.get(key) != self.header.get(key)
            )
            if told:
                raise ValueError(
                    f"{place}: answers in one folder must be made alike, but differ in {told}; use another folder"
                )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder to write there; the system lets go of it when the process ends, however it ends.

    Raises ValueError when another process holds it: the two would answer the same prompts and write the same names.
    """
    refusal = (
        f"{folder} must be written by one process, but another is at work there; wait for it, or use another folder"
    )
    with locked(folder, alone=True, refusal=refusal):
        yield


@contextmanager
def locked(folder: Path, alone: bool, refusal: str | None) -> Iterator[bool]:
    """Hold the folder for this process, alone or beside others who do not ask to be; yield whether the system can.

    When another process holds it otherwise, raises ValueError with the words of `refusal`; None: waits for it.
    """
    if sys.platform == "win32":
        yield False
        return
    import fcntl

    handle, can = os.open(folder, os.O_RDONLY), True
    try:
        try:
            how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            fcntl.flock(handle, how if refusal is None else how | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(refusal) from None
        except OSError:
            can = False  # a file system without locks
        yield can
    finally:
        if can:
            fcntl.flock(handle, fcntl.LOCK_UN)  # workers that were forked have the handle too
        os.close(handle)


def sync_names(folder: Path) -> None:
    """Wait until a folder's list of names is on the disk; Windows opens no folders, and keeps their lists by itself."""
    if sys.platform == "win32":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free there"
    except OSError:
        return "its disk cannot be asked for its free space"
