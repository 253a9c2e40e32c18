"""ReDrafter's own promises: the recurrence, the beam search and its folding, and which tree is drawn when."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import batch_of, processors, scrambled
from tiny_targets import VOCAB, WIDTH, prompts_of, tiny_target
from torch import Tensor

from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.sampling import Sampling
from headstart.core.tree import DraftTree, DynamicTree
from headstart.drafters.base import DraftRequest
from headstart.drafters.modules import normalise
from headstart.drafters.redrafter import RedrafterConfig, RedrafterDrafter, search_beams
from headstart.drafters.registry import AutoDrafter, new_drafter
from headstart.drafters.states import NewestState
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

FEW = torch.tensor([3, 8, 20, 21, 40, 63])
"""A draft vocabulary over which every continuation can be listed."""

ROOTS = torch.tensor([5, 9])
A, B, C, D, E, G = range(11, 17)


def redrafter(target: Target, vocabulary: Tensor | None = None, **settings) -> RedrafterDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = scrambled(new_drafter("redrafter", target, vocabulary, **settings))
    assert isinstance(drafter, RedrafterDrafter)
    return drafter


def state_of(drafter: RedrafterDrafter, rows: int = 2) -> NewestState:
    feature = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(4)).double()
    return NewestState(feature, ROOTS[:rows])


def request_of(rows: int = 2, sampled: bool = False, max_nodes: int | None = None, **settings) -> DraftRequest:
    noise = KeyedNoise(request_keys(6, rows, torch.device("cpu")), VOCAB) if sampled else None
    sampling = Sampling(processors(**settings), noise)
    return DraftRequest(sampling, torch.arange(rows) + 4, torch.ones(rows, dtype=torch.bool), max_nodes)


def by_hand(drafter: RedrafterDrafter, target: Target, feature: Tensor, path: list[int]) -> Tensor:
    """Return the scores [Vd] of what follows a path, root first, by the paper's equations."""
    s = torch.zeros(WIDTH, dtype=torch.float64)
    for token in path:
        e = normalise(target.embed(torch.tensor(token)))
        s = F.silu(drafter.read.weight @ e + drafter.recur.weight @ s + drafter.recur.bias)
    x = torch.cat([normalise(feature), s])
    for block in drafter.blocks:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)  # type: ignore[union-attr]
    return drafter.logit_scale() * (drafter.projection.weight @ x)


Law = Callable[[int, list[int]], Tensor]
"""Log-probabilities [Vd] of what follows a path, root first, in one row."""


def law_of(drafter: RedrafterDrafter, target: Target, request: DraftRequest) -> Law:
    state, vocabulary = state_of(drafter), drafter.vocabulary

    def law(row: int, path: list[int]) -> Tensor:
        scores = by_hand(drafter, target, state.feature[row], path).float()
        if request.sampling.noise is not None:
            position = request.root_positions[:, None] + len(path)
            scores = request.sampling.narrow(scores[None])[0]
            scores = scores + request.sampling.noise(position, vocabulary.chosen)[row, 0]
        return scores.log_softmax(-1)

    return law


def brute_force(law: Law, tokens: Tensor, row: int, root: int, width: int, depth: int) -> list[dict[tuple, float]]:
    """Return what a beam search keeps on each level: token sequences and their log-probabilities, best first."""
    levels: list[dict[tuple, float]] = [{(): 0.0}]
    for _ in range(depth):
        scored = {}
        for beam, value in levels[-1].items():
            logs = law(row, [root, *beam]).tolist()
            scored |= {(*beam, token): value + log for token, log in zip(tokens.tolist(), logs, strict=True)}
        levels.append(dict(sorted(scored.items(), key=lambda item: -item[1])[:width]))
    return levels[1:]


def paths_in(tree: DraftTree, row: int) -> set[tuple]:
    """Return the token path from the root to every node of a row."""
    nodes = tree.valid[row].nonzero()[1:, 0].tolist()
    return {tuple(tree.tokens[row, tree.ancestors[row, node]].tolist()[1:]) for node in nodes}


def beginnings(sequences: list[tuple]) -> set[tuple]:
    return {sequence[: depth + 1] for sequence in sequences for depth in range(len(sequence))}


