"""EAGLE-3's own promises: which states it fuses, and that training runs the very steps that serving takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_batches import batch_of, processors, scrambled
from tiny_targets import COMMON, VOCAB, WIDTH, layers_of, make_model, prompts_of, tiny_target
from torch import Tensor

from headstart.core import hf
from headstart.core.sampling import Sampling
from headstart.core.tree import DraftTree, DynamicTree, root_only
from headstart.drafters import eagle3 as eagle3_module
from headstart.drafters.base import DraftBatch, DraftRequest, Observed
from headstart.drafters.eagle3 import Eagle3Config, Eagle3Drafter, sources_of
from headstart.drafters.growth import Level
from headstart.drafters.modules import normalise
from headstart.drafters.registry import new_drafter
from headstart.drafters.slots import SlotState, unrolled
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target


def eagle3(target: Target, **settings: Any) -> Eagle3Drafter:
    drafter = new_drafter("eagle3", target, settings.pop("draft_vocabulary", None), **settings)
    assert isinstance(drafter, Eagle3Drafter)
    return drafter.double().eval()


def steps_of(drafter: Eagle3Drafter, batch: DraftBatch, target: Target) -> list[Tensor]:
    fused = drafter._fused(batch.features)
    return unrolled(batch, fused, drafter.layer, drafter._feed(target), drafter.config.ttt_steps)


@pytest.fixture
def drafter(target: Target) -> Eagle3Drafter:
    return scrambled(eagle3(target, ttt_steps=4))


@pytest.mark.parametrize(
    ("blocks", "sources"),
    [(32, [1, 15, 28]), (30, [1, 14, 26]), (10, [1, 4, 6]), (4, [1, 2, 3]), (3, [0, 1, 2]), (2, [0, 0, 1])],
)
def test_a_low_a_middle_and_a_high_block_are_fused(blocks: int, sources: list[int]) -> None:
    assert sources_of(blocks) == sources


def test_fused_blocks_exist_and_differ_wherever_there_are_three() -> None:
    assert sources_of(1) == [0, 0, 0]
    for blocks in range(3, 130):
        low, middle, high = sources_of(blocks)
        assert 0 <= low < middle < high < blocks


def numbered_target(blocks: int) -> Target:
    """Return a target whose blocks write their own number into every state."""
    model = make_model("llama", COMMON | {"num_hidden_layers": blocks})

    def writes(number: int) -> Any:
        return lambda _module, _args, output: torch.full_like(output, number)

    for number, block in enumerate(hf.decoder_layers(model)):
        block.register_forward_hook(writes(number))
    return Target(model)


def test_states_come_raw_from_the_right_blocks_low_to_high_in_training_and_in_service() -> None:
    target = numbered_target(12)
    drafter = eagle3(target, normalise_sources=False)
    assert drafter.feature_layers == (1, 5, 8) and drafter.config.feature_layers == [1, 5, 8]
    with torch.no_grad():
        drafter.fc.weight.copy_(torch.cat([torch.eye(WIDTH) * factor for factor in (10_000, 100, 1)], dim=1))
    assert bool((drafter._fused(batch_of(target, drafter).features) == 10508).all())
    seen: list[Tensor] = []
    fused = drafter._fused
    drafter._fused = lambda features: seen.append(fused(features)) or seen[-1]  # type: ignore[method-assign]
    SpeculativeEngine(target, drafter).generate(prompts_of(5), DecodingRules(4))
    assert len(seen) >= 2 and all(bool((states == 10508).all()) for states in seen)


def test_fresh_drafter_starts_from_the_highest_state_and_the_rows_of_the_targets_head_but_unsure() -> None:
    target, ids = tiny_target("llama"), torch.arange(1, VOCAB, 3)
    drafter = eagle3(target, draft_vocabulary=ids)
    features = torch.randn(2, 5, 3, WIDTH, dtype=torch.float64)
    torch.testing.assert_close(drafter._fused(features), normalise(features[:, :, 2]))
    torch.testing.assert_close(drafter.head.weight, target.head_rows(ids).double())
    scores = drafter._scores(torch.randn(2000, WIDTH, dtype=torch.float64))
    assert scores.std().item() == pytest.approx(1, abs=0.1)


def test_scale_of_the_targets_states_does_not_matter_unless_asked_for(target: Target) -> None:
    features = torch.randn(2, 5, 3, WIDTH, dtype=torch.float64)
    drafter, raw = eagle3(target), eagle3(target, normalise_sources=False)
    torch.testing.assert_close(drafter._fused(features * 1000), drafter._fused(features), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(raw._fused(features * 1000), raw._fused(features) * 1000)


def test_layer_is_sized_like_the_targets_but_for_what_is_told(target: Target) -> None:
    drafter = eagle3(target, layer={"intermediate_size": 20}, fused_layers=None)
    assert drafter.config.layer is not None
    assert drafter.config.layer["num_key_value_heads"] == 2 and drafter.config.fused_layers == [0, 0, 1]
    shapes = {name: tuple(p.shape) for name, p in drafter.layer.named_parameters()}
    assert shapes["layer.mlp.up_proj.weight"] == (20, WIDTH)
    assert shapes["layer.self_attn.q_proj.weight"] == (WIDTH, 2 * WIDTH), "attention reads embedding and state"
    assert shapes["layer.self_attn.k_proj.weight"] == (WIDTH // 2, 2 * WIDTH)


def told_path(scores: list[Tensor], tokens: Tensor, decoys: Tensor) -> Any:
    """Return a `grow` that asks for two nodes a level: one that is wrong, and the true token, whose scores it keeps.

    tokens, decoys [B, K] long: the true tokens after the root, and others.
    """

    def grow(_shape: object, root: Tensor, laws: Any, _request: object, _vocabulary: object) -> DraftTree:
        batch, depths = tokens.shape
        one = torch.ones(batch, 1, 1, dtype=torch.bool)
        scores.append(laws(Level(0, root[:, None], torch.zeros(batch, 1, dtype=torch.long), one))[:, 0])
        seen = one.expand(batch, 2, 1)
        for depth in range(1, depths):
            nodes = torch.stack([decoys[:, depth - 1], tokens[:, depth - 1]], dim=1)
            parents = torch.full_like(nodes, min(depth - 1, 1))  # the true node of the level before
            inherited = seen.gather(1, parents[:, :, None].expand(-1, -1, seen.shape[2]))
            seen = torch.cat([inherited, torch.eye(2, dtype=torch.bool).expand(batch, 2, 2)], dim=2)
            scores.append(laws(Level(depth, nodes, parents, seen))[:, 1])
        return root_only(root)

    return grow


PIECES = [(3, 1), (1, 4), (2, 0), (1, 1), (0, 2), (2, 1)]
"""Tokens committed to each of two rows in one step after the other: the cache gets holes."""


@torch.no_grad()
def test_training_computes_the_logits_of_incremental_serving_at_every_step(
    drafter: Eagle3Drafter, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, steps = batch_of(target, drafter, rows=2, length=14), drafter.config.ttt_steps
    trained = [drafter._scores(states) for states in steps_of(drafter, batch, target)]
    state, read, compared = drafter.init_state(2), torch.zeros(2, dtype=torch.long), 0
    rows = torch.arange(2)
    for piece in PIECES:
        lengths = torch.tensor(piece)
        at = (read[:, None] + torch.arange(max(piece))).clamp(max=13)
        here = rows[:, None], at
        nexts = batch.tokens[rows[:, None], (at + 1).clamp(max=13)]
        drafter.observe(Observed(batch.tokens[here], nexts, batch.features[here], at, lengths), state, target)
        read = read + lengths
        coming = batch.tokens[rows[:, None], (read[:, None] + 1 + torch.arange(steps)).clamp(max=13)]
        scores: list[Tensor] = []
        monkeypatch.setattr(eagle3_module, "grow", told_path(scores, coming, (coming + 7) % VOCAB))
        request = DraftRequest(Sampling(processors(), None), read, torch.ones(2, dtype=torch.bool))
        drafter.propose(state, target, request)
        assert len(scores) == steps
        for step, served in enumerate(scores):
            for row in range(2):
                slot = int(read[row]) - 1
                if slot + 1 + step < 14 - row:  # the second row has 13 tokens
                    torch.testing.assert_close(served[row], trained[step][row, slot], rtol=1e-5, atol=1e-5)
                    compared += 1
    assert compared == 2 * steps * len(PIECES)


@torch.no_grad()
def test_step_reads_the_next_tokens_and_no_state_of_the_target_beyond_its_slot(
    drafter: Eagle3Drafter, target: Target
) -> None:
    batch, slot, step = batch_of(target, drafter, rows=1), 4, 2
    before = steps_of(drafter, batch, target)[step][0, slot]

    def changed(name: str, place: int) -> bool:
        parts = {n: getattr(batch, n).clone() for n in DraftBatch.__dataclass_fields__}
        parts[name][0, place] = (parts[name][0, place] + 1) % VOCAB
        return not torch.allclose(steps_of(drafter, DraftBatch(**parts), target)[step][0, slot], before)

    # step i at slot t has read x_(t+1) .. x_(t+1+i), and will guess x_(t+2+i); slots before it pair g_t with x_(t+1)
    assert [place for place in range(12) if changed("tokens", place)] == [1, 2, 3, 4, 5, 6, 7]
    assert [place for place in range(12) if changed("features", place)] == [0, 1, 2, 3, 4]


def test_gradient_is_the_derivative_of_the_loss_through_every_step(drafter: Eagle3Drafter, target: Target) -> None:
    """Along a random direction, against a difference quotient: a state detached anywhere would show."""
    batch, generator, size = batch_of(target, drafter, rows=2), torch.Generator().manual_seed(5), 1e-3
    drafter(batch, target).loss.backward()
    moves = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in drafter.parameters()]
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in drafter.parameters()]
    slope = sum(float((grad * move).sum()) for grad, move in zip(grads, moves, strict=True))
    losses = []
    with torch.no_grad():
        for way in (1, -2):
            for p, move in zip(drafter.parameters(), moves, strict=True):
                p.add_(way * size * move)
            losses.append(float(drafter(batch, target).loss))
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(slope, rel=1e-2)


def test_guesses_are_the_targets_tokens_of_the_drafters_own_vocabulary(target: Target) -> None:
    ids = torch.tensor([5, 9, 10, 50])
    drafter = scrambled(eagle3(target, draft_vocabulary=ids))
    batch = batch_of(target, drafter, rows=1, length=5)
    state = drafter.init_state(1)
    observed = Observed(
        batch.tokens[:, :4], batch.tokens[:, 1:], batch.features[:, :4], batch.positions[:, :4], torch.tensor([4])
    )
    drafter.observe(observed, state, target)
    request = DraftRequest(Sampling(processors(), None), torch.tensor([4]), torch.tensor([True]))
    tree = drafter.propose(state, target, request)
    order = drafter._scores(state.newest)[0].argsort(descending=True)
    assert tree.tokens[0, 1:5].tolist() == ids[order].tolist(), "the four children of the root, best first"
    assert set(tree.tokens[0, 1:].tolist()) <= set(ids.tolist())


@torch.inference_mode()
def test_nodes_leave_the_cache_and_a_step_without_a_draft_does_no_harm(drafter: Eagle3Drafter, target: Target) -> None:
    drafter.set_dynamic_tree(DynamicTree(nodes=9, depth=4, width=3))
    state = SpeculativeEngine(target, drafter).prefill(prompts_of(6, 4), DecodingRules(9))
    assert isinstance(state.draft, SlotState)
    request = DraftRequest(state.sampling, state.root_positions, state.active)
    trees = [drafter.propose(state.draft, target, request) for _ in range(2)]
    assert torch.equal(trees[0].tokens, trees[1].tokens) and trees[0].max_depth >= 2
    assert layers_of(state.draft.cache)[0].keys.shape[2] == state.draft.cache.columns == 6
    assert state.draft.cache.lengths.tolist() == [6, 4]


def test_rows_admitted_to_finished_rows_places_say_what_they_say_alone(drafter: Eagle3Drafter, target: Target) -> None:
    engine, prompts, budgets = SpeculativeEngine(target, drafter), prompts_of(7, 3, 12, 5), [5, 14, 9, 11]
    state = engine.prefill(prompts[:2], DecodingRules(budgets[:2], holds_slots=True))
    for row in (2, 3):
        while not state.free_slots:
            engine.step(state)
        engine.admit(state, prompts[row : row + 1], DecodingRules(budgets[row : row + 1], holds_slots=True))
    while not state.done:
        engine.step(state)
    assert state.outputs == plain_generate(target, prompts, DecodingRules(budgets))


@pytest.mark.parametrize(
    "settings",
    [{"fused_layers": [1, 2]}, {"ttt_steps": 0}, {"ttt_steps": 99}, {"loss": "mse"}],
    ids=str,
)
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        Eagle3Config(**settings)


def test_drafter_without_a_target_to_follow_is_refused() -> None:
    with pytest.raises(ValueError, match="needs fused_layers and layer"):
        Eagle3Drafter(Eagle3Config(target_width=WIDTH, target_vocab_size=VOCAB))


def test_block_that_the_target_does_not_have_is_refused(target: Target) -> None:
    drafter = eagle3(target, fused_layers=[0, 1, 2])
    with pytest.raises(ValueError, match=r"from 0 to 1, but are \[0, 1, 2\]"):
        batch_of(target, drafter)


def test_later_steps_run_for_slots_alone_that_guess_trained_labels_and_nothing_else_changes(
    target: Target, drafter: Eagle3Drafter
) -> None:
    batch = batch_of(target, drafter, rows=2, length=200)
    few = torch.zeros_like(batch.loss_mask)
    few[0, 120:150], few[1, 190:] = True, True
    everywhere, sparse = replace(batch, loss_mask=batch.token_mask), replace(batch, loss_mask=few)
    ran: list[int] = []
    drafter.layer.register_forward_hook(lambda _module, told, _out: ran.append(told[0].shape[1]))
    whole, some = steps_of(drafter, everywhere, target), steps_of(drafter, sparse, target)
    assert sum(ran[len(ran) // 2 :]) < sum(ran[: len(ran) // 2]) / 1.5
    for step in range(drafter.config.ttt_steps):
        rows, labels_at = few.nonzero(as_tuple=True)
        torch.testing.assert_close(some[step][rows, labels_at - 2 - step], whole[step][rows, labels_at - 2 - step])
