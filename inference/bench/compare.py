"""Where two texts part, and how close the target's decision was there.

A text may differ from the reference only where rounding decides: the two best scores lie next to each other, or a token
stands at the edge of the nucleus that it is drawn from. So every first divergence is looked at again by one pass of the
target over prompt and common prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TopPLogitsWarper

from ...core.sampling import Sampling, nucleus
from ..target import Target

TIE_GAP = 5e-4
"""Two float32 logits closer than this are a tie: one pass over a text and step after step differ by rounding."""

LOOP_LENGTH, LOOP_TIMES = 8, 3
"""A text repeats itself when a run of 8 tokens stands in it 3 times."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a method's text differs from the reference.

    position: index among the new tokens. token, reference: the two tokens there, None past the end. gap: between the
    two best scores (logits; when sampling, processed scores plus noise). best: the tokens with those scores.
    tie: whether rounding explains it; None where the dtype makes no such promise. at_edge: whether it takes a token at
    the nucleus' edge to explain it.
    """

    prompt: str
    position: int
    token: int | None
    reference: int | None
    gap: float
    best: tuple[int, int]
    tie: bool | None
    at_edge: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return {**asdict(self), "best": list(self.best)}


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first index where two texts differ, the shorter one's end included; None where they are the same."""
    for place, (one, other) in enumerate(zip(ours, reference, strict=False)):
        if one != other:
            return place
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


@torch.inference_mode()
def decision_scores(target: Target, tokens: Sequence[int], count: int, sampling: Sampling) -> Tensor:
    """Return the scores [count, V] fp32 by which the target chose what follows each of the last `count` tokens.

    One pass over the whole text, no cache. Scores are logits, or, when sampling, processed scores plus noise.

    Example: prompt [4, 5], answer [6, 7]: `tokens` = [4, 5, 6] and `count` = 2 give the decisions for 6 and 7.
    """
    ids = torch.tensor([list(tokens)], device=target.device)
    final = target.encode(ids, torch.ones_like(ids, dtype=torch.bool), ()).final
    return _scores(target.logits(final[0, -count:]), ids, sampling)


@torch.inference_mode()
def look_at_divergence(
    target: Target,
    prompt_id: str,
    prompt: Sequence[int],
    ours: Sequence[int],
    reference: Sequence[int],
    sampling: Sampling,
) -> Divergence | None:
    """Return the first divergence of two texts with the gap of the two best scores there; None where they are equal."""
    place = first_difference(ours, reference)
    if place is None:
        return None
    ids = torch.tensor([[*prompt, *ours[:place]]], device=target.device)
    logits = target.logits(target.encode(ids, torch.ones_like(ids, dtype=torch.bool), ()).final[0, -1:])
    scores = _scores(logits, ids, sampling)[0]
    values, best = scores.topk(2)
    token = ours[place] if place < len(ours) else None
    other = reference[place] if place < len(reference) else None
    tie, at_edge = None, False
    if target.dtype in (torch.float32, torch.float64):
        pair = [-1 if one is None else one for one in (token, other)]
        tie = _within(scores, torch.isfinite(scores), pair, TIE_GAP / sampling.temperature)
        if not tie and (at_edge := _explained_by_edge(logits, ids, sampling, pair)):
            tie = True
    gap = float(values[0] - values[1])
    return Divergence(prompt_id, place, token, other, gap, (int(best[0]), int(best[1])), tie, at_edge)


def repeats_itself(tokens: Sequence[int], length: int = LOOP_LENGTH, times: int = LOOP_TIMES) -> bool:
    """Say whether some run of `length` tokens stands `times` times in the text: loops are easy to guess."""
    runs = Counter(tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))
    return bool(runs) and max(runs.values()) >= times


def _scores(logits: Tensor, ids: Tensor, sampling: Sampling) -> Tensor:
    """Return the scores [M, V] of decisions after the last M of ids [1, T]."""
    first = ids.shape[1] - len(logits)
    scores = sampling.process(logits, lambda row: ids[:, : first + row + 1])
    if sampling.noise is None:
        return scores
    positions = torch.arange(first + 1, ids.shape[1] + 1, device=ids.device)
    return scores + sampling.noise(positions[None])[0]


def _within(scores: Tensor, rivals: Tensor, pair: Sequence[int], allowed: float) -> bool:
    """Say whether both tokens come within `allowed` of the best of the rivals [V] bool, or beat it."""
    best = float(scores[rivals].max()) if bool(rivals.any()) else -torch.inf
    return all(token >= 0 and float(scores[token]) >= best - allowed for token in pair)


def _explained_by_edge(logits: Tensor, ids: Tensor, sampling: Sampling, pair: Sequence[int]) -> bool:
    """Say whether both tokens win once tokens at the nucleus' edge may be in it or not, as rounding has it.

    At the edge: the mass before the token lies within TIE_GAP of top_p, or its score within a tie of the lowest kept.
    """
    warper = next((p for p in sampling.processors if isinstance(p, TopPLogitsWarper)), None)
    if warper is None or sampling.noise is None:
        return False
    allowed = TIE_GAP / sampling.temperature
    others = LogitsProcessorList(p for p in sampling.processors if p is not warper)
    scaled = Sampling(others, None).process(logits, lambda _row: ids)
    kept, fewer, more = (
        torch.isfinite(nucleus(scaled, min(max(float(warper.top_p) + shift, 1e-9), 1.0), warper.min_tokens_to_keep))[0]
        for shift in (0.0, -TIE_GAP, TIE_GAP)
    )
    edge = (more & ~fewer) | ((scaled[0] - scaled[0][kept].min()).abs() <= allowed)
    scores = _scores(logits, ids, Sampling(others, sampling.noise))[0]
    return all(bool((kept | edge)[token]) for token in pair) and _within(scores, kept & ~edge, pair, allowed)
