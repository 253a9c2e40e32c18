"""The rules for sampled text: the laws they emit, against exact ones; wrong rules must fail the same tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_batches import scrambled
from tiny_targets import path_logits, prompts_of, tiny_target
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from headstart import build_drafter
from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.proposals import candidates
from headstart.core.sampling import Sampling
from headstart.core.tree import DraftTree, TreeTopology, from_parents, root_only
from headstart.drafters.growth import static_tree
from headstart.drafters.modules import DraftVocabulary
from headstart.inference import verify
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.state import DecodingRules
from headstart.inference.verify import Lossless, Prefixes, Question, SpeculativeSampling, Typical, Verdict

V, ROWS, ROOT = 6, 40_000, 0
CPU = torch.device("cpu")
CHAIN = TreeTopology.chain(2)
SIBLINGS = TreeTopology.from_paths([(0,), (1,), (2,)])
BUSH = TreeTopology.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1)])
SKIPPING = TreeTopology.from_paths([(1,), (2,), (1, 0), (1, 2)])


def sampling_of(rows: int, seed: int = 0, *processors: object) -> Sampling:
    return Sampling(LogitsProcessorList(processors), KeyedNoise(request_keys(seed, rows, CPU), V))  # type: ignore[arg-type]


def laws(seed: int) -> Tensor:
    """Return log-laws [V, V]: row x is what follows token x."""
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 1.5


def drawn_tree(
    topology: TreeTopology, sampling: Sampling, proposal: str, ids: Tensor | None = None, seed: int = 7
) -> DraftTree:
    """Draw a tree from laws that know the depth only, unlike the target's; ids [Vd]: the draft vocabulary."""
    assert sampling.noise is not None
    rows, size = len(sampling.noise.keys), V if ids is None else len(ids)
    vocabulary = DraftVocabulary(size, V)
    if ids is not None:
        vocabulary.choose(ids)
    scores = laws(seed)[:2, :size].expand(rows, 2, size)
    positions = torch.tensor([[1, 2]]).expand(rows, 2)
    found = candidates(scores, topology.width, proposal, sampling, positions, vocabulary.chosen)
    return static_tree(topology, torch.full((rows,), ROOT), found, vocabulary)


def asked(tree: DraftTree, target: Tensor, sampling: Sampling) -> Question:
    positions = torch.zeros(len(tree.tokens), dtype=torch.long)
    return Question(
        tree, target[tree.tokens], sampling, positions, Prefixes(tree.tokens[:, :1], [1] * len(tree.tokens))
    )


def first_two(tree: DraftTree, target: Tensor, sampling: Sampling, verdict: Verdict) -> Tensor:
    """Return the first two tokens [B, 2] of each row; where a step brought one, the second is the target's own draw."""
    rows = torch.arange(len(tree.tokens))
    one = verdict.lengths == 1
    first = torch.where(one, verdict.bonus, tree.tokens[rows, verdict.nodes[:, min(1, verdict.nodes.shape[1] - 1)]])
    later = asked(root_only(first), target, sampling)
    alone = SpeculativeSampling().verify(replace(later, positions=later.positions + 1)).bonus
    inside = torch.where(
        verdict.lengths == 2, verdict.bonus, tree.tokens[rows, verdict.nodes[:, min(2, verdict.nodes.shape[1] - 1)]]
    )
    return torch.stack([first, torch.where(one, alone, inside)], dim=1)


