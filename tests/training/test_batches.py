"""Which rows stand together, and the draft vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, skip_first_batches
from torch.utils.data import BatchSampler
from transformers import PreTrainedTokenizerFast

from headstart.core.shapes import rounded_up
from headstart.distill.dataset import DatasetReport, TokenRow
from headstart.training.batches import PaddableRows, StepSampler, lockstep_batches
from headstart.training.command_line import parse
from headstart.training.start_report import plan
from headstart.training.vocabulary import choose_vocabulary

LENGTHS = [5, 90, 7, 40, 33, 2, 61, 18, 24, 70, 11, 3]


def row_of(tokens: list[int], trained_from: int = 0, name: str = "r") -> TokenRow:
    return TokenRow(name, np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= trained_from)


def test_every_row_comes_once_an_epoch() -> None:
    assert sorted(StepSampler(LENGTHS, 4, seed=0)) == list(range(len(LENGTHS)))


def test_rows_of_a_step_are_sorted_by_length() -> None:
    order = [LENGTHS[i] for i in StepSampler(LENGTHS, 4, seed=0) if isinstance(i, int)]
    assert len(order) == len(LENGTHS)
    assert all(order[b : b + 4] == sorted(order[b : b + 4], reverse=True) for b in range(0, len(order), 4))


def test_user_chooses_whether_rows_are_grouped_by_length(command: Callable[..., list[str]], capsys) -> None:
    lengths = torch.randint(1, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    step = ["--gradient_accumulation_steps", "4"]
    plans = {}
    for flags in ([], *(["--train_sampling_strategy", name] for name in ("group_by_length", "random", "sequential"))):
        args = parse("medusa", command(*step, *flags)).training
        plans[flags[-1] if flags else "default"] = plan(lengths, args).positions
    assert plans["default"] == plans["group_by_length"] < 0.9 * plans["random"]
    assert plans["sequential"] == sum(4 * rounded_up(max(lengths[i : i + 4])) for i in range(0, 64, 4))
    with pytest.raises(SystemExit):
        parse("medusa", ["--help"])
    assert "--train_sampling_strategy" in capsys.readouterr().out


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
    drawn: list[Any] = [rows[i] for i in order]
    assert [row.loss_mask.any() for row in drawn] == [True] * 12 + [False] * 3
    assert drawn[-1].id == "r2"


@pytest.mark.parametrize("packed_length", [None, 100], ids=["padded", "packed"])
@pytest.mark.parametrize("processes", [1, 2])
def test_loader_that_goes_on_within_an_epoch_goes_on_in_its_order(processes: int, packed_length: int | None) -> None:
    made = [row_of([1] * n, name=f"r{n}") for n in LENGTHS]

    def fresh() -> Any:
        rows = PaddableRows(made, DatasetReport())
        rows.sampler = StepSampler(LENGTHS, 4, 0, 2 * processes, batch_size=2, packed_length=packed_length)
        batches = BatchSampler(rows.sampler, 2, drop_last=False)  # type: ignore[arg-type]
        mine = BatchSamplerShard(batches, processes, process_index=0) if processes > 1 else batches
        return DataLoaderShard(rows, batch_sampler=mine, collate_fn=lambda batch: batch)  # type: ignore[arg-type]

    orders = []
    for epoch in (0, 1):
        whole, rest = fresh(), cast(Any, skip_first_batches(fresh(), 1))
        whole.set_epoch(epoch)
        rest.set_epoch(epoch)
        orders.append(list(whole))
        assert list(rest) == orders[-1][1:]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_evaluation_runs_in_lockstep_and_counts_every_row_once(processes: int) -> None:
    dealt = [lockstep_batches(range(1, 8), 2, p, processes) for p in range(processes)]
    assert len({len(batches) for batches in dealt}) == 1
    assert sorted(i for batches in dealt for group, counts in batches if counts for i in group) == list(range(7))


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
