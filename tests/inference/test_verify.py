"""The walk down the tree, against a brute-force reading of the rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessor, LogitsProcessorList

from headstart.core.noise import KeyedNoise, request_keys
from headstart.core.sampling import Sampling
from headstart.core.tree import DrawnFrom, from_parents
from headstart.inference import verify
from headstart.inference.verify import Lossless, Prefixes, Question, SpeculativeSampling, Verdict

VOCAB = 4
GREEDY = Sampling(LogitsProcessorList(), None)


def prefixes_of(*rows: list[int]) -> Prefixes:
    longest = max(len(row) for row in rows)
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return Prefixes(tokens, [len(row) for row in rows])


def walk(tokens: list[int], parents: list[int], valid: list[bool], picks: list[int]) -> tuple[list[int], int]:
    """Return the accepted path and the bonus token: follow the picks while a valid child holds them."""
    node, path = 0, [0]
    while True:
        children = [i for i in range(len(tokens)) if parents[i] == node and valid[i] and tokens[i] == picks[node]]
        if not children:
            return path, picks[node]
        node = children[0]
        path.append(node)


def paths_of(verdict: Verdict) -> list[tuple[list[int], int]]:
    kept = zip(verdict.nodes.tolist(), verdict.lengths.tolist(), verdict.bonus.tolist(), strict=True)
    return [(nodes[:length], bonus) for nodes, length, bonus in kept]


def test_walk_follows_the_targets_picks_and_ends_with_its_own_token() -> None:
    tree = from_parents(torch.tensor([[1, 5, 8]]), torch.tensor([[-1, 0, 0]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[8, 0, 3]]), 10).double()
    verdict = Lossless().verify(Question(tree, logits, GREEDY, torch.tensor([6]), prefixes_of([1])))
    assert paths_of(verdict) == [([0, 2], 3)]


def test_deepest_leaf_still_brings_a_bonus_token() -> None:
    tree = from_parents(torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 1]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 3, 7]]), 10).double()
    assert paths_of(Lossless().verify(Question(tree, logits, GREEDY, torch.tensor([0]), prefixes_of([1])))) == [
        ([0, 1, 2], 7)
    ]


TREES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, VOCAB - 1), st.booleans()), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(TREES, min_size=1, max_size=3), st.integers(0, 10**6), st.booleans())
def test_verdict_is_the_brute_force_walk_in_every_row(
    rows: list[list[tuple[int, int, bool]]], seed: int, sampled: bool
) -> None:
    nodes = 1 + max(len(row) for row in rows)
    tokens = [[0] + [token for _, token, _ in row] + [1] * (nodes - 1 - len(row)) for row in rows]
    parents = [
        [-1] + [choice % (i + 1) for i, (choice, _, _) in enumerate(row)] + [0] * (nodes - 1 - len(row)) for row in rows
    ]
    valid = [[True] + [ok for _, _, ok in row] + [False] * (nodes - 1 - len(row)) for row in rows]
    tree = from_parents(torch.tensor(tokens), torch.tensor(parents), torch.tensor(valid))
    logits = torch.randn(len(rows), nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    noise = KeyedNoise(request_keys(seed, len(rows), torch.device("cpu")), VOCAB) if sampled else None
    roots = torch.arange(len(rows)) * 3 + 2

    sampling, prefixes = Sampling(LogitsProcessorList(), noise), prefixes_of(*[[0]] * len(rows))
    verdict = Lossless().verify(Question(tree, logits, sampling, roots, prefixes))

    scores = logits if noise is None else logits + noise(roots[:, None] + tree.depth + 1)
    picks = scores.argmax(-1).tolist()
    assert paths_of(verdict) == [walk(*row) for row in zip(tokens, parents, valid, picks, strict=True)]
    padding = torch.arange(verdict.nodes.shape[1])[None] >= verdict.lengths[:, None]
    assert bool((verdict.nodes[padding] == 0).all())


class _HostReads(TorchDispatchMode):
    """Counts the single values that the host reads; on an accelerator each would wait for the device."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("replacement", [False, True])
def test_drawn_nodes_are_tried_alike_without_a_look_at_every_level(monkeypatch, replacement: bool) -> None:
    rows, parents = 40, torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4])
    tokens = torch.tensor([0, 1, 2, 3, 0, 2, 1, 3]).expand(rows, -1)
    valid = torch.rand(rows, len(parents), generator=torch.Generator().manual_seed(4)) < 0.8
    valid[:, 0] = True
    tree = from_parents(tokens, parents.expand(rows, -1), valid)
    laws = torch.rand(2, rows, len(parents), VOCAB, generator=torch.Generator().manual_seed(5)).softmax(-1)
    drawn = DrawnFrom(laws[0], parents.clamp(min=0).expand(rows, -1), None, replacement)
    noise = KeyedNoise(request_keys(6, rows, torch.device("cpu")), VOCAB)
    question = Question(
        replace(tree, drawn=drawn),
        laws[1].log(),
        Sampling(LogitsProcessorList(), noise),
        torch.zeros(rows, dtype=torch.long),
        prefixes_of(*[[0]] * rows),
    )
    looking = SpeculativeSampling().verify(question)
    monkeypatch.setattr(verify, "_seen_to_be_none", lambda rows: False)  # as on an accelerator
    with _HostReads() as reads:
        blind = SpeculativeSampling().verify(question)
    assert reads.count == 0, "one list of siblings by depth is all that a step asks for"
    assert paths_of(blind) == paths_of(looking)
    assert set(looking.lengths.tolist()) == {1, 2, 3, 4}


class _Recorder(LogitsProcessor):
    """Keeps the prefixes it is shown, and changes nothing."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        self.prefixes += input_ids.tolist()
        return scores


def test_processors_are_shown_the_true_tokens_up_to_and_including_the_node() -> None:
    recorder = _Recorder()
    tree = from_parents(torch.tensor([[3, 1, 2, 2], [2, 3, 1, 0]]), torch.tensor([[-1, 0, 0, 2], [-1, 0, 0, 0]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 0, 2, 0], [0, 0, 0, 1]]), VOCAB).float()
    sampling = Sampling(LogitsProcessorList([recorder]), None)
    question = Question(tree, logits, sampling, torch.tensor([2, 0]), prefixes_of([7, 8, 3], [2]))
    verdict = Lossless().verify(question)
    assert paths_of(verdict) == [([0, 2, 3], 0), ([0, 3], 1)]
    first = [prefix for prefix in recorder.prefixes if prefix[0] == 7]
    second = [prefix for prefix in recorder.prefixes if prefix[0] == 2]
    assert first == [[7, 8, 3], [7, 8, 3, 2], [7, 8, 3, 2, 2]]
    assert second == [[2], [2, 0], [2, 0]], "a row that has stopped is shown its last node again"
