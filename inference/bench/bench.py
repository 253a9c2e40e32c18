"""One benchmark, from loaded models to a report: baseline, drafters, comparison of the texts, costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from ...core.noise import KeyedNoise, request_keys
from ...core.sampling import Sampling
from ...drafters.base import Drafter
from ..target import Target
from .compare import Divergence, look_at_divergence
from .costs import NODE_COUNTS, check_contexts, cost_curve, explain
from .coverage import coverage_report
from .machine import machine_facts
from .measure import Round, interleave, raw_calls, row_seeds
from .methods import BASELINE, NO_DRAFTER, PROMPT_LOOKUP, Autoregressive, Decoding, Engine, Method
from .prompts import BenchPrompt, PromptSet, in_batches
from .report import method_report

PROMPT_LOOKUP_TOKENS = 3
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How to measure.

    prompt_lookup: also transformers' prompt lookup (batch size 1 only). no_drafter: also our engine without a drafter;
    always there when sampling, since a seed's text is the same only within one engine. max_nodes: bound on tree nodes.
    cost_contexts: contexts of the cost curve, empty means none is measured; cost_nodes: sizes of its passes.
    """

    decoding: Decoding
    batch_size: int = 1
    repeats: int = 1
    warm_up: int = 1
    seed: int = 0
    prompt_lookup: bool = False
    no_drafter: bool = False
    max_nodes: int | None = None
    cost_contexts: tuple[int, ...] = ()
    cost_nodes: tuple[int, ...] = NODE_COUNTS
    cost_rounds: int = 15

    @property
    def times_phases(self) -> bool:
        """Whether the parts of a step are needed one by one: where costs are measured to explain the speed."""
        return bool(self.cost_contexts)

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.repeats < 1 or self.warm_up < 0 or self.cost_rounds < 1:
            raise ValueError(
                "batch_size, repeats and cost_rounds must be at least 1, warm_up at least 0, but are "
                f"{self.batch_size}, {self.repeats}, {self.cost_rounds}, {self.warm_up}"
            )
        if self.prompt_lookup and self.batch_size > 1:
            raise ValueError(
                f"transformers' prompt lookup takes one row at a time, but batch_size is {self.batch_size}; "
                "set batch_size to 1 or leave prompt_lookup out"
            )


