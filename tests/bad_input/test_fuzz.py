"""Whatever lies in a file, its reader succeeds or raises a ValueError or OSError that names the file."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from headstart.core.tree import TreeTopology
from headstart.distill.dataset import load_dataset, read_rows
from headstart.distill.select import read_answers, select
from headstart.drafters.checkpoint import check_topology
from headstart.drafters.registry import AutoDrafter

FEW, MANY = 40, 1000
examples = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])

texts = st.text(max_size=8) | st.sampled_from(["one two", "<|im_end|>", "\ud800", "\ue8f1", "</think>", ""])
scalars = st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats() | texts
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
ids = st.lists(st.integers(0, 63), max_size=6) | values
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "bot"]) | values
tool_calls = st.lists(st.fixed_dictionaries({"function": values | st.fixed_dictionaries({"name": texts})}), max_size=2)
messages = st.fixed_dictionaries(
    {"role": roles, "content": texts | values},
    optional={"tool_calls": tool_calls | values, "reasoning_content": texts | values, "name": values},
)
turns = st.fixed_dictionaries({"from": roles, "value": texts | values})
rows = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(messages | values, max_size=4) | values,
        "conversations": st.lists(turns | values, max_size=3) | values,
        "turns": st.lists(texts | values, max_size=3) | values,
        "prompt": texts | st.lists(messages, max_size=2) | values,
        "tools": values,
        "prompt_ids": ids,
        "answer_ids": ids,
        "finish_reason": st.sampled_from(["stop", "length", "loop"]) | values,
        "headstart": st.just("answers") | values,
        "version": st.just(1) | values,
        "tokenizer_fingerprint": values,
        "id": values,
        "category": values,
    },
)
paths = st.lists(st.lists(st.integers(0, 3), max_size=3) | values, max_size=6) | values


def try_out(count: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Run a check on many examples, the same in every run."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
    run = settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=quiet)
    run(given(strategy)(check))()


def succeeds_or_names(path: Path, read: Callable[[], object]) -> None:
    """Call a reader; of what it may raise, only errors for users count, and they must name the file or folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except (ValueError, OSError) as error:
            assert type(error) is ValueError or isinstance(error, OSError), repr(error)
            assert str(path) in str(error)


@examples
def test_any_rows_in_a_file_of_data(tmp_path: Path, lid: None, count: int) -> None:
    file, tokenizer = tmp_path / "rows.jsonl", tiny_tokenizer()

    def check(found: list[Any]) -> None:
        file.write_text("\n".join(map(json.dumps, found)))
        succeeds_or_names(file, lambda: load_dataset(file, tokenizer, max_length=16))

    try_out(count, st.lists(rows | values, min_size=1, max_size=3), check)


@examples
def test_any_rows_in_a_shard_of_answers(tmp_path: Path, lid: None, count: int) -> None:
    def check(found: list[Any]) -> None:
        (tmp_path / "answers-00000.jsonl").write_text("\n".join(map(json.dumps, found)))
        succeeds_or_names(tmp_path, lambda: select(read_answers([tmp_path])[1]))

    try_out(count, st.lists(rows, max_size=3), check)


@examples
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
def test_any_bytes_in_a_file_of_data(tmp_path: Path, lid: None, name: str, count: int) -> None:
    file = tmp_path / name

    def check(content: bytes) -> None:
        file.write_bytes(content)
        succeeds_or_names(file, lambda: list(read_rows(file)))

    try_out(count, st.binary(max_size=200), check)


@examples
def test_any_damage_to_a_compressed_file(tmp_path: Path, lid: None, count: int) -> None:
    file = tmp_path / "rows.jsonl.gz"
    whole = gzip.compress(b"".join(b'{"prompt": "number %d"}\n' % i for i in range(50)), mtime=0)

    def check(damage: tuple[int, int, int]) -> None:
        file.write_bytes(damaged(whole, damage))
        succeeds_or_names(file, lambda: list(read_rows(file)))

    try_out(count, damages(len(whole)), check)


@examples
def test_any_setting_in_the_configuration_of_a_drafter(drafter_folder: Path, lid: None, count: int) -> None:
    file = drafter_folder / "config.json"
    whole = json.loads(file.read_text())
    names = st.sampled_from(sorted(whole)) | st.just("topology") | texts

    def check(changes: dict[str, Any]) -> None:
        file.write_text(json.dumps(whole | changes))
        succeeds_or_names(drafter_folder, lambda: AutoDrafter.from_pretrained(drafter_folder))

    try_out(count, st.dictionaries(names, paths | values, max_size=2), check)


@examples
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_any_damage_to_a_drafters_files(drafter_folder: Path, lid: None, name: str, count: int) -> None:
    file = drafter_folder / name
    whole = file.read_bytes()

    def check(damage: tuple[int, int, int]) -> None:
        file.write_bytes(damaged(whole, damage))
        succeeds_or_names(drafter_folder, lambda: AutoDrafter.from_pretrained(drafter_folder))

    # the front is where the header of safetensors lies
    try_out(count, damages(min(len(whole), 1200)), check)


@examples
def test_any_header_of_weights(drafter_folder: Path, lid: None, count: int) -> None:
    file = drafter_folder / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header, data = json.loads(whole[8 : 8 + size]), whole[8 + size :]
    entry = st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "F64", "I64", "BOOL", "F8_E4M3", "C64"]) | values,
            "shape": st.lists(st.integers(-1, 2**62), max_size=3) | values,
            "data_offsets": st.tuples(st.integers(-1, 2**62), st.integers(0, len(data))) | values,
        }
    )

    def check(change: tuple[str, Any, int]) -> None:
        name, value, stretch = change
        text = json.dumps(header | {name: value}).encode()
        file.write_bytes((max(len(text) + stretch, 0)).to_bytes(8, "little") + text + data)
        succeeds_or_names(drafter_folder, lambda: AutoDrafter.from_pretrained(drafter_folder))

    names = st.sampled_from(sorted(header)) | texts
    try_out(count, st.tuples(names, entry | values, st.sampled_from([0, 0, 1, -1, 2**40])), check)


@examples
def test_any_topology_is_a_tree_or_refused(count: int) -> None:
    def check(found: Any) -> None:
        try:
            check_topology({"topology": found}, "place")
        except ValueError as error:
            assert str(error).startswith("place: topology")
        else:
            assert TreeTopology.from_paths(found).num_nodes == len(found) + 1

    try_out(count, st.lists(st.lists(st.integers(-1, 4) | st.integers(), max_size=4), max_size=8), check)


def damages(size: int) -> st.SearchStrategy[tuple[int, int, int]]:
    """Return places to flip a byte at, what to flip in it (0: nothing), and how many bytes to keep."""
    return st.tuples(st.integers(0, size - 1), st.integers(0, 255), st.just(size) | st.integers(0, size))


def damaged(whole: bytes, damage: tuple[int, int, int]) -> bytes:
    """Flip bits of one byte; where fewer bytes than all are kept, cut there."""
    at, flip, kept = damage
    flipped = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
    return flipped[:kept] if flip % 2 else flipped
