"""Where two texts part, and how close the target's decision was there.

A text may differ from the baseline's only where rounding decides: the two best scores lie next to each other. So every
first divergence is looked at again by one pass of the target over prompt and common prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.sampling import Sampling
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
    tie: whether rounding explains it; None where the dtype makes no such promise.
    """

    prompt: str
    position: int
    token: int | None
    reference: int | None
    gap: float
    best: tuple[int, int]
    tie: bool | None

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
    logits = target.logits(final[0, -count:])
    first = len(tokens) - count
    scores = sampling.process(logits, lambda row: ids[:, : first + row + 1])
    if sampling.noise is not None:
        positions = torch.arange(first + 1, len(tokens) + 1, device=ids.device)
        scores = scores + sampling.noise(positions[None])[0]
    return scores


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
    scores = decision_scores(target, [*prompt, *ours[:place]], 1, sampling)[0]
    values, ids = scores.topk(2)
    best, second = values.tolist()
    token = ours[place] if place < len(ours) else None
    other = reference[place] if place < len(reference) else None
    tie = None
    if target.dtype in (torch.float32, torch.float64):
        allowed = TIE_GAP / sampling.temperature
        tie = all(t is not None and best - float(scores[t]) <= allowed for t in (token, other))
    pair = (int(ids[0]), int(ids[1]))
    return Divergence(prompt_id, place, token, other, round(best - second, 7), pair, tie)


def repeats_itself(tokens: Sequence[int], length: int = LOOP_LENGTH, times: int = LOOP_TIMES) -> bool:
    """Say whether some run of `length` tokens stands `times` times in the text: loops are easy to guess."""
    runs = Counter(tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1))
    return bool(runs) and max(runs.values()) >= times
