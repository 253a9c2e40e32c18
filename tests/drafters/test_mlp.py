"""The MLP speculator's own promises: the paper's equation, what its steps share, and where it starts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import batch_of_followers, learnt_by_heart, processors, scrambled
from tiny_targets import VOCAB, WIDTH
from torch import Tensor

from headstart.core.sampling import Sampling
from headstart.core.tree import DynamicTree
from headstart.drafters.base import DraftRequest, Observed
from headstart.drafters.mlp import MlpConfig, MlpDrafter
from headstart.drafters.modules import normalise
from headstart.drafters.registry import new_drafter
from headstart.inference.target import Target


def mlp(target: Target, **settings) -> MlpDrafter:
    drafter = new_drafter("mlp", target, settings.pop("draft_vocabulary", None), **settings)
    assert isinstance(drafter, MlpDrafter)
    return drafter.double()


def scores_along(drafter: MlpDrafter, z: Tensor, path: list[int], target: Target) -> Tensor:
    """Return the scores [Vd] after a path of tokens, one step a token, from a state z [D]."""
    state = drafter._first(z)
    for step, token in enumerate(path):
        state = drafter._step(step, state, torch.tensor(token), target)
    return drafter._scores(len(path) - 1, state)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_steps_are_the_papers_equation(target: Target, tied: bool) -> None:
    """s_k = GELU(LN(w_s W s_(k-1) + w_e E(x_k))) with w_s = 0.5^(0.5 / 3) and w_e = sqrt((1 - w_s^2) 40 / 2)."""
    drafter = scrambled(mlp(target, num_steps=3, inner_size=40, tie_weights=tied, embedding="own"))
    weights = {name: p.detach() for name, p in drafter.named_parameters()}
    z, path = torch.randn(WIDTH, dtype=torch.float64), [11, 4, 60]
    w_s = 0.5 ** (0.5 / 3)
    w_e = ((1 - w_s**2) * 40 / 2) ** 0.5
    s = z / z.pow(2).mean().sqrt() / 2**0.5
    for k, token in enumerate(path):
        own = 0 if tied else k
        x = w_s * weights[f"mixers.{min(k, 1) if tied else k}.weight"] @ s
        x = x + w_e * weights[f"embeddings.{own}.weight"][token]
        x = x / x.pow(2).mean().sqrt() * weights[f"norms.{own}.weight"] + weights[f"norms.{own}.bias"]
        s = F.gelu(x)
        expected = weights["logit_scale.log"][own].exp() * weights[f"heads.{own}.weight"] @ s
        with torch.no_grad():
            found = scores_along(drafter, z, path[: k + 1], target)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_mixing_weights_keep_the_variance_and_half_of_the_first_state(target: Target, steps: int) -> None:
    drafter = mlp(target, num_steps=steps, inner_size=48)
    assert drafter.state_weight**2 / 2 + drafter.token_weight**2 / 48 == pytest.approx(0.5)
    assert (drafter.state_weight**2) ** steps == pytest.approx(0.5)


@pytest.mark.parametrize("embedding", ["target", "own"])
def test_fresh_embeddings_have_unit_length_whatever_the_target(target: Target, embedding: str) -> None:
    torch.manual_seed(1)
    drafter = mlp(target, inner_size=WIDTH, embedding=embedding)
    if embedding == "own":
        told = drafter.embeddings[0].weight
    else:
        every = normalise(target.embed(torch.arange(VOCAB)))
        told = drafter.embeddings[0](every) * drafter.unit_length
    lengths = told.detach().norm(dim=-1)  # type: ignore[operator]
    assert float(lengths.mean()) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("inner", [WIDTH, 40])
def test_fresh_heads_are_the_targets_own_in_the_space_of_the_first_map(target: Target, inner: int) -> None:
    ids = torch.arange(0, VOCAB, 3)
    drafter = mlp(target, inner_size=inner, draft_vocabulary=ids)
    with torch.no_grad():
        found = drafter.heads[0](drafter.mixers[0](torch.eye(WIDTH).double())).T
    torch.testing.assert_close(found, target.head_rows(ids).double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("embedding", ["target", "own"])
def test_steps_learn_from_the_tokens_that_they_are_told(target: Target, embedding: str) -> None:
    """Every token follows from the one before it alone, and the states say nothing."""
    torch.manual_seed(0)
    drafter = mlp(target, num_steps=3, loss="ce", embedding=embedding).train()
    hits, counts = learnt_by_heart(drafter, batch_of_followers(), target)
    assert hits == counts == [VOCAB * 5, VOCAB * 4, VOCAB * 3]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_children_of_a_node_are_the_best_after_its_path(target: Target, dynamic: bool, tied: bool) -> None:
    drafter = scrambled(mlp(target, num_steps=3, tie_weights=tied, inner_size=40))
    drafter.set_topology([[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 0, 0], [2, 0, 1]])
    drafter.set_dynamic_tree(DynamicTree(10, 3, 2) if dynamic else None)
    state, positions = drafter.init_state(2), torch.arange(4).expand(2, -1)
    features = torch.randn(2, 4, 1, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    told = Observed(positions + 1, positions + 2, features, positions, torch.tensor([4, 2]))
    drafter.observe(told, state, target)
    active = torch.ones(2, dtype=torch.bool)
    request = DraftRequest(Sampling(processors(), None), torch.tensor([4, 2]), active, proposal="top_k")
    tree = drafter.propose(state, target, request)
    checked = 0
    for row, last in enumerate((3, 1)):
        for node in range(tree.tokens.shape[1]):
            children = tree.tokens[row, tree.parents[row] == node].tolist()
            if not children:
                continue
            path = tree.tokens[row, tree.ancestors[row, node]].tolist()
            with torch.no_grad():
                scores = scores_along(drafter, features[row, last, 0], path, target)
            assert set(children) == set(scores.topk(len(children)).indices.tolist())
            checked += 1
    assert checked >= 6


def test_tied_steps_share_everything_but_the_first_map(target: Target) -> None:
    shared = mlp(target, num_steps=5, inner_size=40)
    assert [len(part) for part in (shared.mixers, shared.embeddings, shared.norms, shared.heads)] == [2, 1, 1, 1]
    apart = mlp(target, num_steps=5, inner_size=40, tie_weights=False)
    assert [len(part) for part in (apart.mixers, apart.embeddings, apart.norms, apart.heads)] == [5] * 4
    assert len({p.data_ptr() for p in apart.parameters()}) == 5 * 5 + 1


def test_only_own_tables_cost_the_size_of_the_vocabulary(target: Target) -> None:
    ids = torch.arange(8)
    borrowed = mlp(target, draft_vocabulary=ids)
    assert max(p.numel() for p in borrowed.parameters()) == WIDTH * WIDTH
    own = mlp(target, draft_vocabulary=ids, embedding="own", inner_size=20)
    assert own.embeddings[0].weight.shape == (VOCAB, 20)


@pytest.mark.parametrize(
    "settings", [{"num_steps": 0}, {"inner_size": 0}, {"embedding": "both"}, {"loss": "mse"}], ids=str
)
def test_settings_without_sense_are_refused_with_the_ones_that_have(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"must be .*but"):
        MlpConfig(**settings)
