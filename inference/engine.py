"""SpeculativeEngine: prefill, step, generate, stream, for every drafter and for none.

Token ids in, token ids out; no tokenizer here. One decoding step reads top to bottom in `SpeculativeEngine.step`:
draft, target, verify, cut, commit, observe. Rows accept different numbers of nodes; nothing here loops over rows but
the bookkeeping of the one host sync.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from ..core import hf, masks, tree
from ..core.noise import KeyedNoise, request_keys
from ..core.proposals import PROPOSALS
from ..core.sampling import Sampling
from ..core.shapes import rounded_up
from ..drafters.base import Drafter, DraftRequest, Observed
from .checks import check_prompts
from .clock import synchronise
from .state import DecodingRules, Emitted, EngineState
from .stats import PHASES, GenerationStats, StepRecord
from .target import Target
from .verify import Lossless, Prefixes, Question, SpeculativeSampling, Typical, Verdict

PREFILL_CHUNK, PREFILL_STEP = 1024, 16
"""Prompt tokens per pass, which bounds memory, and what its width is a multiple of, see `core/shapes.py`."""

DROP_BELOW = 7 / 8
"""Share of unfinished rows from which on the finished are dropped: a copy of the cache, worth it in a few steps."""

COMPACT_EVERY, COMPACT_BELOW = 16, 0.9
"""Steps between looks at the cache's holes, and the share of columns in use under which they are removed: soon, since
moving a column costs what attending to it costs in about five steps (measured on a CPU)."""

ACCEPTANCE = {"lossless": Lossless(), "speculative_sampling": SpeculativeSampling(), "typical": Typical()}
"""Rules by name; where tokens are not drawn, all of them are greedy and exact."""


class SpeculativeEngine:
    """Generates with a target and a drafter; without one it decodes autoregressively through the same code.

    max_nodes: bound on tree nodes per step, root included; None leaves it to the drafter.
    acceptance: "lossless" (token for token the target's text), "speculative_sampling" (its law) or "typical" (lossy).
    proposal: how the drafter guesses when tokens are drawn, see `core/proposals.py`; None takes what suits the rule.
    times_phases: wait for the device between the phases of a step, so that the time split is true on an accelerator.

    Raises ValueError for a drafter, proposal and acceptance that do not fit each other or the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        max_nodes: int | None = None,
        acceptance: str = "lossless",
        proposal: str | None = None,
        times_phases: bool = False,
    ) -> None:
        if drafter is not None:
            drafter.check_fits(target)
        target.self_check()
        self.target = target
        self.drafter = drafter
        self.max_nodes = max_nodes
        self.proposal = _proposal_for(acceptance, proposal, drafter)
        self.rule = ACCEPTANCE[acceptance]
        self.times_phases = times_phases
        self._layers = drafter.feature_layers if drafter is not None else ()

    def generate(self, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> EngineState:
        """Generate until every row has stopped; see `prefill`. Returns the final state."""
        state = self.prefill(prompts, rules)
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
    def prefill(self, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> EngineState:
        """Run the prompts, token ids of each row, and draw each row's first token.

        Raises ValueError for an empty prompt, an unknown token id, or a prompt that leaves no room in the window.
        """
        state, start = self._new_state(prompts, rules), self._now()
        lengths, longest = state.lengths, int(state.lengths.max())
        last = state.tokens.new_zeros(len(lengths), self.target.width, dtype=self.target.dtype)
        features = []
        # the first pass tells longrope embeddings on which side of their switch the prompts lie
        size = max(PREFILL_CHUNK, (hf.rope_switch(self.target.model) or 0) + 1)
        for begin in range(0, longest, size):
            width = min(size, longest - begin)
            columns = torch.arange(begin, begin + rounded_up(width, PREFILL_STEP), device=lengths.device)
            here = columns < lengths.clamp(max=begin + width)[:, None]
            places = columns.clamp(max=longest - 1).expand(len(lengths), -1)
            tokens, visible = state.tokens.gather(1, places), masks.causal(here)
            out = self.target.forward(tokens, places, visible, state.cache, self._layers)
            counts = here.sum(1)
            state.cache.commit_first(width, counts)
            newest = out.final[torch.arange(len(lengths)), (counts - 1).clamp(min=0)]
            last = torch.where((counts > 0)[:, None], newest, last)
            features.append(out.features[:, :width])
        read = state.tokens[:, :longest].clone()
        logits = self.target.logits(last)[:, None]
        verdict = self._verify(state, tree.root_only(read[:, 0]), logits)
        positions = torch.arange(longest, device=lengths.device).expand_as(read)
        counts, _ = self._emit(state, verdict.bonus[:, None], verdict, torch.zeros_like(lengths))
        state.keep_logits(logits, verdict.nodes, [len(output) for output in state.outputs])
        nexts = state.tokens[:, 1 : longest + 1]
        if self.drafter is not None and state.draft is not None:
            observed = Observed(read, nexts, torch.cat(features, dim=1), positions, torch.where(counts > 0, lengths, 0))
            self.drafter.observe(observed, state.draft, self.target)
        self._finish_step(state)
        state.stats.prefill_seconds = self._now() - start
        return state

    @torch.inference_mode()
    def step(self, state: EngineState) -> None:
        """Emit at least one token of every active row: one target pass over a tree of guesses."""
        clock = [self._now()]
        draft_tree = self._draft(state)
        clock.append(self._now())

        # nodes beyond every row's limit are cut anyway, and the model may have no such position
        positions = (state.root_positions[:, None] + draft_tree.depth).clamp(max=state.last_position)
        out = self.target.forward(draft_tree.tokens, positions, draft_tree.ancestors, state.cache, self._layers)
        logits = self.target.logits(out.final)
        clock.append(self._now())

        verdict = self._verify(state, draft_tree, logits)
        clock.append(self._now())

        roots = state.root_positions
        read = draft_tree.tokens.gather(1, verdict.nodes)
        emitted = _emitted_tokens(read, verdict)
        tree_depth = draft_tree.depth.masked_fill(~draft_tree.valid, 0).amax(1)
        counts, host = self._emit(state, emitted, verdict, tree_depth)
        width = max(row.count for row in host)
        nodes = verdict.nodes[:, :width]
        if all(row.in_place for row in host):
            state.cache.commit_first(width, counts)
        else:
            state.cache.commit(nodes, counts)
        state.keep_logits(logits, nodes, [row.count for row in host])
        if self.drafter is not None and state.draft is not None:
            rows = torch.arange(len(roots), device=roots.device)[:, None]
            committed = roots[:, None] + torch.arange(width, device=roots.device)
            features = out.features[rows, nodes]
            observed = Observed(read[:, :width], emitted[:, :width], features, committed, counts)
            self.drafter.observe(observed, state.draft, self.target)
        lengths = state.host_lengths
        columns, retained = state.cache.columns, sum(lengths) / len(lengths) - 1
        self._finish_step(state)
        clock.append(self._now())

        counted, accepted, depths, _ = zip(*(row for row in host if row.count), strict=True)
        seconds = dict(zip(PHASES, _differences(clock), strict=True))
        state.stats.add(StepRecord(counted, accepted, depths, draft_tree.tokens.shape[1], columns, retained, seconds))

    @torch.inference_mode()
    def admit(self, state: EngineState, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> None:
        """Give places of finished rows to new prompts, between steps; they are numbered on after the rows before.

        state: one that `holds_slots`. rules: the state's own, but for max_new_tokens and seed. Raises like `prefill`.
        """
        places = state.free_slots[: len(prompts)]
        assert rules.holds_slots and len(places) == len(prompts), "every new prompt needs the place of a finished row"
        switch = hf.rope_switch(self.target.model)
        if switch is not None and len({n > switch for n in [state.prompt_lengths[0], *map(len, prompts)]}) > 1:
            raise ValueError(f"this target's rotary embedding changes at {switch} positions; admit rows of one side")
        state.replace_rows(places, self.prefill(prompts, rules))
        self._finish_step(state)

    @torch.inference_mode()
    def stop(self, state: EngineState, rows: Sequence[int], reason: str) -> None:
        """End rows early, between steps. rows: the caller's rows; finished ones stay as they are."""
        ending = set(rows) & set(state.unfinished)
        for row in ending:
            state.finish_reasons[row] = reason
        state.active = state.active & ~torch.tensor([row in ending for row in state.order], device=state.active.device)
        self._finish_step(state)

    def _draft(self, state: EngineState) -> tree.DraftTree:
        """Ask the drafter for a tree no deeper than any row can still use; finished rows keep their root alone."""
        root = state.tokens.gather(1, state.root_positions[:, None])[:, 0]
        if self.drafter is None or state.draft is None or state.remaining < 2 or self.max_nodes == 1:
            return tree.root_only(root)
        depth = state.remaining - 1
        request = DraftRequest(
            state.sampling, state.root_positions, state.active, self.max_nodes, depth, proposal=self.proposal
        )
        proposed = self.drafter.propose(state.draft, self.target, request)
        return proposed if len(state.order) == 1 else proposed.only_root(~state.active)

    def _verify(self, state: EngineState, draft_tree: tree.DraftTree, logits: Tensor) -> Verdict:
        prefixes = Prefixes(state.tokens, state.host_lengths)
        return self.rule.verify(Question(draft_tree, logits, state.sampling, state.root_positions, prefixes))

    def _emit(
        self, state: EngineState, emitted: Tensor, verdict: Verdict, tree_depth: Tensor
    ) -> tuple[Tensor, list[Emitted]]:
        """Cut at end-of-sequence ids, length limits and other criteria, append what is left: the step's one host sync.

        emitted [B, A] long, of which the verdict's lengths are real. tree_depth [B] long.

        Returns the counts after cutting [B] long, 0 for finished rows, and what the host is told of each row.
        """
        lengths = verdict.lengths
        index = torch.arange(emitted.shape[1], device=emitted.device)
        ends = torch.isin(emitted, state.eos) & (index < lengths[:, None])
        upto_end = torch.where(ends.any(1), ends.int().argmax(1) + 1, lengths)
        room = state.limits - state.lengths
        counts = torch.minimum(upto_end, room).masked_fill(~state.active, 0)
        slots = torch.where(index < counts[:, None], state.lengths[:, None] + index, state.tokens.shape[1] - 1)
        state.tokens.scatter_(1, slots, emitted)
        if state.rules.criteria:
            counts, met = _criteria_cut(state, counts)
            ends = ends | (met[:, None] & (index == counts[:, None] - 1))
        state.lengths = state.lengths + counts
        stopped = (ends & (index < counts[:, None])).any(1)
        state.active = state.active & ~stopped & (state.lengths < state.limits)
        strays = ((verdict.nodes != index) & (index < counts[:, None])).any(1)
        facts = torch.stack([counts, lengths.minimum(room) - 1, tree_depth.minimum(room - 1), strays, stopped], dim=1)
        host = []
        for row, values in zip(state.order, torch.cat([facts, emitted], dim=1).tolist(), strict=True):
            count, accepted, depth, stray, stop, *tokens = values
            host.append(Emitted(count, accepted, depth, not stray))
            state.outputs[row].extend(tokens[:count])
            if count and (stop or len(state.outputs[row]) == state.budgets[row]):
                state.finish_reasons[row] = "stop" if stop else "length"
        return counts, host

    def _finish_step(self, state: EngineState) -> None:
        """Drop finished rows once they are an eighth of the batch, remove holes now and then."""
        alive = [place for place, row in enumerate(state.order) if state.finish_reasons[row] is None]
        if not state.holds_slots:
            if not alive:
                state.order = []
                return
            if len(alive) <= DROP_BELOW * len(state.order):
                state.take_rows(alive)
        if state.stats.target_passes % COMPACT_EVERY == COMPACT_EVERY - 1:
            state.cache.compact(COMPACT_BELOW)
            if state.draft is not None:
                state.draft.compact(COMPACT_BELOW)

    def _new_state(self, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> EngineState:
        batch, device, vocab = len(prompts), self.target.device, self.target.vocab_size
        most = rules.max_new_tokens
        budgets = [most] * batch if isinstance(most, int) else list(most)
        check_prompts(prompts, budgets, vocab, hf.position_limit(self.target.model), hf.rope_switch(self.target.model))
        limits = [len(p) + n for p, n in zip(prompts, budgets, strict=True)]
        tokens = torch.zeros(batch, max(limits) + 1, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(list(prompt))
        noise = KeyedNoise(request_keys(rules.seed, batch, device), vocab) if rules.do_sample else None
        by_row = rules.processors if isinstance(rules.processors, tuple) else None
        shared = by_row[0] if by_row is not None else rules.processors
        assert not isinstance(shared, tuple)
        return EngineState(
            rules=rules,
            tokens=tokens.to(device),
            lengths=torch.tensor([len(p) for p in prompts], device=device),
            limits=torch.tensor(limits, device=device),
            active=torch.ones(batch, dtype=torch.bool, device=device),
            cache=self.target.new_cache(batch),
            draft=None if self.drafter is None else self.drafter.init_state(batch),
            sampling=Sampling(shared if shared is not None else LogitsProcessorList(), noise, by_row),
            eos=torch.tensor(list(rules.eos_token_ids), dtype=torch.long, device=device),
            order=list(range(batch)),
            outputs=[[] for _ in prompts],
            prompt_lengths=[len(prompt) for prompt in prompts],
            budgets=budgets,
            finish_reasons=[None] * batch,
            logits=[[] for _ in prompts],
            holds_slots=rules.holds_slots,
            stats=GenerationStats(lossless=self.rule.lossless or not rules.do_sample),
        )

    def _now(self) -> float:
        if self.times_phases:
            synchronise(self.target.device)
        return time.perf_counter()


def _proposal_for(acceptance: str, proposal: str | None, drafter: Drafter | None) -> str:
    if acceptance not in ACCEPTANCE:
        raise ValueError(f"acceptance must be one of {', '.join(ACCEPTANCE)}, but is {acceptance!r}")
    default = {"lossless": "shared_noise", "speculative_sampling": "sampled", "typical": "top_k"}[acceptance]
    chosen = default if proposal is None else proposal
    if chosen not in PROPOSALS:
        raise ValueError(f"proposal must be one of {', '.join(PROPOSALS)}, but is {chosen!r}")
    if acceptance == "speculative_sampling" and not chosen.startswith("sampled"):
        raise ValueError(f"speculative_sampling verifies drawn nodes; use a sampled proposal, not {chosen!r}")
    if (
        drafter is not None
        and not drafter.yields_law
        and (acceptance == "speculative_sampling" or proposal is not None)
    ):
        raise ValueError(
            f"{type(drafter).__name__} yields no law to draw from; leave acceptance and proposal as they are"
        )
    return chosen


def _criteria_cut(state: EngineState, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Cut each row after the first new token at which one of the caller's criteria is met.

    The new tokens stand in `state.tokens` behind `state.lengths`; counts [B] long: how many. Costs a host sync.

    Returns the counts after cutting [B] long and whether a criterion was met [B] bool.
    """
    kept, met = counts.tolist(), [False] * len(state.order)
    for place, (start, count) in enumerate(zip(state.host_lengths, counts.tolist(), strict=True)):
        for taken in range(1, count + 1):
            so_far = state.tokens[place : place + 1, : start + taken]
            if any(bool(torch.as_tensor(criterion(so_far, None)).all()) for criterion in state.rules.criteria):
                kept[place], met[place] = taken, True
                break
    device = counts.device
    return torch.tensor(kept, device=device), torch.tensor(met, device=device)


def _emitted_tokens(read: Tensor, verdict: Verdict) -> Tensor:
    """Return the tokens that follow each node of the accepted path [B, A] long: the drafts, then the bonus token."""
    emitted = read.roll(-1, dims=1)
    return emitted.scatter(1, (verdict.lengths - 1)[:, None], verdict.bonus[:, None])


def _differences(clock: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(clock)]
