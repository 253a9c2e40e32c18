"""A drafter with ranked candidates that follows any static tree, and a saved target and drafter for whole commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_targets import COMMON, VOCAB, WIDTH, make_model, own_text, prompts_of
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor

from headstart.core.tree import DraftTree, TreeTopology, topology_builder
from headstart.drafters.base import (
    DraftBatch,
    Drafter,
    DraftRequest,
    DraftState,
    LossOutput,
    Observed,
    TargetView,
)
from headstart.drafters.config import DrafterConfig
from headstart.inference.bench.prompts import BenchPrompt, PromptSet
from headstart.inference.target import Target

DEPTHS = 3
OWN_TREE = [[0], [3], [0, 0]]


@dataclass
class PairState(DraftState):
    """last [B, 2] long: each row's last two tokens, the root included."""

    last: Tensor


class RankedDrafter(Drafter):
    """Knows how the texts go on after any two tokens, and puts what is coming at a rank of 0 to 4 that depends on them.

    clock: called with the depth of every tree that is drawn, for tests that replace the real one.
    """

    def __init__(self, texts: Sequence[Sequence[int]], clock=lambda depth: None) -> None:
        super().__init__(DrafterConfig(target_vocab_size=VOCAB, target_width=WIDTH))
        self.table = {(a, b): c for text in texts for a, b, c in zip(text, text[1:], text[2:], strict=False)}
        self.clock = clock
        self.set_topology(OWN_TREE)

    @property
    def feature_layers(self) -> tuple[int | str, ...]:
        return ("final",)

    def set_topology(self, paths: Sequence[Sequence[int]]) -> None:
        self.topology = TreeTopology.from_paths(paths).cut(max_depth=DEPTHS)
        self.config.topology = self.topology.paths()

    def initialise_from(self, target: TargetView) -> None:
        pass

    def init_state(self, batch_size: int) -> PairState:
        return PairState(torch.zeros(batch_size, 2, dtype=torch.long))

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        assert isinstance(state, PairState)
        rows, last = torch.arange(len(observed.lengths)), (observed.lengths - 1).clamp(min=0)
        pair = torch.stack([observed.read_tokens[rows, last], observed.next_tokens[rows, last]], dim=1)
        state.last = torch.where((observed.lengths > 0)[:, None], pair, state.last)

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        assert isinstance(state, PairState) and self.topology is not None
        topology = self.topology.cut(request.max_nodes, request.max_depth)
        self.clock(topology.depth)
        ranked = torch.tensor([self._ranked(a, b, topology.depth) for a, b in state.last.tolist()])
        return topology_builder(topology, ranked.device).build(state.last[:, 1], ranked)

    def _ranked(self, a: int, b: int, depths: int) -> list[list[int]]:
        candidates = []
        for depth in range(depths):
            rank = (3 * a + b + depth) % 5
            a, b = b, self.table.get((a, b), 0)
            others = [(b + 1 + i) % VOCAB for i in range(VOCAB - 1)]
            candidates.append([*others[:rank], b, *others[rank:]])
        return candidates

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        raise NotImplementedError("test drafters are not trained")


@pytest.fixture
def prompts() -> list[list[int]]:
    return prompts_of(7, 4, 9, 5)


@pytest.fixture
def drafter(target: Target, prompts: list[list[int]]) -> RankedDrafter:
    return RankedDrafter(own_text(target, prompts, 24))


@pytest.fixture
def prompt_set(prompts: list[list[int]]) -> PromptSet:
    rows = [BenchPrompt(f"p{i}", kind, "en", ids) for i, (kind, ids) in enumerate(zip("abab", prompts, strict=True))]
    return PromptSet(rows, "made up", None, 0)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Save a tiny target with its tokenizer, fresh heads for it, and prompts; return their places."""
    from headstart.drafters.registry import new_drafter

    model = make_model("llama", COMMON | {"max_position_embeddings": 128, "eos_token_id": 2})
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    new_drafter("medusa", Target(model), num_heads=2).save_pretrained(tmp_path / "heads")
    lines = [
        '{"id": "a", "category": "writing", "turns": ["one two three"]}',
        '{"id": "b", "category": "qa", "turns": ["five six"]}',
        '{"id": "c", "category": "qa", "turns": ["seven eight nine ten"]}',
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {name: tmp_path / name for name in ("target", "heads", "prompts.jsonl")}
