"""What the engine is told of a call, and what a batch carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..core.kv_cache import RaggedCache
from ..core.sampling import Sampling
from ..drafters.base import DraftState
from .stats import GenerationStats

StopCriterion = Callable[..., Tensor | bool]
"""transformers' StoppingCriteria: called with a row's tokens [1, P] and None; answers with a bool, or a tensor."""


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """How rows draw their tokens and where they end.

    max_new_tokens: one bound, or one a row. eos_token_ids: ids that end a row.
    processors: transformers' logits processors in transformers' order; a tuple has one list a row, of the same kinds.
    do_sample: keyed draws instead of argmax. seed: int, or one per row; see `request_keys`.
    criteria: transformers' stopping criteria beyond ids and lengths, asked after every token of a row.
    keep_logits: keep the target's raw logits of every emitted token.
    holds_slots: finished rows stay in the batch, as places for `SpeculativeEngine.admit`.
    """

    max_new_tokens: int | Sequence[int]
    eos_token_ids: Sequence[int] = ()
    processors: LogitsProcessorList | tuple[LogitsProcessorList, ...] | None = None
    do_sample: bool = False
    seed: int | Sequence[int] | None = None
    criteria: Sequence[StopCriterion] = ()
    keep_logits: bool = False
    holds_slots: bool = False


class Emitted(NamedTuple):
    """What a row gained in a step: tokens, draft tokens among them, its tree's depth; whether its path lay in place."""

    count: int
    accepted: int
    depth: int
    in_place: bool


@dataclass
class EngineState:
    """Everything a batch carries from step to step. Device tensors have rows first.

    tokens [B, cap + 1] long: committed tokens, the root last (the extra column takes masked writes).
    lengths [B] long: committed tokens, root included. limits [B] long: length at which a row stops.
    active [B] bool. order: the caller's row of each row here. outputs: new tokens of each of the caller's rows; so are
    prompt_lengths, budgets (most new tokens), finish_reasons ("stop", "length", or as `stop` was told) and
    logits (raw [V] of each new token, where kept).
    holds_slots: as in the rules, until the caller has no more to admit.
    """

    rules: DecodingRules
    tokens: Tensor
    lengths: Tensor
    limits: Tensor
    active: Tensor
    cache: RaggedCache
    draft: DraftState | None
    sampling: Sampling
    eos: Tensor
    order: list[int]
    outputs: list[list[int]]
    prompt_lengths: list[int]
    budgets: list[int]
    finish_reasons: list[str | None]
    logits: list[list[Tensor]]
    holds_slots: bool = False
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def unfinished(self) -> list[int]:
        """The caller's rows that go on."""
        return [row for row in self.order if self.finish_reasons[row] is None]

    @property
    def free_slots(self) -> list[int]:
        """Places of finished rows in the batch."""
        return [place for place, row in enumerate(self.order) if self.finish_reasons[row] is not None]

    @property
    def done(self) -> bool:
        """Whether every row has finished."""
        return not self.unfinished

    @property
    def remaining(self) -> int:
        """The most tokens that any unfinished row may still gain."""
        return max(self.budgets[row] - len(self.outputs[row]) for row in self.unfinished)

    @property
    def host_lengths(self) -> list[int]:
        """Committed tokens, root included, of each row here; known without asking the device."""
        return [self.prompt_lengths[row] + len(self.outputs[row]) for row in self.order]

    @property
    def last_position(self) -> int:
        """The last position that any row here could fill."""
        return self.tokens.shape[1] - 2

    @property
    def root_positions(self) -> Tensor:
        """Position of each row's root [B] long; also the number of its tokens in the cache."""
        return self.lengths - 1

    def keep_logits(self, logits: Tensor, nodes: Tensor, counts: Sequence[int]) -> None:
        """Keep the raw logits of what was emitted, if the rules ask for it: those of the nodes on each row's path.

        logits [B, N, V]; nodes [B, A] long: each row's path; counts: how many of them count.
        """
        if self.rules.keep_logits:
            for place, (row, count) in enumerate(zip(self.order, counts, strict=True)):
                self.logits[row].extend(logits[place, nodes[place, :count]].unbind(0))

    def take_rows(self, places: list[int]) -> None:
        """Keep the rows at the given places, in that order."""
        rows = torch.tensor(places, device=self.tokens.device)
        self.order = [self.order[place] for place in places]
        self.tokens, self.lengths, self.limits = self.tokens[rows], self.lengths[rows], self.limits[rows]
        self.active = self.active[rows]
        self.cache.take_rows(rows)
        self.sampling = self.sampling.take_rows(places)
        if self.draft is not None:
            self.draft = self.draft.take_rows(rows)

    def replace_rows(self, places: list[int], other: EngineState) -> None:
        """Give the places of finished rows over to another batch, whose rows are numbered on after the caller's own."""
        rows = torch.tensor(places, device=self.tokens.device)
        offset, columns = len(self.outputs), max(self.tokens.shape[1], other.tokens.shape[1])
        for place, row in zip(places, other.order, strict=True):
            self.order[place] = offset + row
        self.tokens = _widened(self.tokens, columns).index_copy(0, rows, _widened(other.tokens, columns))
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)
        self.limits = self.limits.index_copy(0, rows, other.limits)
        self.active = self.active.index_copy(0, rows, other.active)
        self.cache.replace_rows(rows, other.cache)
        self.sampling = self.sampling.replace_rows(places, other.sampling)
        if self.draft is not None and other.draft is not None:
            self.draft = self.draft.replace_rows(rows, other.draft)
        self.outputs += other.outputs
        self.prompt_lengths += other.prompt_lengths
        self.budgets += other.budgets
        self.finish_reasons += other.finish_reasons
        self.logits += other.logits
        self.stats.prefill_seconds += other.stats.prefill_seconds


def _widened(tokens: Tensor, columns: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, columns - tokens.shape[1]))
