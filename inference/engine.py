"""SpeculativeEngine: prefill, step, generate, stream, for every drafter and for none.

Token ids in, token ids out; no tokenizer here. One decoding step reads top to bottom in `SpeculativeEngine.step`:
draft, target, verify, cut, commit, observe. Rows accept different numbers of nodes; nothing here loops over rows but
the bookkeeping of the one host sync.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..core import hf, masks, tree
from ..core.kv_cache import RaggedCache
from ..core.sampling import KeyedNoise, Sampling, request_keys
from ..drafters.base import Drafter, DraftRequest, DraftState, Observed
from .checks import check_prompts
from .stats import PHASES, GenerationStats, StepRecord
from .target import Target
from .verify import Prefixes, Verdict, verify_tree

PREFILL_CHUNK = 1024
"""Prompt tokens per forward pass, which bounds the memory of masks and activations."""

DROP_BELOW = 7 / 8
"""Share of unfinished rows from which on the finished are dropped: a copy of the cache, worth it in a few steps."""

COMPACT_EVERY, COMPACT_BELOW = 32, 0.6
"""Steps between looks at the cache's holes, and the share of columns in use under which they are removed."""


@dataclass
class EngineState:
    """Everything a batch carries from step to step. Device tensors have rows first.

    tokens [B, cap + 1] long: committed tokens, the root last (the extra column takes masked writes).
    lengths [B] long: committed tokens, root included. limits [B] long: length at which a row stops.
    active [B] bool. order: the caller's row of each row here. outputs: new tokens of each of the caller's rows; so are
    prompt_lengths, budgets (most new tokens) and finish_reasons.
    """

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
    stats: GenerationStats = field(default_factory=GenerationStats)

    @property
    def done(self) -> bool:
        """Whether every row has finished."""
        return not self.order

    @property
    def remaining(self) -> int:
        """The most tokens that any unfinished row may still gain."""
        unfinished = (row for row in self.order if self.finish_reasons[row] is None)
        return max(self.budgets[row] - len(self.outputs[row]) for row in unfinished)

    @property
    def mean_length(self) -> float:
        """Committed tokens, root included, on average over the rows here."""
        return sum(self.prompt_lengths[row] + len(self.outputs[row]) for row in self.order) / len(self.order)

    @property
    def last_position(self) -> int:
        """The last position that any of the caller's rows could fill."""
        return self.tokens.shape[1] - 2

    @property
    def root_positions(self) -> Tensor:
        """Position of each row's root [B] long; also the number of its tokens in the cache."""
        return self.lengths - 1


