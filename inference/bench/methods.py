"""The methods that are compared, each as one object with `run`: tokens in, tokens and times out.

`Autoregressive` is transformers' own `generate`, the baseline of every ratio (with prompt lookup: what transformers
gives for nothing). `Engine` is ours, with a drafter or with none.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...drafters.base import Drafter
from ..clock import synchronise
from ..engine import SpeculativeEngine
from ..state import DecodingRules
from ..stats import GenerationStats
from ..target import Target
from .clock import ClockedDrafter

BASELINE = "autoregressive"
PROMPT_LOOKUP = "prompt_lookup"
NO_DRAFTER = "no_drafter"


@dataclass(frozen=True, slots=True)
class Decoding:
    """How every method decodes. temperature 0 is greedy; top_k 0 and top_p 1 switch these filters off."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                "max_new_tokens must be at least 1, temperature and top_k at least 0, top_p above 0 and at most 1, but "
                f"are {self.max_new_tokens}, {self.temperature}, {self.top_k}, {self.top_p}"
            )
        if not self.do_sample and (self.top_k or self.top_p < 1):
            raise ValueError("top_k and top_p need a temperature above 0: greedy decoding has no use for them")

    @property
    def do_sample(self) -> bool:
        """Whether tokens are drawn."""
        return self.temperature > 0

    def processors(self) -> LogitsProcessorList:
        """Return transformers' processors in transformers' order."""
        chosen = LogitsProcessorList()
        if self.do_sample and self.temperature != 1:
            chosen.append(TemperatureLogitsWarper(self.temperature))
        if self.do_sample and self.top_k:
            chosen.append(TopKLogitsWarper(self.top_k))
        if self.do_sample and self.top_p < 1:
            chosen.append(TopPLogitsWarper(self.top_p))
        return chosen

    def rules(self, seed: int | Sequence[int]) -> DecodingRules:
        """Return the same for our engine; seed: an int, or one a row."""
        seeds = seed if isinstance(seed, int) else list(seed)
        return DecodingRules(self.max_new_tokens, self.eos_token_ids, self.processors(), self.do_sample, seeds)

    def generation_config(self) -> GenerationConfig:
        """Return the same for `generate`; what the model's own configuration would add is set to neutral."""
        sampling: dict[str, Any] = {}
        if self.do_sample:
            sampling = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            sampling |= {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            min_length=0,
            do_sample=self.do_sample,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=list(self.eos_token_ids) or None,
            pad_token_id=self.pad_token_id,
            **sampling,
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a method on one batch.

    outputs: new tokens of each row, up to and including the end-of-sequence id. seconds: of the whole call, prefill
    included. prefill_seconds: until the first token. steps, step_tokens: decoding steps and what they emitted, over
    rows; None where not known. observe_seconds: the drafter's share of the commit phase.
    """

    outputs: list[list[int]]
    seconds: float
    prefill_seconds: float
    steps: int | None = None
    step_tokens: int | None = None
    stats: GenerationStats | None = None
    observe_seconds: float = 0.0

    @property
    def new_tokens(self) -> int:
        """New tokens over all rows."""
        return sum(len(output) for output in self.outputs)

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the whole call per new token."""
        return self.seconds / self.new_tokens

    @property
    def decode_seconds_per_token(self) -> float | None:
        """Seconds after the prefill per token after the first of each row; None where there is none."""
        later = self.new_tokens - len(self.outputs)
        return (self.seconds - self.prefill_seconds) / later if later > 0 else None


class Method(ABC):
    """A way to generate. Abstract; final subclasses below."""

    name: str

    @abstractmethod
    def run(self, prompts: Sequence[list[int]], decoding: Decoding, seeds: Sequence[int]) -> Call:
        """Generate for one batch; seeds: one a row, without effect on greedy decoding."""


class StepStamps(StoppingCriteria):
    """Stops nothing: notes when `generate` has finished each step, and how long its rows were then."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.lengths: list[int] = []
        self._watching, self._passed = False, False

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Take for a step what follows a pass of the model, and nothing else.

        Releases of transformers before 5.20 ask about the guesses of prompt lookup too, before the pass over them.
        """
        handle = model.register_forward_hook(self._see)
        self._watching = True
        try:
            yield
        finally:
            self._watching = False
            handle.remove()

    def _see(self, *_: Any) -> None:
        self._passed = True

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note the time; answer that no row stops. Waiting costs nothing: `generate` is about to look at the answer."""
        if self._passed or not self._watching:
            synchronise(input_ids.device)
            self.seconds.append(time.perf_counter())
            self.lengths.append(input_ids.shape[1])
            self._passed = False
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Autoregressive(Method):
    """transformers' own `generate` on the same model; prompts of a batch are padded on the left, as it wants them.

    prompt_lookup: tokens that its prompt lookup guesses ahead, None for plain decoding.
    """

    def __init__(self, target: Target, name: str = BASELINE, prompt_lookup: int | None = None) -> None:
        self.target, self.name, self.prompt_lookup = target, name, prompt_lookup

    def run(self, prompts: Sequence[list[int]], decoding: Decoding, seeds: Sequence[int]) -> Call:
        """Generate; a sampled call draws from torch's generators, seeded by the first row's seed and put back after."""
        device = self.target.device
        ids, mask = left_padded(prompts, decoding.pad_token_id)
        ids, mask = ids.to(device), mask.to(device)
        config, stamps, watched = decoding.generation_config(), StepStamps(), nullcontext()
        if self.prompt_lookup is not None:
            watched = stamps.watching(self.target.model)
            config.prompt_lookup_num_tokens = self.prompt_lookup
            # before 5.20 it fails where nothing ends a text: an id that no token has ends none
            config.eos_token_id = list(decoding.eos_token_ids) or [self.target.vocab_size]
        with torch.random.fork_rng(enabled=decoding.do_sample), watched:
            if decoding.do_sample:
                torch.manual_seed(seeds[0])
            synchronise(device)
            start = time.perf_counter()
            sequences: Any = self.target.model.generate(  # pyright: ignore[reportCallIssue]
                ids, attention_mask=mask, generation_config=config, stopping_criteria=StoppingCriteriaList([stamps])
            )
            synchronise(device)
            seconds = time.perf_counter() - start
        rows = sequences[:, ids.shape[1] :].tolist()
        outputs = [upto_end(row, decoding.eos_token_ids) for row in rows]
        new = sum(len(output) for output in outputs)
        first = len(prompts) if self.prompt_lookup is None else stamps.lengths[0] - ids.shape[1]
        step_tokens = max(new - first, 0)
        steps = step_tokens if self.prompt_lookup is None else len(stamps.seconds) - 1
        return Call(outputs, seconds, stamps.seconds[0] - start, steps, step_tokens)


class Engine(Method):
    """Headstart's engine with a drafter, or with none.

    times_phases: wait for the device between the phases of a step: true times of each, at the price of some speed on
    a GPU; a CPU has nothing to wait for.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        name: str,
        max_nodes: int | None = None,
        times_phases: bool = False,
    ) -> None:
        self.target, self.name = target, name
        self.drafter = None if drafter is None else ClockedDrafter(drafter, waits=times_phases)
        drawing: Any = self.drafter
        self.engine = SpeculativeEngine(target, drawing, max_nodes, times_phases=times_phases)

    def run(self, prompts: Sequence[list[int]], decoding: Decoding, seeds: Sequence[int]) -> Call:
        """Generate; a row's text depends on its own seed alone."""
        if self.drafter is not None:
            self.drafter.reset()
        synchronise(self.target.device)
        start = time.perf_counter()
        state = self.engine.generate(prompts, decoding.rules(seeds))
        synchronise(self.target.device)
        seconds = time.perf_counter() - start
        stats = state.stats
        observing = 0.0 if self.drafter is None else self.drafter.observe_seconds
        return Call(state.outputs, seconds, stats.prefill_seconds, stats.row_steps, stats.tokens, stats, observing)


def left_padded(prompts: Sequence[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return ids [B, P] long with padding on the left, and the mask [B, P] long that is 0 there."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def upto_end(tokens: list[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Cut after the first end-of-sequence id: what follows is padding."""
    for place, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: place + 1]
    return tokens


def padding_id(model: PreTrainedModel, eos_token_ids: Sequence[int]) -> int:
    """Return the id to pad with: the model's own, or one that ends a text."""
    own = None if model.generation_config is None else model.generation_config.pad_token_id
    return int(own) if own is not None else next(iter(eos_token_ids), 0)
