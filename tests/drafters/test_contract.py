"""The contract every method keeps, over every entry of the registry. Its line there holds a new method to it.

A method whose settings change how it works has lines in `VARIANTS` besides.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tiny_batches import batch_of, processors, scrambled
from tiny_targets import VOCAB, WIDTH, prompts_of, tiny_target
from torch import Tensor

from headstart.core.hf import output_head
from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.sampling import Sampling
from headstart.core.tree import DynamicTree
from headstart.drafters.base import DraftBatch, Drafter, DraftRequest, Observed
from headstart.drafters.config import LOSSES
from headstart.drafters.registry import METHODS, AutoDrafter, drafter_classes, new_drafter
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

VOCABULARIES = {"whole vocabulary": None, "draft vocabulary": torch.arange(0, VOCAB, 2)}


@dataclass(frozen=True)
class Case:
    """What is held to the contract: a method, settings of its configuration, and the tree if it follows confidence."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    dynamic: DynamicTree | None = None

    def fresh(self, target: Target, vocabulary: Tensor | None = None) -> Drafter:
        """Return a drafter with scrambled weights, so that it guesses now right, now wrong."""
        torch.manual_seed(6)  # or a near-tie of scores, once in a thousand runs, ranks differently in float32
        drafter = scrambled(new_drafter(self.method, target, vocabulary, **self.settings))
        if self.dynamic is not None:
            drafter.set_dynamic_tree(self.dynamic)
        return drafter


VARIANTS = {
    "eagle3, raw states, hard labels, dynamic tree": Case(
        "eagle3", {"normalise_sources": False, "loss": "ce", "ttt_steps": 3}, DynamicTree(nodes=9, depth=4, width=3)
    ),
    "eagle, dynamic tree": Case("eagle", dynamic=DynamicTree(nodes=9, depth=4, width=3, stop_below=1e-3)),
    "eagle, harmonised": Case("eagle", {"harmonised_steps": 3, "top_k_weight": 1.0}),
    "eagle, own head": Case("eagle", {"projection": "own"}),
    "medusa, the target's head": Case("medusa", {"projection": "shared"}),
    "medusa, dynamic tree": Case("medusa", dynamic=DynamicTree(nodes=9, depth=4, width=3)),
    "hydra++": Case("hydra", {"prefix_attention": True, "num_layers": 3}),
    "hydra, hard labels, dynamic tree": Case("hydra", {"loss": "ce"}, DynamicTree(nodes=9, depth=4, width=3)),
    "mlp, own weights for every step": Case("mlp", {"tie_weights": False, "embedding": "own", "inner_size": 40}),
    "redrafter, static tree": Case("redrafter", {"tree": "topology"}),
    "redrafter, dynamic tree": Case("redrafter", dynamic=DynamicTree(nodes=9, depth=4, width=3)),
}
CASES = {method: Case(method) for method in METHODS} | VARIANTS


def has_loss(method: str) -> bool:
    return "loss" in drafter_classes(method)[0]().to_dict()