@torch.no_grad()
def test_scores_of_a_path_follow_the_papers_equations(target: Target) -> None:
    drafter = redrafter(target)
    state = state_of(drafter)
    laws = drafter._laws(state.feature, target)
    laws(ROOTS[:, None], torch.zeros(2, 1, dtype=torch.long))
    laws(torch.tensor([[4, 7], [4, 7]]), torch.zeros(2, 2, dtype=torch.long))
    scores = laws(torch.tensor([[2, 3, 11], [2, 3, 11]]), torch.tensor([[1, 0, 1], [0, 0, 1]]))
    paths = [[[5, 7, 2], [5, 4, 3], [5, 7, 11]], [[9, 4, 2], [9, 4, 3], [9, 7, 11]]]
    for row in range(2):
        for place, path in enumerate(paths[row]):
            torch.testing.assert_close(scores[row, place], by_hand(drafter, target, state.feature[row], path))


@torch.no_grad()
def test_losses_of_every_step_are_those_of_the_papers_equations(target: Target) -> None:
    drafter = redrafter(target, loss="ce", max_depth=3)
    batch = batch_of(target, drafter, rows=2, length=9)
    out = drafter(batch, target)
    for k in range(3):
        expected = 0.0
        for row, label in batch.loss_mask.nonzero().tolist():
            anchor = label - 2 - k
            if anchor >= 0:
                told = batch.tokens[row, anchor + 1 : label].tolist()
                scores = by_hand(drafter, target, batch.final[row, anchor], told)
                expected -= float(scores.log_softmax(-1)[batch.tokens[row, label]])
        assert out.sums[k].item() == pytest.approx(expected, rel=1e-5)
    assert out.loss.item() == pytest.approx(float(out.sums.sum() / batch.loss_mask.sum()), rel=1e-6), "unweighted"


@pytest.mark.parametrize("width", [1, 4, 9])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "shared noise"])
@torch.no_grad()
def test_beams_are_those_of_a_brute_force_search(target: Target, width: int, sampled: bool) -> None:
    drafter = redrafter(target, FEW, beam_width=width, max_depth=4)
    state, request = state_of(drafter), request_of(sampled=sampled, temperature=0.8)
    laws = drafter._laws(state.feature, target)
    beams = search_beams(state.root, laws, width, 4, request, drafter.vocabulary)
    tree, law = drafter.propose(state, target, request), law_of(drafter, target, request)
    for row in range(2):
        expected = brute_force(law, FEW, row, int(ROOTS[row]), width, 4)[-1]
        assert [tuple(beam) for beam in beams.tokens[row].tolist()] == list(expected)
        assert beams.values[row].tolist() == pytest.approx(list(expected.values()), abs=1e-4)
        assert paths_in(tree, row) == beginnings(list(expected))


@pytest.mark.parametrize("max_nodes", [2, 3, 6, 10, 17, 40])
@torch.no_grad()
def test_budget_keeps_the_most_probable_beginnings(target: Target, max_nodes: int) -> None:
    drafter = redrafter(target, FEW, beam_width=4, max_depth=4)
    request = request_of(max_nodes=max_nodes)
    tree, law = drafter.propose(state_of(drafter), target, request), law_of(drafter, target, request)
    assert tree.tokens.shape[1] <= max_nodes
    for row in range(2):
        levels = brute_force(law, FEW, row, int(ROOTS[row]), 4, 4)
        if max_nodes <= sum(len(level) for level in levels):
            every = {path: value for level in levels for path, value in level.items()}
            expected = set(sorted(every, key=lambda path: -every[path])[: max_nodes - 1])
        else:
            expected = beginnings(list(levels[-1]))
        assert paths_in(tree, row) == expected


def scripted(monkeypatch: pytest.MonkeyPatch, drafter: RedrafterDrafter, follows: dict[int, dict[int, float]]) -> None:
    """Let the law depend on the last token alone: named children have these probabilities, others none."""
    table = torch.zeros(VOCAB, VOCAB)  # after tokens that are not named anything may come
    for token, after in follows.items():
        table[token] = -torch.inf
        for child, probability in after.items():
            table[token, child] = math.log(probability)
    monkeypatch.setattr(drafter, "_laws", lambda feature, target: lambda tokens, parents: table[tokens])