class SpeculativeEngine:
    """Generates with a target and a drafter; without one it decodes autoregressively through the same code.

    max_nodes: bound on tree nodes per step, root included; None leaves it to the drafter.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, max_nodes: int | None = None) -> None:
        if drafter is not None:
            drafter.check_fits(target)
        target.self_check()
        self.target = target
        self.drafter = drafter
        self.max_nodes = max_nodes
        self._layers = drafter.feature_layers if drafter is not None else ()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int] = (),
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        seed: int | Sequence[int] | None = None,
    ) -> EngineState:
        """Generate until every row has stopped; see `prefill` for the arguments.

        Returns the final state: `outputs`, `finish_reasons` ("stop", "length", or as `stop` was told) and `stats`.
        """
        state = self.prefill(prompts, max_new_tokens, eos_token_ids, processors, do_sample, seed)
        while not state.done:
            self.step(state)
        return state

    def stream(self, state: EngineState) -> Iterator[list[list[int]]]:
        """Run a prefilled state to its end; yield the tokens each of the caller's rows gained, first the prefill's."""
        seen = [0] * len(state.outputs)
        while True:
            yield [row[n:] for row, n in zip(state.outputs, seen, strict=True)]
            if state.done:
                return
            seen = [len(row) for row in state.outputs]
            self.step(state)

    @torch.inference_mode()
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int] = (),
        processors: LogitsProcessorList | None = None,
        do_sample: bool = False,
        seed: int | Sequence[int] | None = None,
    ) -> EngineState:
        """Run the prompts and draw each row's first token.

        prompts: token ids of each row. max_new_tokens: one bound, or one a row. eos_token_ids: ids that end a row.
        processors: transformers' logits processors in transformers' order. do_sample: keyed draws instead of argmax.
        seed: int, or one per row; see `request_keys`.

        Raises ValueError for an empty prompt, an unknown token id, or a prompt that leaves no room in the window.
        """
        state = self._new_state(prompts, max_new_tokens, eos_token_ids, processors, do_sample, seed)
        start = time.perf_counter()
        lengths, longest = state.lengths, int(state.lengths.max())
        valid = torch.arange(longest, device=lengths.device)[None] < lengths[:, None]
        last = state.tokens.new_zeros(len(lengths), self.target.width, dtype=self.target.dtype)
        features = []
        # the first pass tells longrope embeddings on which side of their switch the prompts lie
        size = max(PREFILL_CHUNK, (hf.rope_switch(self.target.model) or 0) + 1)
        for begin in range(0, longest, size):
            chunk = slice(begin, min(begin + size, longest))
            here = valid[:, chunk]
            positions = torch.arange(longest, device=lengths.device)[chunk].expand(len(lengths), -1)
            tokens = state.tokens[:, chunk]
            out = self.target.forward(tokens, positions, masks.causal(here), state.cache, self._layers)
            counts = here.sum(1)
            state.cache.commit(torch.arange(here.shape[1], device=lengths.device).expand_as(here), counts)
            ends_here = (counts > 0)[:, None]
            last = torch.where(ends_here, out.final[torch.arange(len(lengths)), (counts - 1).clamp(min=0)], last)
            features.append(out.features)
        read = state.tokens[:, :longest].clone()
        prefixes = Prefixes(state.tokens, lengths)
        logits = self.target.logits(last)[:, None]
        verdict = verify_tree(tree.root_only(read[:, 0]), logits, state.sampling, state.root_positions, prefixes)
        positions = torch.arange(longest, device=lengths.device).expand_as(read)
        counts, _ = self._emit(state, verdict.bonus[:, None], torch.ones_like(lengths), torch.zeros_like(lengths))
        nexts = state.tokens[:, 1 : longest + 1]
        if self.drafter is not None and state.draft is not None:
            observed = Observed(read, nexts, torch.cat(features, dim=1), positions, torch.where(counts > 0, lengths, 0))
            self.drafter.observe(observed, state.draft, self.target)
        self._finish_step(state)
        state.stats.prefill_seconds = time.perf_counter() - start
        return state

    @torch.inference_mode()
    def step(self, state: EngineState) -> None:
        """Emit at least one token of every active row: one target pass over a tree of guesses."""
        clock = [time.perf_counter()]
        draft_tree = self._draft(state)
        clock.append(time.perf_counter())

        # nodes beyond every row's limit are cut anyway, and the model may have no such position
        positions = (state.root_positions[:, None] + draft_tree.depth).clamp(max=state.last_position)
        out = self.target.forward(draft_tree.tokens, positions, draft_tree.ancestors, state.cache, self._layers)
        logits = self.target.logits(out.final)
        clock.append(time.perf_counter())

        prefixes = Prefixes(state.tokens, state.lengths)
        verdict = verify_tree(draft_tree, logits, state.sampling, state.root_positions, prefixes)
        clock.append(time.perf_counter())

        roots = state.root_positions
        read = draft_tree.tokens.gather(1, verdict.nodes)
        emitted = _emitted_tokens(read, verdict)
        tree_depth = draft_tree.depth.masked_fill(~draft_tree.valid, 0).amax(1)
        counts, host = self._emit(state, emitted, verdict.lengths, tree_depth)
        width = max(count for count, _, _ in host)
        nodes = verdict.nodes[:, :width]
        state.cache.commit(nodes, counts)
        if self.drafter is not None and state.draft is not None:
            rows = torch.arange(len(roots), device=roots.device)[:, None]
            committed = roots[:, None] + torch.arange(width, device=roots.device)
            features = out.features[rows, nodes]
            observed = Observed(read[:, :width], emitted[:, :width], features, committed, counts)
            self.drafter.observe(observed, state.draft, self.target)
        columns, retained = state.cache.columns, state.mean_length - 1
        self._finish_step(state)
        clock.append(time.perf_counter())

        counted, accepted, depths = zip(*(row for row in host if row[0]), strict=True)
        seconds = dict(zip(PHASES, _differences(clock), strict=True))
        nodes_run = draft_tree.tokens.shape[1]
        state.stats.add(StepRecord(counted, accepted, depths, nodes_run, columns, retained, seconds))

    def stop(self, state: EngineState, rows: Sequence[int], reason: str) -> None:
        """End rows early, between steps. rows: the caller's rows; finished ones stay as they are."""
        stopped = [row in rows and state.finish_reasons[row] is None for row in state.order]
        for row, ends in zip(state.order, stopped, strict=True):
            if ends:
                state.finish_reasons[row] = reason
        state.active = state.active & ~torch.tensor(stopped, device=state.active.device)
        self._finish_step(state)

    def _draft(self, state: EngineState) -> tree.DraftTree:
        """Ask the drafter for a tree no deeper than any row can still use; finished rows keep their root alone."""
        root = state.tokens.gather(1, state.root_positions[:, None])[:, 0]
        if self.drafter is None or state.draft is None or state.remaining < 2:
            return tree.root_only(root)
        depth = state.remaining - 1
        request = DraftRequest(state.sampling, state.root_positions, state.active, self.max_nodes, depth)
        proposed = self.drafter.propose(state.draft, self.target, request)
        return proposed if len(state.order) == 1 else proposed.only_root(~state.active)

    def _emit(
        self, state: EngineState, emitted: Tensor, lengths: Tensor, tree_depth: Tensor
    ) -> tuple[Tensor, list[tuple[int, int, int]]]:
        """Cut at end-of-sequence ids and length limits, append what is left to the rows: the step's one host sync.

        emitted [B, E] long, lengths [B] long: how many are real. tree_depth [B] long.

        Returns the counts after cutting [B] long, 0 for finished rows, and (count, accepted, depth) of each row.
        """
        index = torch.arange(emitted.shape[1], device=emitted.device)
        ends = torch.isin(emitted, state.eos) & (index < lengths[:, None])
        upto_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, lengths)
        counts = torch.minimum(upto_end, state.limits - state.lengths).masked_fill(~state.active, 0)
        inside = index < counts[:, None]
        slots = torch.where(inside, state.lengths[:, None] + index, state.tokens.shape[1] - 1)
        state.tokens.scatter_(1, slots, emitted)
        state.lengths = state.lengths + counts
        stopped = (ends & inside).any(1)
        state.active = state.active & ~stopped & (state.lengths < state.limits)
        facts = torch.stack([counts, lengths - 1, tree_depth, stopped], dim=1)
        host = []
        for row, values in zip(state.order, torch.cat([facts, emitted], dim=1).tolist(), strict=True):
            count, accepted, depth, stop, *tokens = values
            host.append((count, accepted, depth))
            state.outputs[row].extend(tokens[:count])
            if count and (stop or len(state.outputs[row]) == state.budgets[row]):
                state.finish_reasons[row] = "stop" if stop else "length"
        return counts, host

    def _finish_step(self, state: EngineState) -> None:
        """Drop finished rows once they are an eighth of the batch, remove holes now and then."""
        alive = [i for i, row in enumerate(state.order) if state.finish_reasons[row] is None]
        if not alive:
            state.order = []
            return
        if len(alive) <= DROP_BELOW * len(state.order):
            rows = torch.tensor(alive, device=state.tokens.device)
            state.order = [state.order[i] for i in alive]
            state.tokens, state.lengths, state.limits = state.tokens[rows], state.lengths[rows], state.limits[rows]
            state.active = state.active[rows]
            state.cache.take_rows(rows)
            state.sampling = state.sampling.take_rows(rows)
            if state.draft is not None:
                state.draft = state.draft.take_rows(rows)
        if state.stats.target_passes % COMPACT_EVERY == COMPACT_EVERY - 1:
            state.cache.compact(COMPACT_BELOW)

    def _new_state(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        eos_token_ids: Sequence[int],
        processors: LogitsProcessorList | None,
        do_sample: bool,
        seed: int | Sequence[int] | None,
    ) -> EngineState:
        batch, device, vocab = len(prompts), self.target.device, self.target.vocab_size
        budgets = [max_new_tokens] * batch if isinstance(max_new_tokens, int) else list(max_new_tokens)
        check_prompts(prompts, budgets, vocab, hf.position_limit(self.target.model), hf.rope_switch(self.target.model))
        limits = [len(p) + n for p, n in zip(prompts, budgets, strict=True)]
        tokens = torch.zeros(batch, max(limits) + 1, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt))
        noise = KeyedNoise(request_keys(seed, batch, device), vocab) if do_sample else None
        return EngineState(
            tokens=tokens.to(device),
            lengths=torch.tensor([len(p) for p in prompts], device=device),
            limits=torch.tensor(limits, device=device),
            active=torch.ones(batch, dtype=torch.bool, device=device),
            cache=self.target.new_cache(batch),
            draft=None if self.drafter is None else self.drafter.init_state(batch),
            sampling=Sampling(processors if processors is not None else LogitsProcessorList(), noise),
            eos=torch.tensor(list(eos_token_ids), dtype=torch.long, device=device),
            order=list(range(batch)),
            outputs=[[] for _ in prompts],
            prompt_lengths=[len(prompt) for prompt in prompts],
            budgets=budgets,
            finish_reasons=[None] * batch,
        )


def _emitted_tokens(read: Tensor, verdict: Verdict) -> Tensor:
    """Return the tokens that follow each node of the accepted path [B, A] long: the drafts, then the bonus token."""
    emitted = read.roll(-1, dims=1)
    return emitted.scatter(1, (verdict.lengths - 1)[:, None], verdict.bonus[:, None])


def _differences(clock: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(clock)]
