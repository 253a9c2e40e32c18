"""RaggedCache against a list of what each row has committed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_targets import layers_of
from torch import Tensor

from headstart.core import kv_cache
from headstart.core.kv_cache import RaggedCache

LAYERS, HEADS, WIDTH = 2, 3, 4


@dataclass
class Twin:
    """A cache and, beside it, the numbers that each row should hold: one per committed token."""

    rows: int
    cache: RaggedCache = field(init=False)
    held: list[list[int]] = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.cache = RaggedCache(self.rows, torch.device("cpu"))
        self.held = [[] for _ in range(self.rows)]

    def run(self, nodes: int) -> Tensor:
        """Write a block of new numbers as a model's layers would; return them [B, N]."""
        numbers = self.count + torch.arange(self.rows * nodes).view(self.rows, nodes)
        self.count += self.rows * nodes
        for layer in range(LAYERS):
            keys, values = self.cache.kv.update(*states_of(numbers, layer), layer)
            assert keys.shape == (self.rows, HEADS, self.cache.columns + nodes, WIDTH)
            assert values.shape == (self.rows, HEADS, self.cache.columns + nodes, WIDTH + 1)
        return numbers

    def commit(self, nodes: int, paths: list[list[int]]) -> None:
        numbers = self.run(nodes)
        longest = max(1, *(len(path) for path in paths))
        padded = torch.tensor([path + [nodes + 7] * (longest - len(path)) for path in paths])
        self.cache.commit(padded, torch.tensor([len(path) for path in paths]))
        for row, path in enumerate(paths):
            self.held[row] += numbers[row, path].tolist()

    def check(self) -> None:
        cache = self.cache
        assert cache.batch_size == self.rows and cache.columns == cache.valid.shape[1]
        assert cache.lengths.tolist() == [len(row) for row in self.held] == cache.valid.sum(1).tolist()
        for row, numbers in enumerate(self.held):
            columns = cache.valid[row]
            assert cache.positions[row, columns].tolist() == list(range(len(numbers)))
            for index, layer in enumerate(layers_of(cache)):
                assert layer.keys.shape[2] == layer.values.shape[2] == cache.columns
                keys, values = states_of(torch.tensor([numbers]), index)
                assert torch.equal(layer.keys[row][:, columns], keys[0])
                assert torch.equal(layer.values[row][:, columns], values[0])


def states_of(numbers: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return keys [B, heads, N, width] and wider values that tell number, layer, head and side apart."""
    states = numbers[:, None, :, None] * 1000.0 + torch.arange(HEADS)[:, None, None] + layer * 10
    return states.expand(-1, -1, -1, WIDTH) + 0.25, states.expand(-1, -1, -1, WIDTH + 1) + 0.5


def test_commit_keeps_each_rows_path_and_marks_the_padding_invalid() -> None:
    twin = Twin(2)
    twin.commit(3, [[0, 1, 2], [0]])
    twin.commit(6, [[0, 1, 5], [0, 2]])
    twin.check()
    assert twin.cache.valid.int().tolist() == [[1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 0]]
    assert twin.cache.positions[1, [0, 3, 4]].tolist() == [0, 1, 2]


def test_row_that_takes_no_part_keeps_what_it_has() -> None:
    twin = Twin(2)
    twin.commit(3, [[0, 1], [0, 1, 2]])
    twin.commit(2, [[], [0]])
    twin.check()
    assert twin.cache.lengths.tolist() == [2, 4]


def test_single_row_has_no_holes_and_never_compacts() -> None:
    twin = Twin(1)
    for path in ([0, 2, 3], [0], [0, 1]):
        twin.commit(4, [path])
        twin.check()
    assert bool(twin.cache.valid.all()) and not twin.cache.compact()


def test_dropped_block_leaves_no_trace() -> None:
    twin = Twin(2)
    twin.commit(2, [[0, 1], [0]])
    twin.run(5)
    twin.cache.drop_block()
    twin.check()
    twin.commit(3, [[0, 2], [0, 1]])
    twin.check()


def test_compact_removes_holes_only_below_its_threshold() -> None:
    twin = Twin(2)
    twin.commit(4, [[0, 1, 2], [0]])
    twin.commit(4, [[0], [0, 1, 3]])
    assert twin.cache.columns == 6
    assert not twin.cache.compact(4 / 6)
    assert twin.cache.compact(0.7)
    assert twin.cache.columns == 4
    twin.check()
    assert not twin.cache.compact()


def test_taken_rows_come_in_the_wanted_order() -> None:
    twin = Twin(3)
    twin.commit(3, [[0], [0, 1, 2], [0, 2]])
    twin.cache.take_rows(torch.tensor([2, 0]))
    twin.rows, twin.held = 2, [twin.held[2], twin.held[0]]
    twin.check()
    twin.commit(2, [[0, 1], [0]])
    twin.check()


@pytest.mark.parametrize("spare", [1, 3])
def test_buffers_grow_without_losing_anything(monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    monkeypatch.setattr(kv_cache, "SPARE_COLUMNS", spare)
    twin = Twin(2)
    for step in range(12):
        twin.commit(5, [[0, 1 + step % 4], [0]])
        twin.check()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["commit", "commit", "drop", "compact", "take"]), st.integers(0, 10**6)), max_size=12
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 4), ACTIONS)
def test_any_history_leaves_exactly_the_committed_tokens(rows: int, actions: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "SPARE_COLUMNS", 2)
        twin = Twin(rows)
        twin.commit(3, [[0, 1, 2][: 1 + row % 3] if rows > 1 else [0, 1, 2] for row in range(rows)])
        for action, number in actions:
            choose = torch.Generator().manual_seed(number)
            if action == "commit":
                nodes = 1 + number % 5
                lengths = torch.randint(0 if twin.rows > 1 else 1, nodes + 1, (twin.rows,), generator=choose).tolist()
                order = [torch.randperm(nodes, generator=choose)[:n].sort().values.tolist() for n in lengths]
                twin.commit(nodes, order)
            elif action == "drop":
                twin.run(1 + number % 4)
                twin.cache.drop_block()
            elif action == "compact":
                twin.cache.compact((number % 5) / 4)
            else:
                kept = torch.randperm(twin.rows, generator=choose)[: 1 + number % twin.rows]
                twin.cache.take_rows(kept)
                twin.rows, twin.held = len(kept), [twin.held[row] for row in kept.tolist()]
            twin.check()
