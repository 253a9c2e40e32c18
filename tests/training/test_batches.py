"""Which rows stand together, and the draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from headstart.distill.dataset import DatasetReport, TokenRow
from headstart.training.batches import PaddableRows, StepSampler, lockstep_batches
from headstart.training.vocabulary import choose_vocabulary

LENGTHS = [5, 90, 7, 40, 33, 2, 61, 18, 24, 70, 11, 3]


def row_of(tokens: list[int], trained_from: int = 0, name: str = "r") -> TokenRow:
    return TokenRow(name, np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= trained_from)


def test_every_row_comes_once_an_epoch() -> None:
    assert sorted(StepSampler(LENGTHS, 4, seed=0)) == list(range(len(LENGTHS)))


def test_rows_of_a_step_are_sorted_by_length() -> None:
    order = [LENGTHS[i] for i in StepSampler(LENGTHS, 4, seed=0)]
    assert all(order[b : b + 4] == sorted(order[b : b + 4], reverse=True) for b in range(0, len(order), 4))


def test_order_depends_on_seed_and_epoch_alone() -> None:
    first, again = StepSampler(LENGTHS, 4, seed=0), StepSampler(LENGTHS, 4, seed=0)
    again.set_epoch(1)
    assert list(first) == list(first) != list(again)
    assert list(first) != list(StepSampler(LENGTHS, 4, seed=1))


def test_which_rows_make_a_step_does_not_depend_on_how_the_step_is_cut() -> None:
    # 8 rows a batch, or 2 batches of 4, or 2 processes with 4: the sampler is told 8 in every case.
    order = list(StepSampler(LENGTHS, 8, seed=3))
    assert len({*order[:8]}) == 8


@pytest.mark.parametrize("strategy", ["group_by_length", "random", "sequential"])
def test_last_round_is_filled_up_with_rows_that_train_nothing(strategy: str) -> None:
    # 12 rows for 5 processes with a batch of one each: 3 rounds, in whose last 3 processes find nothing to train.
    sampler = StepSampler(LENGTHS, 10, seed=0, rows_per_round=5, strategy=strategy)
    order = list(sampler)
    assert len(order) == len(sampler) == 15
    assert sorted(order[:12]) == list(range(12)) and order[12:] == [~LENGTHS.index(min(LENGTHS))] * 3
    rows = PaddableRows([row_of([1] * n, name=f"r{n}") for n in LENGTHS], DatasetReport())
    assert [rows[i].loss_mask.any() for i in order] == [True] * 12 + [False] * 3
    assert rows[order[-1]].id == "r2"


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_runs_in_lockstep_and_counts_every_row_once(processes: int) -> None:
    rows = [row_of([1] * n, name=f"r{n}") for n in range(1, 8)]
    dealt = [lockstep_batches(rows, 2, p, processes) for p in range(processes)]
    assert len({len(batches) for batches in dealt}) == 1
    counted = [row.id for batches in dealt for group, counts in batches if counts for row in group]
    assert sorted(counted) == sorted(row.id for row in rows)


@pytest.fixture
def tokenizer(target_folder) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(target_folder)


def test_vocabulary_holds_the_tokens_said_most_and_the_special_ones(tokenizer) -> None:
    rows = [row_of([1, 3, 30, 30, 30, 20, 20, 25, 2], trained_from=2)]
    chosen = choose_vocabulary(5, rows, rows, tokenizer, [2], 48)
    # 0, 1, 2 are <unk>, <|im_start|> and <|im_end|>; 30 and 20 are the most frequent of the rest.
    assert chosen.ids.tolist() == [0, 1, 2, 20, 30]
    assert chosen.coverage == chosen.held_out_coverage == pytest.approx(6 / 7)


def test_token_of_many_rows_goes_before_one_that_a_single_row_repeats(tokenizer) -> None:
    rows = [row_of([40, 40, 40, 40, 25, 2]), row_of([25, 33, 2]), row_of([33, 33, 2])]
    assert choose_vocabulary(5, rows, [], tokenizer, [2], 48).ids.tolist() == [0, 1, 2, 25, 33]


def test_vocabulary_larger_than_the_data_is_filled_with_small_ids(tokenizer) -> None:
    chosen = choose_vocabulary(8, [row_of([30, 2])], [], tokenizer, [2], 48)
    assert chosen.ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 30]
    assert chosen.held_out_coverage is None


@pytest.mark.parametrize("size", [0, 2, 49])
def test_vocabulary_of_an_impossible_size_is_refused(tokenizer, size: int) -> None:
    with pytest.raises(ValueError, match="draft_vocab_size must"):
        choose_vocabulary(size, [row_of([30, 2])], [], tokenizer, [2], 48)