def deviation(tokens: Tensor, law: Tensor) -> float:
    """Return how many standard deviations chi-square lies above its mean; tokens [B] of the law [M]."""
    expected = law.double() * len(tokens)
    assert bool((expected[law == 0] == 0).all()) and bool(
        (torch.bincount(tokens, minlength=len(law))[law == 0] == 0).all()
    )
    kept = law > 0
    counts = torch.bincount(tokens, minlength=len(law))[kept]
    statistic = ((counts - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = int(kept.sum()) - 1
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def joint_deviation(tokens: Tensor, target: Tensor) -> float:
    law = target[ROOT].softmax(0)[:, None] * target.softmax(1)
    return deviation(tokens[:, 0] * V + tokens[:, 1], law.flatten())


@pytest.mark.parametrize("proposal", ["sampled", "sampled_iid"])
@pytest.mark.parametrize("topology", [CHAIN, SIBLINGS, BUSH, SKIPPING], ids=["chain", "siblings", "bush", "skipping"])
@pytest.mark.parametrize("ids", [None, torch.tensor([0, 2, 3, 5])], ids=["whole vocabulary", "draft vocabulary"])
def test_speculative_sampling_emits_the_targets_joint_law(
    proposal: str, topology: TreeTopology, ids: Tensor | None
) -> None:
    target, sampling = laws(3), sampling_of(ROWS)
    tree = drawn_tree(topology, sampling, proposal, ids)
    verdict = SpeculativeSampling().verify(asked(tree, target, sampling))
    assert joint_deviation(first_two(tree, target, sampling, verdict), target) < 4
    assert 1.2 < float(verdict.lengths.float().mean()) < 3


def test_lossless_emits_the_targets_joint_law_for_any_proposal() -> None:
    target, sampling = laws(3), sampling_of(ROWS)
    texts = []
    for proposal in ("sampled", "sampled_iid", "top_k", "shared_noise"):
        tree = drawn_tree(BUSH, sampling, proposal)
        verdict = Lossless().verify(asked(tree, target, sampling))
        tokens = first_two(tree, target, sampling, verdict)
        assert deviation(tokens[:, 0], target[ROOT].softmax(0)) < 4
        texts.append(tokens[:, 0])
    assert all(torch.equal(text, texts[0]) for text in texts), "the text does not depend on what was guessed"


def test_acceptance_is_one_less_total_variation_for_a_single_guess() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0]), torch.tensor([0.2, 0.2, 0.6, 0, 0, 0])
    sampling = sampling_of(ROWS)
    assert sampling.noise is not None
    positions = torch.ones(ROWS, 1, dtype=torch.long)
    found = candidates(q.log().expand(ROWS, 1, V), 1, "sampled", sampling, positions, None)
    tree = static_tree(TreeTopology.chain(1), torch.zeros(ROWS, dtype=torch.long), found, DraftVocabulary(None, V))
    verdict = SpeculativeSampling().verify(asked(tree, p.log().expand(V, V), sampling))
    assert float((verdict.lengths == 2).float().mean()) == pytest.approx(0.6, abs=0.01)
    residual = verify._residual(p[None], q[None], None)[0]
    assert torch.allclose(residual, torch.tensor([0.75, 0.25, 0, 0, 0, 0]))
    assert deviation(verdict.bonus[verdict.lengths == 1], residual) < 4


def test_second_sibling_is_judged_by_what_the_first_left_of_both_laws() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2, 0, 0, 0]), torch.tensor([0.2, 0.2, 0.6, 0, 0, 0])
    sampling = sampling_of(ROWS)
    tree = from_parents(torch.tensor([[ROOT, 2, 0]]).repeat(ROWS, 1), torch.tensor([[-1, 0, 0]]).repeat(ROWS, 1))
    group = torch.zeros(ROWS, 3, dtype=torch.long)
    drawn = verify.DrawnFrom(q.expand(ROWS, 1, V), group, None, replacement=False)
    verdict = SpeculativeSampling().verify(asked(replace(tree, drawn=drawn), p.log().expand(V, V), sampling))
    accepted = verdict.nodes[:, 1][verdict.lengths == 2]
    assert float((accepted == 1).sum() / ROWS) == pytest.approx(1 / 3, abs=0.01)
    assert len(accepted) == ROWS, "after token 2 is rejected, 0 is accepted with min(1, .75 / .5)"


def _sorted_by_probability(tree: DraftTree) -> DraftTree:
    """Put siblings in order of the law instead of draw order: wrong."""
    assert tree.drawn is not None
    draft = tree.tokens[:, 1:]
    order = tree.drawn.law[:, 0].gather(1, draft).argsort(dim=1, descending=True)
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], draft.gather(1, order)], dim=1))


