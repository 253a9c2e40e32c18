"""Medusa's own promises: what each head is trained on, where it starts, and that training and serving agree."""

from __future__ import annotations

import pytest
import torch
from tiny_batches import batch_of, scrambled
from tiny_targets import VOCAB, WIDTH, prompts_of, tiny_target

from headstart.core.tree import TreeTopology
from headstart.drafters.base import DraftBatch
from headstart.drafters.medusa import DEFAULT_TOPOLOGY, MedusaConfig, MedusaDrafter
from headstart.drafters.modules import normalise
from headstart.drafters.registry import new_drafter
from headstart.inference.target import Target


def medusa(target: Target, **settings) -> MedusaDrafter:
    drafter = new_drafter("medusa", target, settings.pop("draft_vocabulary", None), **settings)
    assert isinstance(drafter, MedusaDrafter)
    return drafter.double()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-window", "opt"])
def test_fresh_head_says_what_the_language_model_head_says(family: str) -> None:
    target = tiny_target(family)
    drafter = medusa(target, num_heads=2)
    tokens = torch.tensor([prompts_of(9)[0]])
    final = target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final[0]
    with torch.no_grad():
        guessed = drafter._head(1, normalise(final), target)
    assert torch.equal(guessed.argmax(-1), target.logits(final).argmax(-1))


def test_head_k_learns_the_token_k_plus_one_ahead_of_what_it_has_read(target: Target) -> None:
    """Rows count up by one, the mask is everything: head k at a position that read x must say x + 1 + k."""
    drafter = medusa(target, num_heads=3, loss="ce").train()
    tokens = (torch.arange(30)[None] + torch.arange(30)[:, None]) % VOCAB
    everything = torch.ones_like(tokens, dtype=torch.bool)
    one_hot = torch.nn.functional.one_hot(tokens % WIDTH, WIDTH).double()
    positions = torch.arange(30).expand(30, -1)
    batch = DraftBatch(
        tokens % WIDTH, everything, everything, positions, torch.zeros_like(tokens), one_hot[:, :, None], one_hot
    )
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-2)
    for _ in range(150):
        drafter(batch, target).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    x = normalise(torch.eye(WIDTH, dtype=torch.float64))
    for k in range(3):
        guess = drafter._head(k, x, target).argmax(-1)
        assert torch.equal(guess, (torch.arange(WIDTH) + 2 + k) % WIDTH)


def test_kl_loss_is_the_cross_entropy_to_the_targets_law_renormalised_over_the_draft_vocabulary(target: Target) -> None:
    ids = torch.arange(0, VOCAB, 3)
    drafter = scrambled(medusa(target, num_heads=1, draft_vocabulary=ids))
    batch = batch_of(target, drafter, rows=1, length=10)
    out = drafter(batch, target)
    expected = 0.0
    law = target.logits(batch.final).float()[0, :, ids].softmax(-1)
    guesses = drafter._head(0, normalise(batch.features[0, :, 0]), target).float().log_softmax(-1)
    for label in batch.loss_mask[0].nonzero()[:, 0].tolist():
        if label >= 2:
            expected -= (law[label - 1] * guesses[label - 2]).sum().item()
    assert out.sums[0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-window", "cohere", "granite"])
def test_logits_of_some_tokens_are_those_of_all(family: str) -> None:
    target, ids = tiny_target(family), torch.tensor([3, 10, 60])
    final = torch.randn(5, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(target.logits(final, ids), target.logits(final)[:, ids])


def test_chunks_change_neither_loss_nor_gradients(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (64 * 2**20, 4 * VOCAB * 3):
        monkeypatch.setattr("headstart.drafters.losses.CHUNK_BYTES", size)
        drafter = scrambled(medusa(target, num_heads=3)).train()
        out = drafter(batch_of(target, drafter), target)
        out.loss.backward()
        results.append([out.loss.detach(), out.sums, out.hits, *(p.grad for p in drafter.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-6, atol=1e-9)


def test_deeper_heads_weigh_less(target: Target) -> None:
    drafter = scrambled(medusa(target, num_heads=2, depth_weight=0.5))
    batch = batch_of(target, drafter)
    out = drafter(batch, target)
    items = float(batch.loss_mask.sum())
    assert out.loss.item() == pytest.approx((0.5 * out.sums[0] + 0.25 * out.sums[1]).item() / items, rel=1e-6)


def test_shared_projection_adds_no_vocabulary_sized_weights(target: Target) -> None:
    drafter = medusa(target, projection="shared")
    assert max(p.numel() for p in drafter.parameters()) == WIDTH * WIDTH


def test_res_blocks_are_distinct(target: Target) -> None:
    drafter = medusa(target, num_heads=2, num_layers=3)
    weights = [p.data_ptr() for name, p in drafter.named_parameters() if name.endswith("linear.weight")]
    assert len(set(weights)) == 6


def test_topology_deeper_than_the_heads_is_cut(target: Target) -> None:
    assert TreeTopology.from_paths(DEFAULT_TOPOLOGY).depth == 4
    drafter = medusa(target, num_heads=2)
    assert drafter.topology.depth == 2
    drafter.set_topology([[0], [0, 0], [0, 0, 0]])
    assert drafter.config.topology == [[0], [0, 0]]


@pytest.mark.parametrize(
    "settings", [{"num_heads": 0}, {"num_layers": 0}, {"projection": "both"}, {"loss": "mse"}], ids=str
)
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        MedusaConfig(**settings)