def run_bench(
    model: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    prompts: PromptSet,
    settings: BenchSettings,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure every method on the same prompts, interleaved, and return the report.

    drafters: by the name each gets in the report. Texts are compared with transformers' `generate`, or, when sampling,
    with our engine without a drafter under the same seeds.

    Returns a dict ready for JSON: machine, settings, prompts, methods, costs, sweep, calls. Raises ValueError when a
    drafter's name is taken.
    """
    target = Target(model)
    if settings.cost_contexts:
        check_contexts(target, settings.cost_contexts, settings.cost_nodes)  # not after the long run
    methods = _methods(target, drafters, settings)
    batches = in_batches(prompts.prompts, settings.batch_size)
    decoding = settings.decoding
    rounds = interleave(methods, batches, decoding, settings.seed, settings.repeats, settings.warm_up, progress)
    reference = NO_DRAFTER if decoding.do_sample else BASELINE
    reports: dict[str, Any] = {}
    for method in methods:
        comparable = not decoding.do_sample or isinstance(method, Engine)
        found = _divergences(method.name, reference, rounds, batches, target, settings) if comparable else []
        report = method_report(method.name, rounds, batches, found, settings.seed)
        report["mean_context"] = _mean_context(method.name, rounds, batches)
        report |= _drafter_facts(method, rounds, batches, settings.max_nodes)
        if not comparable:
            report |= {"num_different": None, "num_ties": None, "differences": None}
        reports[method.name] = report
    return {
        "headstart_bench": FORMAT_VERSION,
        "machine": machine_facts(target),
        "settings": {**asdict(settings), "target": model.config.name_or_path, "reference": reference},
        "prompts": prompts.to_dict(),
        "methods": reports,
        "costs": _costs(target, reports, rounds, settings, progress) if settings.cost_contexts else None,
        "sweep": None,
        "calls": raw_calls(rounds),
    }


def _methods(target: Target, drafters: Mapping[str, Drafter], settings: BenchSettings) -> list[Method]:
    methods: list[Method] = [Autoregressive(target)]
    if settings.prompt_lookup:
        methods.append(Autoregressive(target, PROMPT_LOOKUP, PROMPT_LOOKUP_TOKENS))
    if settings.no_drafter or settings.decoding.do_sample:
        methods.append(Engine(target, None, NO_DRAFTER, times_phases=settings.times_phases))
    taken = {method.name for method in methods}
    for name, drafter in drafters.items():
        if name in taken:
            raise ValueError(f"drafters must have other names than {', '.join(sorted(taken))}, but one is {name!r}")
        methods.append(Engine(target, drafter, name, settings.max_nodes, settings.times_phases))
    return methods


def _divergences(
    name: str,
    reference: str,
    rounds: Sequence[Round],
    batches: Sequence[Sequence[BenchPrompt]],
    target: Target,
    settings: BenchSettings,
) -> list[Divergence]:
    """Return each prompt's first divergence from the reference, in the first repeat that has one."""
    firsts = [sum(len(batch) for batch in batches[:i]) for i in range(len(batches))]
    found: dict[tuple[int, int], Divergence] = {}
    for one in rounds:
        seeds = row_seeds(settings.seed, one.repeat, firsts[one.batch], len(batches[one.batch]))
        pairs = zip(one.calls[name].outputs, one.calls[reference].outputs, strict=True)
        for row, (ours, theirs) in enumerate(pairs):
            if (one.batch, row) in found or ours == theirs:
                continue
            prompt = batches[one.batch][row]
            sampling = sampling_of(settings.decoding, seeds[row], target)
            divergence = look_at_divergence(target, prompt.id, prompt.ids, ours, theirs, sampling)
            if divergence is not None:
                found[one.batch, row] = divergence
    return list(found.values())


def sampling_of(decoding: Decoding, seed: int, target: Target) -> Sampling:
    """Return how one row with this seed of its own draws."""
    noise = None
    if decoding.do_sample:
        noise = KeyedNoise(request_keys([seed], 1, target.device), target.vocab_size)
    return Sampling(decoding.processors(), noise)


def _drafter_facts(
    method: Method, rounds: Sequence[Round], batches: Sequence[Sequence[BenchPrompt]], max_nodes: int | None
) -> dict[str, Any]:
    """Return what trees a method draws, and what its draft vocabulary covers; None for each where there is none.

    tree: in words. topology: the paths of a static one, None for trees that change from step to step.
    """
    drafter = method.drafter if isinstance(method, Engine) else None
    if drafter is None:
        return {"tree": None, "topology": None, "draft_vocabulary": None}
    fixed, ids = drafter.fixed_topology, drafter.draft_token_ids
    return {
        "tree": drafter.tree_told + ("" if max_nodes is None else f"; at most {max_nodes} nodes a step"),
        "topology": None if fixed is None else fixed.paths(),
        "draft_vocabulary": None if ids is None else coverage_report(ids, method.name, rounds, batches),
    }


def _mean_context(name: str, rounds: Sequence[Round], batches: Sequence[Sequence[BenchPrompt]]) -> float:
    """Return the tokens before a decoding step, on average over rows: the prompt and half of the answer."""
    lengths = [
        len(prompt.ids) + len(output) / 2
        for one in rounds
        for prompt, output in zip(batches[one.batch], one.calls[name].outputs, strict=True)
    ]
    return sum(lengths) / len(lengths)


def _costs(
    target: Target, reports: Mapping[str, Any], rounds: Sequence[Round], settings: BenchSettings, progress: bool
) -> dict[str, Any]:
    curve = cost_curve(
        target,
        settings.cost_contexts,
        settings.cost_nodes,
        settings.batch_size,
        settings.cost_rounds,
        progress=progress,
        decoding=settings.decoding,
    )
    explained = {name: explain(name, report, rounds, curve) for name, report in reports.items()}
    return {"curve": curve.to_dict(), "explained": {name: one for name, one in explained.items() if one is not None}}
