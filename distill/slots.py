"""Keep the slots of a batch full: the place of a finished row takes the next prompt, so no pass is run for nothing.

Token ids in, token ids out. An answer depends on its prompt, its seed and the rules alone, not on how many slots there
are or who sits beside it; that holds for the look for loops too, which goes by a row's own length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..inference.engine import SpeculativeEngine
from ..inference.state import DecodingRules, EngineState
from .select import LOOP, in_a_loop

LOOK_EVERY = 16
"""Tokens of an answer between looks for a loop; a looping answer is of no use, so its row is ended there."""

ADMIT_SHARE = 1 / 8
"""Share of the slots that must be free before new prompts are run: one pass for several, but few slots left idle."""

PREFILL_TOKENS = 16_384
"""Prompt tokens, padding included, that are run at a time: more would need gigabytes, and minutes without a sign of
life on a CPU."""


@dataclass(frozen=True, slots=True)
class Answer:
    """prompt: its place in the queue. tokens: what was said. reason: "stop", "length" or "loop"."""

    prompt: int
    tokens: list[int]
    reason: str


@dataclass(frozen=True, slots=True)
class Progress:
    """What one step brought: answers that have ended, and tokens of all rows, ended or not."""

    answers: list[Answer]
    tokens: int


def answer_all(
    engine: SpeculativeEngine,
    prompts: Sequence[Sequence[int]],
    rules: DecodingRules,
    seeds: Sequence[int],
    slots: int,
    stop_loops: bool = True,
) -> Iterator[Progress]:
    """Answer the prompts in their order; prompts of like length should be neighbours, as they are run together.

    rules: of every prompt; seeds: one a prompt. slots: rows at a time. stop_loops: end answers that repeat themselves.

    Yields after every pass. An answer comes in the step in which it ends, so answers come out of order.
    """
    admit_at = max(1, int(slots * ADMIT_SHARE))
    places = min(slots, len(prompts))
    state, admitted = _first_slots(engine, prompts, rules, seeds, places)
    before_ours = len(state.outputs) - admitted
    looked = dict.fromkeys(range(before_ours, before_ours + admitted), 0)
    while True:
        before = dict(looked)
        answers = _collect(engine, state, looked, stop_loops)
        gained = sum(len(state.outputs[row]) - seen for row, seen in before.items())
        yield Progress([replace(answer, prompt=answer.prompt - before_ours) for answer in answers], gained)
        free = len(state.free_slots)
        if admitted < len(prompts) and (free >= admit_at or state.done):
            new = range(admitted, admitted + _fitting(prompts[admitted : admitted + free]))
            admitted = new.stop
            more = replace(rules, seed=seeds[new.start : new.stop], holds_slots=True)
            engine.admit(state, prompts[new.start : new.stop], more)
            state.holds_slots = admitted < len(prompts)
            looked.update(dict.fromkeys(range(before_ours + new.start, before_ours + new.stop), 0))
        elif state.done:
            return
        else:
            engine.step(state)


def _first_slots(
    engine: SpeculativeEngine,
    prompts: Sequence[Sequence[int]],
    rules: DecodingRules,
    seeds: Sequence[int],
    places: int,
) -> tuple[EngineState, int]:
    """Return a batch of so many places, and how many prompts have been run.

    Where the first prompts are too many for one pass, none has: every place then holds a row of one token that has
    ended, for `admit` to give away.
    """
    fits = _fitting(prompts[:places]) == places
    first = replace(rules, seed=seeds[:places], holds_slots=places < len(prompts) or not fits)
    if fits:
        return engine.prefill(prompts[:places], first), places
    return engine.prefill([prompt[:1] for prompt in prompts[:places]], replace(first, max_new_tokens=1)), 0


def _fitting(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many of the prompts, in their order, to run at a time; the first always."""
    longest = 0
    for count, prompt in enumerate(prompts):
        longest = max(longest, len(prompt))
        if count and (count + 1) * longest > PREFILL_TOKENS:
            return count
    return len(prompts)


def _collect(engine: SpeculativeEngine, state: EngineState, looked: dict[int, int], stop_loops: bool) -> list[Answer]:
    """Return the answers that ended in this step, and end those that have fallen into a loop.

    looked: tokens of each open row at the last call; brought up to date.
    """
    answers, looping = [], []
    for row, seen in list(looked.items()):
        tokens, reason = state.outputs[row], state.finish_reasons[row]
        length = loop_between(tokens, seen, reason is not None) if stop_loops else None
        looked[row] = len(tokens)
        if length is not None:
            tokens, reason = tokens[:length], LOOP
            looping.append(row)
        if reason is not None:
            answers.append(Answer(row, tokens, reason))
            del looked[row]
    if looping:
        engine.stop(state, looping, LOOP)
    return answers


def loop_between(tokens: list[int], seen: int, ended: bool) -> int | None:
    """Return the length at which an answer is found to be in a loop, None if it is in none.

    seen: tokens there were at the last look. ended: whether the answer is whole; its last token is then no part of a
    loop that goes on. Only multiples of `LOOK_EVERY` are looked at, so the length does not depend on how many tokens a
    step brings.
    """
    for length in range(seen - seen % LOOK_EVERY + LOOK_EVERY, len(tokens) + (not ended), LOOK_EVERY):
        if in_a_loop(tokens[:length]):
            return length
    return None
