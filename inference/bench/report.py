"""From single calls to the figures of a benchmark: ratios with their intervals, tokens per step, acceptance, times.

Every ratio is the median over interleaved pairs of (baseline's seconds per token / the method's), so a figure above 1
is faster. Intervals come from resampling batches, not single pairs: repeats of one batch are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..stats import PHASES, GenerationStats
from .compare import Divergence, repeats_itself
from .measure import Round
from .methods import BASELINE, Call
from .prompts import BenchPrompt, label

RESAMPLES = 4000

Batches = Sequence[Sequence[BenchPrompt]]


def median_with_interval(pairs: Sequence[Sequence[float]], seed: int) -> tuple[float, list[float] | None]:
    """Return the median of all ratios and its 95% interval by the bootstrap; one batch alone gives no interval.

    pairs: one list of ratios per batch, all of one length (the repeats). Batches are drawn with replacement.
    """
    values = np.asarray(pairs, dtype=np.float64)
    if len(values) == 1:
        return float(np.median(values)), None
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    medians = np.median(values[drawn].reshape(RESAMPLES, -1), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(values)), [float(low), float(high)]


def method_report(
    name: str, rounds: Sequence[Round], batches: Batches, divergences: Sequence[Divergence], seed: int
) -> dict[str, Any]:
    """Return every figure of one method.

    divergences: first differences from the reference, at most one a prompt.
    """
    calls = [one.calls[name] for one in rounds]
    everything = range(len(batches))
    ratio, interval = _ratio(name, rounds, everything, seed, _whole)
    decode_ratio, decode_interval = _ratio(name, rounds, everything, seed, _decode)
    stats = _merged(calls)
    tokens, seconds = sum(call.new_tokens for call in calls), sum(call.seconds for call in calls)
    return {
        "tokens_per_step": tokens_per_step(calls),
        "acceptance_by_depth": _acceptance(name, stats),
        "speed_ratio": ratio,
        "speed_ratio_interval": interval,
        "decode_speed_ratio": decode_ratio,
        "decode_speed_ratio_interval": decode_interval,
        "num_prompts": sum(len(batch) for batch in batches),
        "num_different": len(divergences),
        "num_ties": sum(one.tie is True for one in divergences),
        "differences": [one.to_dict() for one in divergences],
        "new_tokens": tokens,
        "seconds_per_token": seconds / tokens,
        "tokens_per_second": tokens / seconds,
        "steps": _counts(calls, stats),
        "seconds": _times(calls, stats),
        "by_category": _by(name, rounds, batches, "category", seed),
        "by_lang": _by(name, rounds, batches, "lang", seed),
        "loops": _loops(name, rounds, batches, seed),
    }


def tokens_per_step(calls: Sequence[Call]) -> float | None:
    """Return tokens emitted by decoding steps / steps, None where the method does not say, 0.0 without steps."""
    steps = [call.steps for call in calls if call.steps is not None]
    tokens = [call.step_tokens for call in calls if call.step_tokens is not None]
    if len(steps) < len(calls):
        return None
    return sum(tokens) / sum(steps) if sum(steps) else 0.0


def _whole(call: Call) -> float | None:
    return call.seconds_per_token


def _decode(call: Call) -> float | None:
    return call.decode_seconds_per_token


def _ratio(
    name: str, rounds: Sequence[Round], chosen: Sequence[int], seed: int, cost: Callable[[Call], float | None]
) -> tuple[float | None, list[float] | None]:
    """Return the median ratio over the rounds of the chosen batches; None where no pair has both costs."""
    by_batch: dict[int, list[float]] = {}
    for one in rounds:
        base, ours = cost(one.calls[BASELINE]), cost(one.calls[name])
        if one.batch in chosen and base and ours:
            by_batch.setdefault(one.batch, []).append(base / ours)
    repeats = max(map(len, by_batch.values()), default=0)
    whole = [ratios for ratios in by_batch.values() if len(ratios) == repeats]
    return median_with_interval(whole, seed) if whole else (None, None)


def _merged(calls: Sequence[Call]) -> GenerationStats | None:
    merged = GenerationStats()
    for call in calls:
        if call.stats is None:
            return None
        merged.merge(call.stats)
    return merged


def _acceptance(name: str, stats: GenerationStats | None) -> list[float] | None:
    if stats is None:
        return [] if name == BASELINE else None
    return stats.acceptance_by_depth


def _counts(calls: Sequence[Call], stats: GenerationStats | None) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "row_steps": sum(call.steps or 0 for call in calls),
        "tokens": sum(call.step_tokens or 0 for call in calls),
    }
    if stats is not None:
        passes = stats.target_passes
        counts |= {
            "target_passes": passes,
            "nodes": stats.nodes,
            "nodes_per_pass": stats.nodes / passes if passes else 0.0,
            "reached_by_depth": stats.reached,
            "accepted_by_depth": stats.accepted,
        }
    return counts


def _times(calls: Sequence[Call], stats: GenerationStats | None) -> dict[str, float]:
    """Return where the seconds went; the drafter's observing is its own part, and "other" is what no clock saw."""
    total, prefill = sum(call.seconds for call in calls), sum(call.prefill_seconds for call in calls)
    times = {"total": total, "prefill": prefill}
    if stats is not None:
        observing = sum(call.observe_seconds for call in calls)
        times |= {phase: stats.seconds[phase] for phase in PHASES}
        times["commit"] -= observing
        times["observe"] = observing
        times["other"] = total - prefill - sum(stats.seconds.values())
    return times


def _by(name: str, rounds: Sequence[Round], batches: Batches, kind: str, seed: int) -> dict[str, Any]:
    """Return ratio and tokens per step of each category (or language); nothing where the rows name none."""
    labels = [label(batch, kind) for batch in batches]
    parts: dict[str, Any] = {}
    for part in dict.fromkeys(labels):
        chosen = [i for i, one in enumerate(labels) if one == part]
        if part:
            parts[part] = _part(name, rounds, batches, chosen, seed)
    return parts


def _loops(name: str, rounds: Sequence[Round], batches: Batches, seed: int) -> dict[str, Any]:
    """Return which prompts got a text that repeats itself, and the figures without their batches."""
    looping = {
        (one.batch, row)
        for one in rounds
        for row, output in enumerate(one.calls[name].outputs)
        if repeats_itself(output)
    }
    without = [i for i in range(len(batches)) if i not in {batch for batch, _ in looping}]
    prompts = [batches[batch][row].id for batch, row in sorted(looping)]
    return {"prompts": prompts, "without": _part(name, rounds, batches, without, seed)}


def _part(name: str, rounds: Sequence[Round], batches: Batches, chosen: Sequence[int], seed: int) -> dict[str, Any]:
    ratio, interval = _ratio(name, rounds, chosen, seed, _whole)
    return {
        "num_prompts": sum(len(batches[i]) for i in chosen),
        "tokens_per_step": tokens_per_step([one.calls[name] for one in rounds if one.batch in chosen]),
        "speed_ratio": ratio,
        "speed_ratio_interval": interval,
    }
