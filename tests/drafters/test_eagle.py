"""EAGLE's own promises: what a slot pairs and learns, what is fed back, and that it depends on no target's scale."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import batch_of, processors, scrambled
from tiny_targets import VOCAB, WIDTH, layers_of, prompts_of, tiny_target

from headstart.core import masks
from headstart.core.sampling import Sampling
from headstart.core.tree import DynamicTree
from headstart.drafters.base import DraftBatch, DraftRequest, Observed
from headstart.drafters.eagle import EagleConfig, EagleDrafter
from headstart.drafters.modules import normalise
from headstart.drafters.registry import new_drafter
from headstart.drafters.slots import unrolled
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

HALF = torch.arange(0, VOCAB, 2)


def eagle(target: Target, **settings) -> EagleDrafter:
    drafter = new_drafter("eagle", target, settings.pop("draft_vocabulary", None), **settings)
    assert isinstance(drafter, EagleDrafter)
    return scrambled(drafter)


def observed_of(batch: DraftBatch, start: int, stop: int) -> Observed:
    """Return columns start .. stop - 1 of the batch's first row as if they had just been committed."""
    block, after = slice(start, stop), slice(start + 1, stop + 1)
    return Observed(
        batch.tokens[:1, block], batch.tokens[:1, after], batch.features[:1, block], batch.positions[:1, block],
        torch.tensor([stop - start]),
    )  # fmt: skip


def request_at(position: int) -> DraftRequest:
    return DraftRequest(Sampling(processors(), None), torch.tensor([position]), torch.tensor([True]))


@torch.no_grad()
def test_slot_pairs_a_state_with_the_next_token_and_learns_the_next_state_and_its_law(target: Target) -> None:
    """The loss by hand: slot t reads (z_t, x_(t+1)), is compared with z_(t+1), and x_(t+2) must be a trained token."""
    drafter = eagle(target, draft_vocabulary=HALF, top_k_weight=0.5, top_k_tokens=3)
    batch = batch_of(target, drafter, rows=1, length=10)
    z, tokens = batch.final[0] / drafter.usual_size, batch.tokens[0]
    embedded = normalise(target.embed(tokens))
    x = drafter.fc(torch.cat([embedded[1:], z[:-1]], dim=1))[None]
    seen = masks.causal(torch.ones(1, 9, dtype=torch.bool))
    guessed = drafter.layer(x, torch.arange(9)[None], seen)[0]
    expected = 0.0
    for label in batch.loss_mask[0].nonzero()[:, 0].tolist():
        slot = label - 2
        law = target.logits(batch.final[0, label - 1], HALF).float().softmax(-1)
        said = target.logits(guessed[slot] * drafter.logit_scale(), HALF).float().log_softmax(-1)
        best = law.topk(3).indices
        expected += F.smooth_l1_loss(guessed[slot], z[slot + 1]).item()
        expected -= 0.1 * (law * said).sum().item() + 0.5 * (law[best] * said[best]).sum().item()
    out = drafter(batch, target)
    assert out.sums[0].item() == pytest.approx(expected, rel=1e-5)
    assert out.loss.item() == pytest.approx(expected / int(batch.loss_mask.sum()), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-window", "cohere", "granite"])
def test_frozen_head_on_a_true_state_says_what_the_target_says(family: str) -> None:
    target = tiny_target(family)
    drafter = new_drafter("eagle", target).double()
    assert isinstance(drafter, EagleDrafter)
    batch = batch_of(target, drafter, rows=1)
    with torch.no_grad():
        said = drafter._scores(drafter._scaled(batch.features), target)
    torch.testing.assert_close(said, target.logits(batch.final), rtol=1e-5, atol=1e-5)


def test_loss_does_not_depend_on_the_scale_of_the_targets_states(target: Target) -> None:
    larger = copy.deepcopy(target)
    with torch.no_grad():
        weights = dict(larger.model.named_parameters())
        weights["model.norm.weight"].mul_(16)
        weights["lm_head.weight"].div_(16)
    results = []
    for one in (target, larger):
        torch.manual_seed(0)
        drafter = new_drafter("eagle", one).double().train()
        out = drafter(batch_of(one, drafter), one)
        out.loss.backward()
        results.append((out.loss.detach(), dict(drafter.named_parameters())["fc.weight"].grad))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-8)


def test_without_noise_training_and_evaluation_have_the_same_loss_over_the_trained_steps(target: Target) -> None:
    drafter = eagle(target, depth=4, harmonised_steps=2, feature_noise=0.0)
    batch = batch_of(target, drafter)
    trained, measured = drafter.train()(batch, target), drafter.eval()(batch, target)
    assert trained.sums.shape == (2,) and trained.ranks is None
    assert measured.sums.shape == (4,) and measured.ranks.shape[-1] == 4
    torch.testing.assert_close(trained.loss, measured.loss)
    torch.testing.assert_close(trained.sums, measured.sums[:2])


@pytest.mark.parametrize(("length", "widest"), [(40, 0.2), (2048, 0.05)], ids=["short row", "long row"])
def test_noise_is_uniform_and_narrower_in_long_rows(target: Target, length: int, widest: float) -> None:
    drafter = eagle(target, feature_noise=0.2)
    mask = torch.ones(2, length, dtype=torch.bool)
    nothing = torch.zeros(2, length, dtype=torch.long)
    batch = DraftBatch(nothing, mask, mask, nothing, nothing, torch.zeros(2, length, 1, WIDTH), torch.zeros(2, 1))
    noise = drafter._noise(batch)
    assert 0.98 * widest < float(noise.abs().max()) <= widest
    assert float(noise.pow(2).mean()) == pytest.approx(widest**2 / 3, rel=0.1)


