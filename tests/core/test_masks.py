"""Masks: who sees whom, from validity and positions alone."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.core.masks import block_mask, causal, within_window


def test_block_sees_the_committed_columns_and_itself_as_told() -> None:
    block = torch.tensor([[[True, False], [True, True]]])
    mask = block_mask(torch.tensor([[True, False, True]]), block)
    assert mask.tolist() == [[[True, False, True, True, False], [True, False, True, True, True]]]


def test_causal_mask_shows_earlier_tokens_and_hides_padding_from_everyone_but_itself() -> None:
    right, left = torch.tensor([[True, True, False]]), torch.tensor([[False, True, True]])
    assert causal(right).int().tolist() == [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]]
    assert causal(left).int().tolist() == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]


def test_packed_documents_do_not_see_each_other() -> None:
    mask = causal(torch.ones(1, 4, dtype=torch.bool), torch.tensor([[0, 0, 1, 1]]))
    assert mask.int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]


def test_window_counts_positions_and_not_columns() -> None:
    visible = torch.ones(1, 1, 5, dtype=torch.bool)
    positions = torch.tensor([[5, 9, 6, 8, 7]])
    assert within_window(visible, torch.tensor([[9]]), positions, 4).int().tolist() == [[[0, 1, 1, 1, 1]]]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_every_row_of_a_causal_mask_sees_itself(valid: list[bool], segments: list[int]) -> None:
    mask = causal(torch.tensor([valid]), torch.tensor([segments[: len(valid)]]))
    assert bool(mask[0].diagonal().all())
    assert not bool(mask[0].triu(1).any())
    assert bool(
        within_window(mask, torch.arange(len(valid))[None], torch.arange(len(valid))[None], 1)[0].diagonal().all()
    )