def _likeliest_as_if_drawn(tree: DraftTree) -> DraftTree:
    """Take the top of the law and test it as if it had been drawn: wrong."""
    assert tree.drawn is not None
    top = tree.drawn.law[:, 0].topk(tree.tokens.shape[1] - 1).indices
    return replace(tree, tokens=torch.cat([tree.tokens[:, :1], top], dim=1))


def _without_duplicates(tree: DraftTree) -> DraftTree:
    """Drop independent draws that repeat an earlier one: wrong, the duplicate still owes its share."""
    draft = tree.tokens[:, 1:]
    repeats = torch.stack([(draft[:, :i] == draft[:, i : i + 1]).any(1) for i in range(draft.shape[1])], dim=1)
    return replace(tree, valid=torch.cat([tree.valid[:, :1], tree.valid[:, 1:] & ~repeats], dim=1))


def _without_unlikely(tree: DraftTree) -> DraftTree:
    """Drop draws because their own probability is small: wrong."""
    assert tree.drawn is not None
    unlikely = tree.drawn.law[:, 0].gather(1, tree.tokens[:, 1:]) < 0.12
    return replace(tree, valid=torch.cat([tree.valid[:, :1], tree.valid[:, 1:] & ~unlikely], dim=1))


@pytest.mark.parametrize(
    ("spoil", "proposal"),
    [
        (_sorted_by_probability, "sampled"),
        (_likeliest_as_if_drawn, "sampled"),
        (_without_duplicates, "sampled_iid"),
        (_without_unlikely, "sampled"),
    ],
)
def test_chi_square_catches_the_well_known_mistakes(spoil: Callable[[DraftTree], DraftTree], proposal: str) -> None:
    target, sampling = laws(3), sampling_of(ROWS)
    tree = spoil(drawn_tree(SIBLINGS, sampling, proposal))
    verdict = SpeculativeSampling().verify(asked(tree, target, sampling))
    assert joint_deviation(first_two(tree, target, sampling, verdict), target) > 8


def test_filters_that_leave_fewer_tokens_than_siblings_give_fewer_nodes() -> None:
    sampling = sampling_of(ROWS, 0, TemperatureLogitsWarper(0.8), TopKLogitsWarper(2))
    tree = drawn_tree(SIBLINGS, sampling, "sampled")
    assert tree.valid.sum(1).tolist() == [3] * ROWS and tree.drawn is not None
    assert torch.allclose(tree.drawn.law.sum(-1), torch.ones(ROWS, 2))
    target = laws(3)
    verdict = SpeculativeSampling().verify(asked(tree, target, sampling))
    warped = sampling.narrow(target).softmax(1)
    tokens = first_two(tree, target, sampling, verdict)
    law = (warped[ROOT][:, None] * warped).flatten()
    assert deviation(tokens[:, 0] * V + tokens[:, 1], law) < 4


def test_siblings_drawn_without_replacement_are_distinct_and_independent_ones_may_repeat() -> None:
    sampling = sampling_of(2_000)
    distinct = drawn_tree(SIBLINGS, sampling, "sampled").tokens[:, 1:]
    assert all(len(set(row)) == 3 for row in distinct.tolist())
    independent = drawn_tree(SIBLINGS, sampling, "sampled_iid").tokens[:, 1:]
    assert any(len(set(row)) < 3 for row in independent.tolist())
    for place in range(3):
        assert deviation(independent[:, place], laws(7)[0].softmax(0)) < 4


def test_trees_of_chosen_nodes_are_refused_by_the_classic_rule() -> None:
    sampling = sampling_of(2)
    with pytest.raises(ValueError, match="sampled"):
        SpeculativeSampling().verify(asked(drawn_tree(CHAIN, sampling, "top_k"), laws(1), sampling))


