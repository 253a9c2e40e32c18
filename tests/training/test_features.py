"""Features kept in memory are those that would be made anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from headstart.distill.dataset import Collator, TokenRow, load_dataset
from headstart.inference.loading import load_target
from headstart.inference.target import Target, TargetOutput
from headstart.training.features import FeatureSource, KeyedCollator

LAYERS = [("final",), (0, "final"), (1, 0), ("final", 1, "final")]


class CountingTarget(Target):
    """Counts the rows it reads."""

    rows_read = 0

    def encode(self, tokens: torch.Tensor, *args, **kwargs) -> TargetOutput:
        self.rows_read += len(tokens)
        return super().encode(tokens, *args, **kwargs)


@pytest.fixture
def counting(target_folder: Path) -> CountingTarget:
    return CountingTarget(load_target(str(target_folder), "float64")[0])


@pytest.fixture
def rows(target_folder: Path, answers_file: Path) -> Sequence[TokenRow]:
    return load_dataset(answers_file, load_target(str(target_folder))[1]).rows


@pytest.mark.parametrize("layers", LAYERS, ids=str)
def test_kept_features_equal_fresh_ones_in_any_company(counting: CountingTarget, rows, layers) -> None:
    collate = KeyedCollator(Collator(2))
    kept, fresh = FeatureSource(counting, layers, 10**9), FeatureSource(counting, layers)
    for company in ([0, 1, 2], [2, 5], [5, 0, 7, 1], [1]):
        inputs = collate([rows[i] for i in company])
        got, wanted = kept(inputs), fresh(inputs)
        real = got.token_mask
        assert got.features.shape == wanted.features.shape == (*real.shape, len(layers), counting.width)
        torch.testing.assert_close(got.features[real], wanted.features[real], rtol=0, atol=1e-12)
        torch.testing.assert_close(got.final[real], wanted.final[real], rtol=0, atol=1e-12)


def test_kept_features_do_not_depend_on_company_or_on_what_is_kept_to_the_bit(target_folder: Path, rows) -> None:
    target = Target(load_target(str(target_folder), "float32")[0])
    collate, small = KeyedCollator(Collator(2)), len(rows[0].input_ids) * target.width * 4
    one, other, little = (FeatureSource(target, ("final",), size) for size in (10**9, 10**9, small))
    one(collate(rows[:8]))
    other(collate([rows[3]]))
    little(collate([rows[0], rows[9]]))
    inputs = collate([rows[i] for i in (3, 9, 0)])
    found = [source(inputs).final for source in (one, other, little)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_target_reads_a_kept_row_once(counting: CountingTarget, rows) -> None:
    source, collate = FeatureSource(counting, ("final",), 10**9), KeyedCollator(Collator(2))
    for company in ([0, 1], [1, 2], [0, 2]):
        source(collate([rows[i] for i in company]))
    assert counting.rows_read == 3


def test_rows_beyond_the_memory_given_are_made_anew(counting: CountingTarget, rows) -> None:
    one_row = len(rows[0].input_ids) * counting.width * 8
    source, collate = FeatureSource(counting, ("final",), one_row), KeyedCollator(Collator(2))
    for _ in range(3):
        source(collate(rows[:2]))
    assert source.bytes <= one_row
    assert counting.rows_read == 2 + 1 + 1


def test_features_are_the_layers_asked_for_in_their_order(counting: CountingTarget, rows) -> None:
    inputs = KeyedCollator(Collator(2))(rows[:2])
    batch = FeatureSource(counting, (1, "final", 0))(inputs)
    out = counting.encode(inputs["tokens"], inputs["token_mask"], (1, "final", 0), inputs["positions"])
    assert torch.equal(batch.features, out.features)
    assert torch.equal(batch.final, out.final)
