"""The shift and the losses, on examples small enough to check by hand."""

from __future__ import annotations

import pytest
import torch

from headstart.drafters.losses import (
    depth_targets,
    hard_cross_entropy,
    in_chunks,
    is_best,
    ranks_of,
    soft_cross_entropy,
)
from headstart.drafters.modules import DraftVocabulary


def test_labels_are_answer_tokens_and_the_first_one_is_trained() -> None:
    """Six tokens, the answer is 3, 4, 5: depth 1 guesses them from 1, 2, 3; depth 2 from 0, 1, 2."""
    mask = torch.tensor([[False, False, False, True, True, True]])
    segments = torch.zeros(1, 6, dtype=torch.long)
    for depth, anchors in ((0, [2, 3, 4]), (1, [1, 2, 3]), (2, [0, 1, 2])):
        found = depth_targets(mask, segments, depth)
        assert found.labels_at.tolist() == [3, 4, 5]
        assert found.anchors.tolist() == anchors
        assert found.present.all()


def test_labels_too_early_in_the_row_have_no_anchor() -> None:
    found = depth_targets(torch.tensor([[True, True, True, True]]), torch.zeros(1, 4, dtype=torch.long), 2)
    assert found.present.tolist() == [False, False, False, True]
    assert found.anchors[3] == 0


def test_labels_of_another_document_have_no_anchor() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]])
    found = depth_targets(torch.ones(1, 6, dtype=torch.bool), segments, 1)
    assert found.labels_at[found.present].tolist() == [2, 5]


def test_soft_cross_entropy_is_least_where_the_drafter_has_the_targets_law() -> None:
    law = torch.tensor([[0.5, 0.3, 0.2]])
    at_law = soft_cross_entropy(law.log(), law)
    torch.testing.assert_close(at_law, -(law * law.log()).sum(-1))
    assert float(soft_cross_entropy(torch.zeros(1, 3), law)) > float(at_law)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_cross_entropy_and_its_gradient_are_those_of_the_plain_formula(dtype: torch.dtype) -> None:
    scores = (torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 9).to(dtype).requires_grad_()
    law = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).softmax(-1)
    weights = torch.arange(5.0)
    plain = -(law * scores.float().log_softmax(-1)).sum(-1)
    ours = soft_cross_entropy(scores, law)
    torch.testing.assert_close(ours, plain)
    (expected,) = torch.autograd.grad((plain * weights).sum(), scores)
    (found,) = torch.autograd.grad((ours * weights).sum(), scores)
    torch.testing.assert_close(found, expected)


def test_a_label_is_best_where_no_candidate_stands_above_it() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 2.0], [5.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    labels = torch.tensor([1, 2, -1, 2])
    assert is_best(logits, labels).tolist() == [True, True, False, False]


def test_labels_outside_the_vocabulary_cost_nothing_and_have_no_rank() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    labels = torch.tensor([2, -1])
    assert float(hard_cross_entropy(logits, labels)[1]) == 0.0
    assert ranks_of(logits, labels).tolist() == [1, -1]


def test_chunks_add_up_and_an_empty_input_still_makes_one_call() -> None:
    calls = []

    def total(x: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(len(x))
        return (x.sum(),)

    assert float(in_chunks(total, 4, torch.arange(10.0))[0]) == 45.0
    assert calls == [4, 4, 2]
    assert float(in_chunks(total, 4, torch.arange(0.0))[0]) == 0.0
    assert calls[-1] == 0


def test_draft_vocabulary_maps_there_and_back() -> None:
    vocabulary = DraftVocabulary(4, 60)
    vocabulary.choose(torch.tensor([5, 9, 10, 50]))
    assert vocabulary.to_target(torch.tensor([0, 3])).tolist() == [5, 50]
    assert vocabulary.from_target(torch.tensor([50, 9, 11, 0, 59])).tolist() == [3, 1, -1, -1, -1]
    assert vocabulary.chosen is vocabulary.ids
    assert DraftVocabulary(None, 60).chosen is None


@pytest.mark.parametrize("size", [0, 61])
def test_draft_vocabulary_of_an_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="between 1 and V=60"):
        DraftVocabulary(size, 60)
