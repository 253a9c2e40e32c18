"""A drafter that guesses from pairs of tokens, prompts, and a saved target with a tokenizer for whole commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_targets import COMMON, VOCAB, WIDTH, make_model, own_text, prompts_of
from tiny_tokenizer import tiny_tokenizer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from headstart.core.tree import DraftTree, chain, root_only
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


@dataclass
class PairState(DraftState):
    """last [B, 2] long: each row's last two tokens, the root included."""

    last: Tensor


class PairDrafter(Drafter):
    """Guesses a chain from the texts it was told, by the last two tokens; it also does one matrix product a step."""

    def __init__(self, texts: Sequence[Sequence[int]], depth: int = 3) -> None:
        super().__init__(DrafterConfig(target_vocab_size=VOCAB, target_width=WIDTH))
        self.table = {(a, b): c for text in texts for a, b, c in zip(text, text[1:], text[2:], strict=False)}
        self.depth = depth
        self.linear = nn.Linear(4, 4)

    @property
    def feature_layers(self) -> tuple[int | str, ...]:
        return ("final",)

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
        assert isinstance(state, PairState)
        self.linear(torch.zeros(1, 4))
        target.logits(torch.zeros(1, WIDTH, dtype=target.dtype))
        depth = min(self.depth, request.max_depth if request.max_depth is not None else self.depth)
        if depth < 1:
            return root_only(state.last[:, 1])
        guesses = []
        for a, b in state.last.tolist():
            row = []
            for _ in range(depth):
                a, b = b, self.table.get((a, b), 0)
                row.append(b)
            guesses.append(row)
        return chain(state.last[:, 1], torch.tensor(guesses))

    def forward(self, batch: DraftBatch, target: TargetView, num_items: Tensor | None = None) -> LossOutput:
        raise NotImplementedError("test drafters are not trained")


@pytest.fixture
def prompts() -> list[list[int]]:
    return prompts_of(7, 4, 9, 5)


@pytest.fixture
def drafter(target: Target, prompts: list[list[int]]) -> PairDrafter:
    return PairDrafter(own_text(target, prompts, 20))


@pytest.fixture
def prompt_set(prompts: list[list[int]]) -> PromptSet:
    kinds = ("maths", "code", "maths", "code")
    rows = [BenchPrompt(f"p{i}", kind, "en", ids) for i, (kind, ids) in enumerate(zip(kinds, prompts, strict=True))]
    return PromptSet(rows, "made up", None, 0)


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, words: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Save a tiny target with its tokenizer, a fresh drafter for it, and prompts; return their places."""
    from headstart.drafters.registry import new_drafter

    folder = tmp_path_factory.mktemp("saved")
    model = make_model("llama", COMMON | {"max_position_embeddings": 128, "eos_token_id": 2})
    model.save_pretrained(folder / "target")
    words.save_pretrained(folder / "target")
    new_drafter("medusa", Target(model), num_heads=2).save_pretrained(folder / "heads")
    lines = [
        '{"question_id": 81, "category": "writing", "turns": ["one two three", "four"]}',
        '{"question_id": 82, "category": "qa", "messages": [{"role": "user", "content": "five six"}]}',
        '{"question_id": 83, "category": "qa", "turns": ["seven eight nine ten"]}',
    ]
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"target": folder / "target", "heads": folder / "heads", "prompts": folder / "prompts.jsonl"}