def test_noise_of_rows_that_share_a_sequence_has_the_width_of_each_alone(target: Target) -> None:
    drafter = eagle(target, feature_noise=0.2)
    segments = torch.tensor([[0] * 100 + [1] * 2048])
    mask = torch.ones_like(segments, dtype=torch.bool)
    batch = DraftBatch(segments, mask, mask, segments, segments, torch.zeros(1, 2148, 1, WIDTH), torch.zeros(1, 1))
    noise = drafter._noise(batch).abs()
    assert 0.19 < float(noise[:, :100].max()) <= 0.2
    assert 0.045 < float(noise[:, 100:].max()) <= 0.05


def test_noise_touches_training_alone(target: Target) -> None:
    drafter = eagle(target, feature_noise=0.5)
    batch = batch_of(target, drafter)
    assert drafter.train()(batch, target).loss != drafter(batch, target).loss
    assert drafter.eval()(batch, target).loss == drafter(batch, target).loss


def test_guesses_that_are_fed_back_carry_no_gradient(target: Target) -> None:
    drafter = eagle(target)
    batch = batch_of(target, drafter, rows=1)
    outputs = unrolled(batch, drafter._scaled(batch.features), drafter.layer, drafter._feed(target), 3)
    outputs[0].retain_grad()
    outputs[2].sum().backward()
    assert outputs[0].grad is None
    assert drafter.fc.weight.grad is not None and drafter.fc.weight.grad.any()


def test_proposals_leave_nothing_behind_and_committed_slots_hold_true_states(target: Target) -> None:
    drafter = eagle(target)
    batch = batch_of(target, drafter, rows=1, length=12)
    whole, stepwise = drafter.init_state(1), drafter.init_state(1)
    drafter.observe(observed_of(batch, 0, 11), whole, target)
    for start, stop in ((0, 4), (4, 5), (5, 8), (8, 11)):
        drafter.observe(observed_of(batch, start, stop), stepwise, target)
        drafter.propose(stepwise, target, request_at(stop))
    torch.testing.assert_close(stepwise.newest, whole.newest)
    mine, theirs = layers_of(stepwise.cache)[0], layers_of(whole.cache)[0]
    torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values))
    assert stepwise.cache.columns == mine.keys.shape[2] == 11


@pytest.mark.parametrize("tree", [None, DynamicTree(9, 4, 3), DynamicTree(9, 4, 3, 0.99)], ids=["static", "2", "stop"])
def test_layer_runs_once_a_level_and_a_dynamic_tree_stops_when_in_doubt(
    target: Target, tree: DynamicTree | None
) -> None:
    drafter = eagle(target)
    drafter.set_topology([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    drafter.set_dynamic_tree(tree)
    state, passes = drafter.init_state(1), []
    drafter.observe(observed_of(batch_of(target, drafter, rows=1), 0, 5), state, target)
    drafter.layer.register_forward_hook(lambda *_: passes.append(1))
    proposed = drafter.propose(state, target, request_at(5))
    levels = {None: 3, 0.0: 4, 0.99: 1}[tree.stop_below if tree else None]
    assert len(passes) == levels - 1, "the root's own slot is committed already"
    assert proposed.max_depth <= levels


def test_shared_head_adds_no_vocabulary_sized_weights_and_an_own_one_starts_as_its_copy(target: Target) -> None:
    shared = new_drafter("eagle", target, HALF)
    assert "projection.weight" not in shared.state_dict()
    own = new_drafter("eagle", target, HALF, projection="own")
    torch.testing.assert_close(own.state_dict()["projection.weight"], target.head_rows(HALF))


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "opt", "gemma3-window", "cohere", "mistral-window"])
def test_layer_fits_every_family_and_changes_no_word(family: str) -> None:
    target, prompts = tiny_target(family), prompts_of(6, 3, 9)
    drafter = eagle(target, draft_vocabulary=HALF)
    rules = DecodingRules(16, do_sample=True, seed=3)
    out = SpeculativeEngine(target, drafter).generate(prompts, rules)
    assert out.outputs == plain_generate(target, prompts, rules)


def test_batch_order_of_the_rows_changes_no_loss(target: Target) -> None:
    drafter = eagle(target, harmonised_steps=3)
    batch = batch_of(target, drafter)
    names = ("tokens", "token_mask", "loss_mask", "positions", "segments", "features", "final")
    turned = replace(batch, **{name: getattr(batch, name).flip(0) for name in names})
    torch.testing.assert_close(drafter(turned, target).sums, drafter(batch, target).sums)


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 0}, {"depth": 3, "harmonised_steps": 4}, {"harmonised_steps": 0}, {"projection": "both"},
        {"law_weight": 0.0}, {"law_weight": -1.0}, {"feature_noise": -0.1}, {"top_k_tokens": 0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        EagleConfig(**settings)


def test_drafter_without_the_sizes_of_its_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="build_drafter takes them from the target"):
        EagleDrafter(EagleConfig(target_width=8, target_vocab_size=8))


def test_fresh_drafter_passes_the_state_on_beside_a_little_of_the_token() -> None:
    drafter = new_drafter("eagle", tiny_target("llama"))
    token, state = torch.zeros(WIDTH), torch.arange(WIDTH, dtype=torch.float32)
    told = drafter.fc.weight @ torch.cat([token, state])  # type: ignore[attr-defined]
    assert torch.equal(told, state)
    assert 0 < drafter.fc.weight[:, :WIDTH].abs().max() < 1  # type: ignore[attr-defined]
