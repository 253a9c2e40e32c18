"""The shift and the losses, on examples small enough to check by hand."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_targets import VOCAB, WIDTH, tiny_target
from torch import Tensor

from headstart.drafters.base import DraftBatch
from headstart.drafters.config import LOSSES
from headstart.drafters.losses import depth_losses, depth_targets, in_chunks, is_best, ranks_of
from headstart.drafters.modules import DraftVocabulary
from headstart.drafters.registry import METHODS, drafter_classes
from headstart.inference.target import Target
from headstart.training.arguments import texts_of

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_label_is_best_where_no_candidate_stands_above_it() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 2.0], [5.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    labels = torch.tensor([1, 2, -1, 2])
    assert is_best(logits, labels).tolist() == [True, True, False, False]


def test_labels_outside_the_vocabulary_have_no_rank() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    assert ranks_of(logits, torch.tensor([2, -1])).tolist() == [1, -1]


def plain_losses(
    batch: DraftBatch, target: Target, vocabulary: DraftVocabulary, weight: Tensor, loss: str
) -> tuple[Tensor, Tensor]:
    """Return the sums [K] of a loss over labels and depths, and the labels [K], one by one from the definitions."""
    sums, counts = [], []
    for k in range(len(weight)):
        parts = []
        for row, at in batch.loss_mask.nonzero().tolist():
            anchor = at - 2 - k
            if anchor < 0 or batch.segments[row, anchor] != batch.segments[row, at]:
                continue
            p = target.logits(batch.final[row, at - 1], vocabulary.chosen).softmax(-1)
            scores = batch.features[row, anchor, 0] @ weight[k]
            q, log_q = scores.softmax(-1), scores.log_softmax(-1)
            label = int(vocabulary.from_target(batch.tokens[row, at]))
            m = (p + q) / 2
            soft, variation = -(p * log_q).sum(), (p - q).abs().sum() / 2
            parts.append(
                {
                    "kl": soft[None],
                    "reverse_kl": (q * (log_q - p.log())).sum()[None],
                    "jsd": (p * (p / m).log() + q * (q / m).log()).sum()[None] / 2,
                    "tv": variation[None],
                    "lk": torch.stack([soft, variation]),
                    "ce": -log_q[label][None] if label >= 0 else scores.sum()[None] * 0,
                }[loss]
            )
        total = torch.stack(parts).sum(0) if parts else weight.sum()[None] * 0
        if loss == "lk" and parts:
            share = torch.exp(-3 * (1 - total[1].detach() / len(parts)))
            total = (share * total[0] + (1 - share) * total[1])[None]
        sums.append(total[0])
        counts.append(len(parts))
    return torch.stack(sums), torch.tensor(counts, dtype=torch.float32)


@pytest.mark.parametrize("loss", LOSSES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_chunked_loss_and_gradient_are_those_of_the_definitions(loss: str, data: st.DataObject) -> None:
    rows, length, depths = (data.draw(st.integers(1, most)) for most in (3, 9, 3))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    target, vocabulary = tiny_target("llama"), DraftVocabulary(data.draw(st.sampled_from([None, 20])), VOCAB)
    if vocabulary.chosen is not None:
        vocabulary.choose(torch.randperm(VOCAB, generator=draw)[:20].sort().values)
    tokens = torch.randint(VOCAB, (rows, length), generator=draw)
    trained = torch.rand(rows, length, generator=draw) < data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    segments = (torch.rand(rows, length, generator=draw) < 0.2).long().cumsum(1)
    states = torch.randn(2, rows, length, WIDTH, generator=draw, dtype=torch.float64)
    everything, positions = torch.ones_like(trained), torch.arange(length).expand(rows, -1)
    batch = DraftBatch(tokens, everything, trained, positions, segments, states[0][:, :, None], states[1])
    weight = torch.randn(depths, WIDTH, vocabulary.size, generator=draw, dtype=torch.float64) / 4
    weight.requires_grad_()
    items = data.draw(st.sampled_from([None, torch.tensor(7)]))
    positions_at_once = data.draw(st.integers(1, 80))

    def guess(k: int, rows: Tensor, anchors: Tensor) -> Tensor:
        return batch.features[rows, anchors, 0] @ weight[k]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headstart.drafters.losses.CHUNK_BYTES", 4 * vocabulary.size * depths * positions_at_once)
        out = depth_losses(batch, target, vocabulary, depths, guess, loss, 0.8, items)
        assert out.loss is not None and out.sums is not None and out.counts is not None
        (found,) = torch.autograd.grad(out.loss, weight)
    sums, counts = plain_losses(batch, target, vocabulary, weight, loss)
    divisor = max(1, int(trained.sum())) if items is None else 7
    expected = sum((0.8 ** (k + 1) * sums[k] for k in range(depths)), torch.zeros(())) / divisor
    (gradient,) = torch.autograd.grad(expected, weight)
    assert torch.equal(out.counts, counts)
    for ours, plain in ((out.sums, sums), (out.loss, expected), (found, gradient)):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_settings_of_a_drafter_tell_every_loss(method: str) -> None:
    config = drafter_classes(method)[0]
    told = texts_of(config).get("loss", "")
    assert all(f'"{loss}"' in told for loss in LOSSES) or "loss" not in inspect.signature(config.__init__).parameters


def test_comments_of_the_configurations_tell_every_loss() -> None:
    lines = [line for path in (ROOT / "configs").glob("*.yaml") for line in path.read_text("utf-8").splitlines()]
    told = [line.partition("# one of")[2].partition(":")[0] for line in lines if line.startswith("loss:")]
    assert told
    assert [re.findall(r"\w+", choices) for choices in told] == [list(LOSSES)] * len(told)


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
