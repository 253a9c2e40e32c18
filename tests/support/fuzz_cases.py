"""Random generation calls: family, batch, tree, drafter, stop cause, processors, lengths and sampling from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tiny_batches import scrambled
from tiny_drafters import RandomDrafter, ScriptedDrafter
from tiny_targets import FAMILIES, LIMIT, VOCAB, prompts_of, tiny_target
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from headstart import build_drafter
from headstart.core.tree import TreeTopology
from headstart.drafters.base import Drafter
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target

DRAFTERS = ("none", "random", "scripted", "medusa")

PREFIX_READING: dict[str, Callable[[random.Random, list[int]], Any]] = {
    "repetition penalty": lambda rng, ends: RepetitionPenaltyLogitsProcessor(rng.uniform(1.05, 2.0)),
    "no repeated n-gram": lambda rng, ends: NoRepeatNGramLogitsProcessor(rng.randint(1, 3)),
    "bad words": lambda rng, ends: NoBadWordsLogitsProcessor([[rng.randrange(VOCAB)], [rng.randrange(VOCAB), 3]]),
    "suppressed": lambda rng, ends: SuppressTokensLogitsProcessor(rng.sample(range(VOCAB), 5), device="cpu"),
    "least length": lambda rng, ends: MinLengthLogitsProcessor(rng.randint(5, 25), ends or [1], device="cpu"),
}
WARPERS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: TemperatureLogitsWarper(rng.choice([0.3, 0.7, 1.3, 2.0])),
    "top-k": lambda rng: TopKLogitsWarper(rng.choice([1, 3, 20, 50])),
    "top-p": lambda rng: TopPLogitsWarper(rng.choice([0.1, 0.6, 0.9, 0.99])),
    "min-p": lambda rng: MinPLogitsWarper(rng.choice([0.01, 0.2])),
    "typical-p": lambda rng: TypicalLogitsWarper(rng.choice([0.2, 0.9])),
}


@dataclass(frozen=True)
class Case:
    """One call. waiting: how many of the prompts are admitted later, into the places of rows that have finished."""

    seed: int
    family: str
    prompts: list[list[int]]
    rules: DecodingRules
    drafter: str
    proposal: str
    max_nodes: int | None
    waiting: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        lengths = [len(prompt) for prompt in self.prompts]
        return (
            f"seed {self.seed}: {self.family}, prompts of {lengths} ({self.waiting} wait), drafter {self.drafter} "
            f"({self.proposal}, {self.max_nodes} nodes), {'sampled' if self.rules.do_sample else 'greedy'}, "
            f"new {self.rules.max_new_tokens}, ends {list(self.rules.eos_token_ids)}, "
            f"{', '.join(self.names) or 'plain'}"
        )


def random_case(seed: int) -> Case:
    """Make the case of a seed."""
    rng = random.Random(seed)
    rows = rng.choice([1, 1, 2, 3, 5])
    prompts = prompts_of(*(rng.choice([1, 2, 5, 9, 17, 30]) for _ in range(rows)), seed=seed)
    most = [rng.randint(1, LIMIT - 8 - len(prompt)) for prompt in prompts]
    one = min(most)
    ends = rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3, 8]))
    do_sample = rng.random() < 0.5
    chosen = rng.sample(list(PREFIX_READING), rng.choice([0, 0, 0, 1, 2]))
    processors = [PREFIX_READING[name](rng, ends) for name in chosen]
    if do_sample:
        warpers = [name for name in WARPERS if rng.random() < 0.4]
        processors += [WARPERS[name](rng) for name in warpers]
        chosen += warpers
    criteria, stop = [], rng.choice(["", "", "", "pair", "length"])
    if stop:
        criteria = [pair_adds_up if stop == "pair" else length_is_a_prime_seven]
        chosen.append(f"criterion: {stop}")
    seeds: Any = rng.choice([rng.randrange(1000), [rng.randrange(1000) for _ in prompts]])
    drafter = rng.choice(DRAFTERS)
    return Case(
        seed=seed,
        family=rng.choice(list(FAMILIES)),
        prompts=prompts,
        rules=DecodingRules(
            max_new_tokens=rng.choice([one, most]),
            eos_token_ids=ends,
            processors=LogitsProcessorList(processors),
            do_sample=do_sample,
            seed=seeds,
            criteria=criteria,
        ),
        drafter=drafter,
        proposal=rng.choice(["shared_noise", "top_k", "sampled", "sampled_iid"]),
        max_nodes=rng.choice([None, None, 1, 2, 5]),
        waiting=rng.choice([0, 0, rows - 1]) if drafter in ("none", "medusa") else 0,
        names=tuple(chosen),
    )


def pair_adds_up(ids: Tensor, _scores: Any) -> Tensor:
    """Stop a row whose last two tokens add up to a multiple of eleven."""
    return (ids[:, -2:].sum(1) % 11) == 0


def length_is_a_prime_seven(ids: Tensor, _scores: Any) -> bool:
    """Stop a row whose length is a multiple of seven; answers with a plain bool, as some do."""
    return ids.shape[1] % 7 == 0


def run(case: Case) -> tuple[list[list[int]], list[list[int]]]:
    """Return the texts of the engine and those of the plain loop."""
    target = tiny_target(case.family)
    seeds = case.rules.seed if isinstance(case.rules.seed, list) else None
    rules = case.rules
    if case.waiting and seeds is None:  # rows that come later have seeds of their own
        assert isinstance(rules.seed, int)
        rules = replace(rules, seed=[rules.seed + row for row in range(len(case.prompts))])
    expected = plain_generate(target, case.prompts, rules)
    engine = SpeculativeEngine(target, make_drafter(case, target), case.max_nodes, proposal=_proposal(case))
    if not case.waiting:
        return engine.generate(case.prompts, rules).outputs, expected
    now = len(case.prompts) - case.waiting
    state = engine.prefill(case.prompts[:now], replace(part(rules, slice(None, now)), holds_slots=True))
    for row in range(now, len(case.prompts)):
        while not state.free_slots:
            engine.step(state)
        engine.admit(state, [case.prompts[row]], replace(part(rules, slice(row, row + 1)), holds_slots=True))
    state.holds_slots = False
    while not state.done:
        engine.step(state)
    return state.outputs, expected


def _proposal(case: Case) -> str | None:
    return case.proposal if case.drafter == "medusa" else None


def part(rules: DecodingRules, rows: slice) -> DecodingRules:
    """Return the rules of some of the rows."""
    most, seeds = rules.max_new_tokens, rules.seed
    return replace(
        rules,
        max_new_tokens=most if isinstance(most, int) else list(most)[rows],
        seed=list(seeds)[rows] if isinstance(seeds, list) else seeds,
    )


def make_drafter(case: Case, target: Target) -> Drafter | None:
    """Make the drafter of a case; told ones know the text without stops, a little further than it can go."""
    rng = random.Random(case.seed + 1)
    if case.drafter == "none":
        return None
    if case.drafter == "medusa":
        drafter = scrambled(build_drafter("medusa", target.model, num_heads=rng.randint(1, 4)))
        drafter.set_topology(random_topology(rng, drafter.config.num_heads).paths())
        return drafter
    most = case.rules.max_new_tokens
    longest = most if isinstance(most, int) else max(most)
    room = [min(longest, LIMIT - len(prompt)) for prompt in case.prompts]
    told = replace(case.rules, max_new_tokens=room, eos_token_ids=(), criteria=())
    texts = plain_generate(target, case.prompts, told)
    whole = [prompt + text + [1] * LIMIT for prompt, text in zip(case.prompts, texts, strict=True)]
    if case.drafter == "random":
        return RandomDrafter(whole, nodes=rng.randint(2, 14), seed=case.seed)
    trees = [random_topology(rng, 5) for _ in range(rng.randint(1, 3))]
    return ScriptedDrafter(whole, [rng.randint(0, 5) for _ in range(3)], *trees)


def random_topology(rng: random.Random, depth: int) -> TreeTopology:
    """Grow a random tree of at most `depth`."""
    paths: list[tuple[int, ...]] = [(0,)]
    for _ in range(rng.randint(0, 12)):
        parent = rng.choice([(), *paths])
        children = sum(path[:-1] == parent for path in paths)
        if len(parent) < depth and children < 4:
            paths.append((*parent, children))
    return TreeTopology.from_paths(paths)


def differs(seed: int) -> str | None:
    """Run the case of a seed; say what differs, or None. Anything raised comes with the case."""
    case = random_case(seed)
    try:
        with torch.random.fork_rng(devices=[]):
            found, expected = run(case)
    except Exception as error:
        raise AssertionError(f"{case} raised {error!r}") from error
    return None if found == expected else f"{case}\n  found    {found}\n  expected {expected}"