@pytest.fixture(params=sorted(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(params=VOCABULARIES)
def drafter(request: pytest.FixtureRequest, case: Case, target: Target) -> Drafter:
    return case.fresh(target, VOCABULARIES[request.param])


def greedy(batch_size: int, max_depth: int | None = None) -> DraftRequest:
    positions = torch.full((batch_size,), 5)
    active = torch.ones(batch_size, dtype=torch.bool)
    return DraftRequest(Sampling(processors(), None), positions, active, None, max_depth)


def test_greedy_text_is_that_of_the_plain_loop(drafter: Drafter, target: Target) -> None:
    prompts = prompts_of(5, 2, 9)
    out = SpeculativeEngine(target, drafter).generate(prompts, DecodingRules(24))
    assert out.outputs == plain_generate(target, prompts, DecodingRules(24))
    assert out.stats.tokens == sum(map(len, out.outputs)) - len(prompts)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_sampled_text_is_that_of_the_plain_loop_with_the_same_seed(
    drafter: Drafter, target: Target, temperature: float
) -> None:
    prompts, law = prompts_of(5, 2, 9), processors(temperature=temperature, top_k=20, top_p=0.9)
    out = SpeculativeEngine(target, drafter).generate(prompts, DecodingRules(24, (7,), law, do_sample=True, seed=11))
    assert out.outputs == plain_generate(target, prompts, DecodingRules(24, (7,), law, do_sample=True, seed=11))


def test_row_of_a_ragged_batch_is_what_it_is_alone(drafter: Drafter, target: Target) -> None:
    prompts, engine = prompts_of(3, 8, 1, 6), SpeculativeEngine(target, drafter)
    together = engine.generate(prompts, DecodingRules(20, (5, 9), do_sample=True, seed=[4, 5, 6, 7])).outputs
    assert together == [
        engine.generate([prompt], DecodingRules(20, (5, 9), do_sample=True, seed=[seed])).outputs[0]
        for prompt, seed in zip(prompts, (4, 5, 6, 7), strict=True)
    ]


def test_saved_and_loaded_drafter_proposes_the_same(drafter: Drafter, target: Target, tmp_path) -> None:
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path).double()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # whoever can read one can read the other
    trees = [proposed(d, target) for d in (drafter, loaded)]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    assert torch.equal(trees[0].parents, trees[1].parents)


def proposed(drafter: Drafter, target: Target, request: DraftRequest | None = None):
    features = torch.randn(2, 3, len(drafter.feature_layers), WIDTH, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    positions = torch.arange(3).expand(2, -1)
    observed = Observed(tokens, tokens + 1, features.double(), positions, torch.tensor([3, 2]))
    state = drafter.init_state(2)
    drafter.observe(observed, state, target)
    return drafter.propose(state, target, request or greedy(2))


def test_tree_starts_at_the_last_observed_token_and_siblings_differ(drafter: Drafter, target: Target) -> None:
    tree = proposed(drafter, target)
    assert tree.tokens[:, 0].tolist() == [4, 6]
    for row in range(2):
        nodes = tree.valid[row].nonzero()[1:, 0]
        edges = list(zip(tree.parents[row, nodes].tolist(), tree.tokens[row, nodes].tolist(), strict=True))
        assert len(set(edges)) == len(edges)


def test_budget_of_the_request_bounds_the_tree(drafter: Drafter, target: Target) -> None:
    request = DraftRequest(greedy(2).sampling, torch.tensor([5, 5]), torch.tensor([True, True]), 4, 2)
    tree = proposed(drafter, target, request)
    assert tree.tokens.shape[1] <= 4
    assert int(tree.depth.max()) <= 2


def test_propose_and_observe_leave_the_drafter_unchanged(drafter: Drafter, target: Target) -> None:
    before, attributes = copy.deepcopy(drafter.state_dict()), set(vars(drafter))
    proposed(drafter, target)
    assert set(vars(drafter)) == attributes
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, before[name])


def test_noise_of_the_target_makes_another_tree(drafter: Drafter, target: Target) -> None:
    noise = KeyedNoise(request_keys(3, 2, torch.device("cpu")), VOCAB)
    base = greedy(2)
    sampled = DraftRequest(Sampling(processors(), noise), base.root_positions, base.active)
    assert not torch.equal(proposed(drafter, target).tokens, proposed(drafter, target, sampled).tokens)


def test_gradients_reach_every_parameter_of_the_drafter_and_none_of_the_target(case: Case) -> None:
    target = tiny_target("llama")
    drafter = case.fresh(target, VOCABULARIES["draft vocabulary"]).train()
    target.model.zero_grad()
    loss = drafter(batch_of(target, drafter), target).loss
    assert loss is not None
    loss.backward()
    assert [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.any()] == []
    # A drafter that guesses through the target's own head learns through it, and autograd then gives the head a
    # gradient too, unless its owner has frozen it, as training does. Nothing clean stops it here: a detached weight is
    # not there under ZeRO-3, which gathers weights in module calls only; freezing the head for the call would set
    # something on the target, and touch whatever else goes backward at that time; detaching the result would stop the
    # drafter's own gradient.
    through_head = getattr(drafter.config, "projection", "own") == "shared"
    head = {id(p) for p in output_head(target.model).parameters()}
    reached = {id(p) for p in target.model.parameters() if p.grad is not None}
    if not drafter.trains_target:
        assert reached == (head if through_head else set())


def test_loss_falls_on_rows_learnt_by_heart(drafter: Drafter, target: Target) -> None:
    batch = batch_of(target, drafter, rows=8)
    optimizer = torch.optim.Adam(drafter.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = drafter(batch, target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("method", [method for method in sorted(METHODS) if has_loss(method)])
def test_every_loss_falls_in_one_step_and_its_gradients_are_finite(method: str, loss: str, target: Target) -> None:
    drafter = Case(method, {"loss": loss}).fresh(target, VOCABULARIES["draft vocabulary"]).train()
    batch = batch_of(target, drafter)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1e-3)
    before = drafter(batch, target).loss
    before.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name
    optimizer.step()
    assert drafter(batch, target).loss < before


def test_loss_divides_by_the_items_it_is_told(drafter: Drafter, target: Target) -> None:
    batch = batch_of(target, drafter)
    own = drafter(batch, target).loss
    told = drafter(batch, target, num_items=torch.tensor(10 * int(batch.loss_mask.sum()))).loss
    torch.testing.assert_close(own, 10 * told)


def test_batch_without_a_trained_token_has_loss_zero_and_gradients(case: Case, target: Target) -> None:
    drafter = case.fresh(target).train()
    full = batch_of(target, drafter)
    batch = DraftBatch(
        full.tokens,
        full.token_mask,
        torch.zeros_like(full.loss_mask),
        full.positions,
        full.segments,
        full.features,
        full.final,
    )
    loss = drafter(batch, target).loss
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in drafter.parameters())


def test_rows_of_several_documents_do_not_look_across_their_borders(case: Case, target: Target) -> None:
    drafter = case.fresh(target)
    one, two = batch_of(target, drafter, rows=1, length=7), batch_of(target, drafter, rows=2, length=8)
    parts = [(one, 0), (two, 1)]
    tokens, masks = (
        torch.cat([getattr(b, name)[row, :7] for b, row in parts])[None] for name in ("tokens", "loss_mask")
    )
    positions = torch.cat([torch.arange(7)] * 2)[None]
    segments = torch.tensor([[0] * 7 + [1] * 7])
    everything = torch.ones_like(tokens, dtype=torch.bool)
    out = target.encode(tokens, everything, drafter.feature_layers, positions, segments)
    packed = DraftBatch(tokens, everything, masks, positions, segments, out.features, out.final)
    alone = [
        drafter(
            DraftBatch(
                b.tokens[row : row + 1, :7], torch.ones(1, 7, dtype=torch.bool), b.loss_mask[row : row + 1, :7],
                b.positions[row : row + 1, :7], b.segments[row : row + 1, :7],
                b.features[row : row + 1, :7], b.final[row : row + 1, :7],
            ),
            target,
        )
        for b, row in parts
    ]  # fmt: skip
    together = drafter(packed, target)
    torch.testing.assert_close(together.counts, alone[0].counts + alone[1].counts)
    torch.testing.assert_close(together.sums, alone[0].sums + alone[1].sums)


@pytest.mark.parametrize("pieces", [[1] * 12, [4, 1, 2, 1, 3, 1]], ids=["one by one", "in blocks"])
def test_training_and_serving_rank_the_true_tokens_alike_at_every_depth(
    drafter: Drafter, target: Target, pieces: list[int]
) -> None:
    batch = batch_of(target, drafter, rows=1, length=14)
    ranks = drafter(batch, target).ranks
    state, start, checked = drafter.init_state(1), 0, [0] * drafter.draft_depth
    width = VOCAB if drafter.draft_token_ids is None else len(drafter.draft_token_ids)
    for size in pieces:
        block = slice(start, start + size)
        observed = Observed(
            batch.tokens[:, block], batch.tokens[:, start + 1 : start + size + 1], batch.features[:, block],
            batch.positions[:, block], torch.tensor([size]),
        )  # fmt: skip
        drafter.observe(observed, state, target)
        start += size
        told = ranks[0, start - 1].tolist()  # of the tokens after the root, as training sees them
        told = told[: told.index(-1)] if -1 in told else told
        drafter.set_topology([[*told[:depth], rank] for depth in range(len(told)) for rank in range(width)] or [[0]])
        request = DraftRequest(greedy(1).sampling, torch.tensor([start]), torch.tensor([True]), proposal="top_k")
        tree = drafter.propose(state, target, request)
        by_path = dict(zip(map(tuple, drafter.topology.paths()), tree.tokens[0, 1:].tolist(), strict=True))  # type: ignore[union-attr]
        for depth in range(len(told)):
            assert by_path[tuple(told[: depth + 1])] == batch.tokens[0, start + 1 + depth]
            checked[depth] += 1
    assert checked[0] >= 2
    assert min(checked) >= 2 or drafter.draft_token_ids is not None  # half of the true tokens are no candidates


def test_drafter_of_another_size_is_refused_with_both_sizes(case: Case, target: Target) -> None:
    drafter = case.fresh(target)
    drafter.config.target_width = 99
    with pytest.raises(ValueError, match=rf"V={VOCAB}, D=99, but this one has V={VOCAB}, D={WIDTH}; load the matching"):
        SpeculativeEngine(target, drafter)