BRANCHES = {5: {A: 1.0}, A: {B: 0.8, E: 0.2}, B: {C: 0.6, D: 0.4}, E: {G: 1.0}}


def test_equal_beginnings_of_beams_become_one_path(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beams [A, B, C], [A, B, D], [A, E, G]: six nodes instead of nine."""
    drafter = redrafter(target, beam_width=3, max_depth=3)
    scripted(monkeypatch, drafter, BRANCHES)
    tree = drafter.propose(state_of(drafter, 1), target, request_of(1))
    assert tree.tokens.tolist() == [[5, A, B, C, D, E, G]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 2, 1, 5]]
    assert tree.depth.tolist() == [[0, 1, 2, 3, 3, 2, 3]]
    seen = [row.nonzero()[:, 0].tolist() for row in tree.ancestors[0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 5], [0, 1, 5, 6]]
    assert tree.valid.all() and tree.max_depth == 3


def test_impossible_beams_cost_no_nodes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = redrafter(target, beam_width=8, max_depth=3)
    scripted(monkeypatch, drafter, BRANCHES)
    tree = drafter.propose(state_of(drafter, 1), target, request_of(1))
    assert tree.tokens.tolist() == [[5, A, B, C, D, E, G]]


def test_filters_of_the_target_leave_a_chain_where_they_leave_one_token(target: Target) -> None:
    drafter = redrafter(target, beam_width=4, max_depth=3)
    tree = drafter.propose(state_of(drafter), target, request_of(sampled=True, top_k=1))
    assert tree.parents.tolist() == [[-1, 0, 1, 2]] * 2 and tree.valid.all()


def test_rows_that_take_no_part_are_chains(target: Target) -> None:
    drafter = redrafter(target, beam_width=6, max_depth=3)
    request = request_of()
    request.active[1] = False
    tree = drafter.propose(state_of(drafter), target, request)
    assert int(tree.valid[1].sum()) == 4 < int(tree.valid[0].sum())


@pytest.mark.parametrize("max_nodes", [3, 6, 12])
def test_budget_leaves_certain_paths_connected(target: Target, monkeypatch: pytest.MonkeyPatch, max_nodes: int) -> None:
    """Children as probable as their parents, so improbable that a small difference would be rounded away."""
    drafter = redrafter(target, beam_width=17, max_depth=2)
    unlikely = {token: {token + 20: 1.0} for token in range(20, 36)}
    scripted(monkeypatch, drafter, {5: {A: 1.0} | dict.fromkeys(unlikely, 1e-20), A: {B: 1.0}} | unlikely)
    tree = drafter.propose(state_of(drafter, 1), target, request_of(1, max_nodes=max_nodes))
    assert len(paths_in(tree, 0)) == max_nodes - 1
    assert paths_in(tree, 0) <= beginnings([(A, B), *((token, token + 20) for token in unlikely)])


@pytest.mark.parametrize("max_nodes", [None, 2, 5])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_beams_change_no_word_under_any_budget(target: Target, do_sample: bool, max_nodes: int | None) -> None:
    prompts, rules = prompts_of(5, 2, 9), DecodingRules(20, (7,), do_sample=do_sample, seed=3)
    drafter = redrafter(target, beam_width=3)
    out = SpeculativeEngine(target, drafter, max_nodes).generate(prompts, rules)
    assert out.outputs == plain_generate(target, prompts, rules)
    assert max_nodes is None or out.stats.nodes <= max_nodes * out.stats.target_passes


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3-window", "opt"])
def test_fresh_drafter_says_what_the_language_model_head_says_whatever_it_is_told(family: str) -> None:
    target = tiny_target(family)
    drafter = new_drafter("redrafter", target).double()
    assert isinstance(drafter, RedrafterDrafter)
    tokens = torch.tensor([prompts_of(9)[0]])
    final = target.encode(tokens, torch.ones_like(tokens, dtype=torch.bool), ()).final[0]
    with torch.no_grad():
        guessed = drafter._laws(final, target)(tokens.T, torch.zeros(9, 1, dtype=torch.long))[:, 0]
    assert torch.equal(guessed.argmax(-1), target.logits(final).argmax(-1))


def test_fresh_recurrent_cell_learns_from_the_second_step_on(target: Target) -> None:
    drafter = new_drafter("redrafter", target).double().train()
    assert isinstance(drafter, RedrafterDrafter)
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    for moved in (False, True):
        optimizer.zero_grad()
        loss = drafter(batch_of(target, drafter), target).loss
        assert loss is not None
        loss.backward()
        cell = [drafter.read.weight, drafter.recur.weight, drafter.recur.bias]
        assert all(p.grad is not None and bool(p.grad.any()) == moved for p in cell)
        optimizer.step()


def test_depth_at_serving_is_free(target: Target) -> None:
    drafter = redrafter(target, max_depth=8, trained_steps=2)
    batch = batch_of(target, drafter)
    assert drafter.train()(batch, target).sums.shape == (2,)
    out = drafter.eval()(batch, target)
    assert out.sums.shape == (8,) and out.ranks.shape[-1] == 8
    assert drafter.propose(state_of(drafter), target, request_of()).max_depth == 8


def test_deeper_steps_can_weigh_less(target: Target) -> None:
    drafter = redrafter(target, max_depth=2, depth_weight=0.5)
    batch = batch_of(target, drafter)
    out, items = drafter(batch, target), float(batch.loss_mask.sum())
    assert out.loss.item() == pytest.approx((0.5 * out.sums[0] + 0.25 * out.sums[1]).item() / items, rel=1e-6)


def test_chunks_change_neither_loss_nor_gradients(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for size in (64 * 2**20, 4 * VOCAB * 3):
        monkeypatch.setattr("headstart.drafters.losses.CHUNK_BYTES", size)
        drafter = redrafter(target).train()
        out = drafter(batch_of(target, drafter), target)
        out.loss.backward()
        results.append([out.loss.detach(), out.sums, out.hits, *(p.grad for p in drafter.parameters())])
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-6, atol=1e-9)


def test_topology_replaces_beams_and_a_measured_one_does_not(target: Target, tmp_path) -> None:
    drafter, paths = redrafter(target, beam_width=2), [[0], [0, 0], [1]]
    state, request = state_of(drafter), request_of()
    beams = drafter.propose(state, target, request).parents
    drafter.fit_topology(paths)
    assert torch.equal(drafter.propose(state, target, request).parents, beams)
    drafter.set_topology(paths)
    assert drafter.propose(state, target, request).parents.tolist() == [[-1, 0, 0, 1]] * 2
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path).double()
    assert loaded.propose(state, target, request).parents.tolist() == [[-1, 0, 0, 1]] * 2


def test_confidence_goes_before_beams(target: Target) -> None:
    drafter = redrafter(target, beam_width=2)
    drafter.set_dynamic_tree(DynamicTree(nodes=5, depth=2, width=3))
    drafter.fit_topology([[0]])
    tree = drafter.propose(state_of(drafter), target, request_of())
    assert tree.tokens.shape[1] == 5 and tree.max_depth == 2
    drafter.set_dynamic_tree(None)
    assert drafter.propose(state_of(drafter), target, request_of()).max_depth == 5


def test_drawn_nodes_take_the_static_tree(target: Target) -> None:
    drafter, base = redrafter(target), request_of(sampled=True)
    drafter.fit_topology([[0], [1], [0, 0]])
    request = DraftRequest(base.sampling, base.root_positions, base.active, proposal="sampled")
    tree = drafter.propose(state_of(drafter), target, request)
    assert tree.parents.tolist() == [[-1, 0, 0, 1]] * 2
    assert tree.drawn is not None


def test_res_blocks_are_distinct(target: Target) -> None:
    drafter = redrafter(target, num_layers=3)
    weights = [p.data_ptr() for name, p in drafter.named_parameters() if name.endswith("linear.weight")]
    assert len(set(weights)) == 3


@pytest.mark.parametrize(
    "settings",
    [{"num_layers": 0}, {"max_depth": 0}, {"trained_steps": 0}, {"beam_width": 0}, {"loss": "mse"}, {"tree": "chain"}],
    ids=str,
)
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        RedrafterConfig(**settings)