def test_typical_keeps_the_deepest_path_of_likely_tokens_and_then_the_likeliest() -> None:
    parents = torch.tensor([[-1, 0, 0, 1, 2]])
    tree = from_parents(torch.tensor([[ROOT, 1, 2, 3, 4]]), parents)
    law = torch.full((V, V), 1 / V)
    law[0] = torch.tensor([0.02, 0.4, 0.5, 0.04, 0.02, 0.02])
    law[1] = torch.tensor([0.1, 0.1, 0.1, 0.5, 0.1, 0.1])
    law[2] = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.5, 0.1])
    sampling = sampling_of(1)
    verdict = Typical().verify(asked(tree, law.log(), sampling))
    assert verdict.nodes.tolist() == [[0, 2, 4]], "both branches pass to depth 2; .5 * .5 beats .4 * .5"
    law[2] = torch.tensor([0.01, 0.01, 0.01, 0.95, 0.01, 0.01])
    assert Typical().verify(asked(tree, law.log(), sampling)).nodes.tolist() == [[0, 1, 3]], "token 4 is untypical"
    law[0] = torch.tensor([0.99, 0.002, 0.002, 0.002, 0.002, 0.002])
    stopped = Typical().verify(asked(tree, law.log(), sampling))
    assert stopped.lengths.tolist() == [1]
    assert not Typical.lossless and Lossless.lossless and SpeculativeSampling.lossless


def test_typical_reads_each_nodes_own_prefix() -> None:
    seen: list[list[int]] = []

    def spy(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids[0].tolist())
        return scores

    tree = from_parents(torch.tensor([[ROOT, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]))
    Typical().verify(asked(tree, laws(1), sampling_of(1, 0, spy)))
    assert seen == [[0], [0, 1], [0, 2], [0, 2, 3]]


@pytest.mark.parametrize("acceptance", ["speculative_sampling", "typical"])
def test_rules_are_greedy_where_nothing_is_drawn(acceptance: str) -> None:
    target, prompts = tiny_target("llama"), prompts_of(5, 9)
    drafter = scrambled(build_drafter("medusa", target.model, num_heads=3)).double()
    told = SpeculativeEngine(target, drafter).generate(prompts, DecodingRules(12)).outputs
    assert (
        SpeculativeEngine(target, drafter, acceptance=acceptance).generate(prompts, DecodingRules(12)).outputs == told
    )


@pytest.mark.parametrize("proposal", ["sampled", "sampled_iid"])
def test_engine_with_the_classic_rule_follows_the_targets_law(proposal: str) -> None:
    target, prompt, rows = tiny_target("llama"), prompts_of(5)[0], 4_000
    law = LogitsProcessorList([TemperatureLogitsWarper(0.9), TopKLogitsWarper(6)])
    drafter = build_drafter("medusa", target.model, num_heads=2)
    drafter.set_topology([(0,), (1,), (0, 0), (1, 0)])
    engine = SpeculativeEngine(target, drafter.double(), acceptance="speculative_sampling", proposal=proposal)
    state = engine.generate([prompt] * rows, DecodingRules(3, processors=law, do_sample=True, seed=1))
    texts = torch.tensor(state.outputs)
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, mass in exact.items():
            scores = Sampling(law, None).process(path_logits(target, [*prompt, *text])[-1:], lambda _: prompt)  # type: ignore
            for token, share in enumerate(scores.softmax(-1)[0].tolist()):
                if share > 0:
                    longer[(*text, token)] = mass * share
        exact = longer
    cells = {text: index for index, text in enumerate(exact)}
    found = torch.tensor([cells[tuple(text)] for text in texts.tolist()])
    assert deviation(found, torch.tensor(list(exact.values()))) < 4
    assert state.stats.tokens_per_step > 1.02
    again = engine.generate([prompt] * 3, DecodingRules(3, processors=law, do_sample=True, seed=1)).outputs
    assert again == state.outputs[:3], "a row's text does not depend on the batch"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"acceptance": "lenient"}, "acceptance"),
        ({"proposal": "beams"}, "proposal"),
        ({"acceptance": "speculative_sampling", "proposal": "top_k"}, "sampled"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict, said: str) -> None:
    target = tiny_target("llama")
    with pytest.raises(ValueError, match=said):
        SpeculativeEngine(target, build_drafter("medusa", target.model, num_heads=2), **settings)
