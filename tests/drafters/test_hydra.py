"""Hydra's own promises: what a head reads, where it starts, and what the prefix layer of Hydra++ sees."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import batch_of, batch_of_followers, learnt_by_heart, processors, scrambled
from tiny_targets import VOCAB, WIDTH, layers_of, prompts_of, tiny_target
from torch import Tensor

from headstart.core import masks
from headstart.core.sampling import Sampling
from headstart.core.tree import DynamicTree
from headstart.drafters.base import DraftRequest, Observed
from headstart.drafters.hydra import HydraConfig, HydraDrafter
from headstart.drafters.modules import frozen_embedding, normalise
from headstart.drafters.registry import new_drafter
from headstart.drafters.states import NewestState
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

PREFIX = [False, True]
NAMES = ["hydra", "hydra++"]


def hydra(target: Target, **settings) -> HydraDrafter:
    drafter = new_drafter("hydra", target, settings.pop("draft_vocabulary", None), **settings)
    assert isinstance(drafter, HydraDrafter)
    return drafter.double()


def observed(features: Tensor, positions: Tensor, lengths: list[int]) -> Observed:
    """Return what was committed, read tokens 1, 2, ... and roots one larger, for features [B, A, D]."""
    tokens = positions + 1
    return Observed(tokens, tokens + 1, features[:, :, None], positions, torch.tensor(lengths))


def request_of(state: NewestState) -> DraftRequest:
    rows = len(state.root)
    active = torch.ones(rows, dtype=torch.bool)
    return DraftRequest(Sampling(processors(), None), torch.full((rows,), 9), active, proposal="top_k")


@pytest.mark.parametrize("prefix", PREFIX, ids=NAMES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-window"])
def test_fresh_head_says_what_the_language_model_head_says(family: str, prefix: bool) -> None:
    target = tiny_target(family)
    drafter = hydra(target, prefix_attention=prefix, num_layers=3).eval()
    tokens = torch.tensor(prompts_of(9, 9))
    final = target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final
    state = drafter.init_state(2)
    positions = torch.arange(9).expand(2, -1)
    drafter.observe(Observed(tokens, tokens, final[:, :, None], positions, torch.tensor([9, 5])), state, target)
    told = frozen_embedding(target, tokens[:, :3], drafter.logit_scale.log)
    guessed = drafter._head(2, state.feature, told).argmax(-1)
    said = target.logits(torch.stack([final[0, 8], final[1, 4]])).argmax(-1)
    assert torch.equal(guessed, said)


def test_head_is_the_papers_equation(target: Target) -> None:
    """Head 2 reads [z_t; e(x_(t+1)); e(x_(t+2))] through W_r c + SiLU(W c + b) and one more residual block."""
    drafter = scrambled(hydra(target, num_layers=2, num_heads=2))
    z, tokens = torch.randn(3, WIDTH, dtype=torch.float64), torch.tensor([[5, 6], [7, 8], [9, 10]])
    told = [normalise(target.embed(tokens[:, i])) for i in range(2)]
    weights = {name: p.detach() for name, p in drafter.named_parameters()}
    c = torch.cat([normalise(z), *told], dim=1)
    x = c @ weights["blocks.1.0.residual.weight"].T + weights["blocks.1.0.residual.bias"]
    x = x + F.silu(c @ weights["blocks.1.0.linear.weight"].T + weights["blocks.1.0.linear.bias"])
    x = x + F.silu(x @ weights["blocks.1.1.linear.weight"].T + weights["blocks.1.1.linear.bias"])
    expected = (
        weights["logit_scale.log"][1].exp() * x @ weights["projections.1.weight"].T + weights["projections.1.bias"]
    )
    with torch.no_grad():
        torch.testing.assert_close(
            drafter._head(1, normalise(z), frozen_embedding(target, tokens, drafter.logit_scale.log)), expected
        )


def test_heads_learn_from_the_tokens_before_their_own(target: Target) -> None:
    """Every token follows from the one before it alone, and the states say nothing."""
    drafter = hydra(target, num_heads=3, loss="ce").train()
    hits, counts = learnt_by_heart(drafter, batch_of_followers(), target)
    assert hits == counts == [VOCAB * 5, VOCAB * 4, VOCAB * 3]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("prefix", PREFIX, ids=NAMES)
def test_children_of_a_node_are_the_best_of_the_head_told_its_path(target: Target, prefix: bool, dynamic: bool) -> None:
    drafter = scrambled(hydra(target, num_heads=3, prefix_attention=prefix))
    drafter.set_topology([[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 0, 0], [2, 0, 1]])
    drafter.set_dynamic_tree(DynamicTree(10, 3, 2) if dynamic else None)
    state = drafter.init_state(2)
    features = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    drafter.observe(observed(features, torch.arange(4).expand(2, -1), [4, 2]), state, target)
    tree = drafter.propose(state, target, request_of(state))
    checked = 0
    for row in range(2):
        for node in range(tree.tokens.shape[1]):
            children = tree.tokens[row, tree.parents[row] == node].tolist()
            path = tree.tokens[row, tree.ancestors[row, node]][None]
            if not children:
                continue
            with torch.no_grad():
                told = frozen_embedding(target, path, drafter.logit_scale.log)
                scores = drafter._head(path.shape[1] - 1, state.feature[row : row + 1], told)
            assert set(children) == set(scores[0].topk(len(children)).indices.tolist())
            checked += 1
    assert checked >= 6


def test_ragged_pieces_give_the_prefix_states_of_one_pass(target: Target) -> None:
    drafter = scrambled(hydra(target, prefix_attention=True))
    features = torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(6)).double()
    with torch.no_grad():
        whole = drafter.prefix(  # type: ignore[misc]
            normalise(features), torch.arange(9).expand(3, -1), masks.causal(torch.ones(3, 9, dtype=torch.bool))
        )
    state, read = drafter.init_state(3), torch.zeros(3, dtype=torch.long)
    for lengths in ([4, 1, 2], [2, 0, 3], [0, 3, 1], [1, 1, 0], [2, 2, 3]):
        places = (read[:, None] + torch.arange(max(lengths))).clamp(max=8)
        block = features[torch.arange(3)[:, None], places]
        padding = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
        block[padding] = 100.0  # must be seen by nobody
        drafter.observe(observed(block, places, lengths), state, target)
        read = read + torch.tensor(lengths)
        torch.testing.assert_close(state.feature, whole[torch.arange(3), read - 1], rtol=0, atol=1e-6)
        assert state.root.tolist() == (read + 1).tolist()
        assert state.cache is not None and torch.equal(state.cache.lengths, read)
    assert read.tolist() == [9, 7, 9]


def test_prefix_layer_changes_what_heads_read_by_position_and_by_order(target: Target) -> None:
    drafter = scrambled(hydra(target, prefix_attention=True))
    features = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(6)).double()
    swapped = features[:, [1, 0, 2, 3, 4]]
    found = []
    for block, positions in ((features, [0, 1, 2, 3, 4]), (swapped, [0, 1, 2, 3, 4]), (swapped, [1, 0, 2, 3, 4])):
        state = drafter.init_state(1)
        drafter.observe(observed(block, torch.tensor([positions]), [5]), state, target)
        found.append(state.feature)
    assert not torch.allclose(found[0], found[1], atol=1e-4)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-6)


def test_rows_can_be_taken_and_handed_over_with_their_prefix(target: Target) -> None:
    drafter = scrambled(hydra(target, prefix_attention=True))
    features = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(8)).double()
    first, rest = features[:, :4], features[:, 4:]
    places = torch.arange(6).expand(3, -1)
    whole, state, other = (drafter.init_state(rows) for rows in (3, 3, 1))
    drafter.observe(observed(features, places, [6, 6, 6]), whole, target)
    drafter.observe(observed(first, places[:, :4], [4, 4, 4]), state, target)
    drafter.observe(observed(first[1:2], places[1:2, :4], [4]), other, target)
    state = state.take_rows(torch.tensor([2, 0])).replace_rows(torch.tensor([1]), other)
    drafter.observe(observed(rest[[2, 1]], places[:2, 4:], [2, 2]), state, target)
    torch.testing.assert_close(state.feature, whole.feature[[2, 1]], rtol=0, atol=1e-6)


def test_cache_of_the_prefix_layer_loses_its_holes_with_the_targets(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headstart.inference.engine.COMPACT_EVERY", 1)
    monkeypatch.setattr("headstart.inference.engine.COMPACT_BELOW", 1.0)
    drafter = hydra(target, prefix_attention=True).eval()
    engine, prompts, rules = SpeculativeEngine(target, drafter), prompts_of(9, 2, 5), DecodingRules([12, 30, 20])
    state = engine.prefill(prompts, rules)
    while not state.done:
        engine.step(state)
        assert isinstance(state.draft, NewestState) and state.draft.cache is not None
        assert state.draft.cache.columns == max(state.draft.cache.lengths.tolist(), default=0)
    assert state.outputs == plain_generate(target, prompts, rules)


def test_proposing_leaves_the_cache_and_the_next_proposal_as_they_were(target: Target) -> None:
    drafter = scrambled(hydra(target, prefix_attention=True))
    state = drafter.init_state(1)
    features = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    drafter.observe(observed(features, torch.arange(3)[None], [3]), state, target)
    trees = [drafter.propose(state, target, request_of(state)) for _ in range(2)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert state.cache is not None and layers_of(state.cache)[0].keys.shape[2] == state.cache.columns == 3


def test_chunks_change_neither_loss_nor_gradients_of_the_prefix_layer(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for size in (64 * 2**20, 4 * VOCAB * 3):
        monkeypatch.setattr("headstart.drafters.losses.CHUNK_BYTES", size)
        torch.manual_seed(0)
        drafter = scrambled(hydra(target, num_heads=3, prefix_attention=True)).train()
        out = drafter(batch_of(target, drafter), target)
        out.loss.backward()
        results.append([out.loss.detach(), out.sums, out.hits, *(p.grad for p in drafter.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-6, atol=1e-9)


def test_every_head_and_block_has_its_own_weights(target: Target) -> None:
    drafter = hydra(target, num_heads=2, num_layers=3)
    weights = [p.data_ptr() for name, p in drafter.named_parameters() if name.endswith("linear.weight")]
    assert len(set(weights)) == 6
    assert [blocks[0].linear.in_features for blocks in drafter.blocks] == [2 * WIDTH, 3 * WIDTH]  # type: ignore[index]


def test_sizes_of_the_prefix_layer_are_kept_where_there_is_one(target: Target) -> None:
    assert hydra(target).config.layer is None
    layer = hydra(target, prefix_attention=True).config.layer
    assert layer is not None and layer["num_key_value_heads"] == 2 and layer["rope_parameters"]["rope_theta"]
    with pytest.raises(ValueError, match="prefix_attention needs layer"):
        HydraDrafter(HydraConfig(prefix_attention=True, target_width=WIDTH, target_vocab_size=VOCAB))


@pytest.mark.parametrize("settings", [{"num_heads": 0}, {"num_layers": 0}, {"loss": "mse"}], ids=str)
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        HydraConfig(**settings)
