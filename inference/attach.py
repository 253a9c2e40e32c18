"""attach: give a loaded transformers model a drafter, and get an object with transformers' own `generate`.

The preparation of a call (defaults, masks, processors, lengths) is left to transformers: `generate` goes through the
model's own `generate` and its hook for a generation loop, `custom_generate`, with our engine as the loop. What such a
loop cannot honour is refused by name, never dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.tree import TreeTopology
from ..drafters.base import Drafter
from ..drafters.registry import METHODS, AutoDrafter, new_drafter
from .adapters import AppliedAdapter, adapt
from .engine import SpeculativeEngine
from .state import EngineState
from .stats import GenerationStats
from .target import Target
from .translate import REFUSED_ARGUMENTS, outputs_of, refuse_inputs, rules_of, true_tokens
from .tune.store import Tuning, nearest, tunings_of


def build_drafter(
    method: str, model: PreTrainedModel, draft_vocabulary: Tensor | None = None, **settings: Any
) -> Drafter:
    """Make a fresh drafter for a loaded model, initialised from its weights.

    method: a name such as "medusa". settings: fields of the method's configuration, such as num_heads.
    draft_vocabulary [Vd] long: sorted ids of the tokens it can guess; None means all.

    Raises ValueError for an unknown method or setting, naming the nearest, and for a model that cannot verify trees.
    """
    return new_drafter(method, Target(model), draft_vocabulary, **settings)


def attach(
    model: PreTrainedModel,
    drafter: Drafter | str | Path,
    max_nodes: int | None = None,
    acceptance: str = "lossless",
    proposal: str | None = None,
    tuned: bool = True,
    apply_adapter: bool = False,
) -> AttachedModel:
    """Give a model a drafter.

    model: any loaded transformers causal language model; it is not changed, unless `apply_adapter` asks for it.
    drafter: a drafter (moved to the model's device and dtype), a checkpoint folder, a method's name (fresh and
        untrained), or a Hub id; looked up in that order.
    max_nodes: bound on tree nodes per step, root included; None leaves it to the drafter.
    acceptance: "lossless": token for token the model's own text. When sampling also "speculative_sampling", the classic
        rule: the model's law, but another text for the same seed; and "typical", which is lossy.
    proposal: how the drafter guesses when sampling: "shared_noise", "top_k", "sampled" or "sampled_iid"; None takes
        what suits the acceptance.
    tuned: use the trees that `headstart tune` kept in the checkpoint folder for this machine, if there are any and the
        acceptance is lossless: for each call the one of the nearest batch size and temperature. The text does not
        depend on the tree.
    apply_adapter: put the LoRA adapter on the model that the drafter was trained together with. It changes what the
        model says, with and without the drafter, until `detach`; lossless then means: as the adapted model alone.

    Raises ValueError when they do not fit each other.
    """
    target = Target(model)
    tunings: list[Tuning] = []
    if not isinstance(drafter, Drafter):
        if tuned and acceptance == "lossless" and Path(drafter).is_dir():
            tunings = tunings_of(drafter, target)
        fresh = not Path(drafter).is_dir() and str(drafter) in METHODS
        drafter = new_drafter(str(drafter), target) if fresh else AutoDrafter.from_pretrained(drafter)
    drafter.check_fits(target)
    adapter = adapt(model, drafter, apply_adapter)
    drafter.to(device=target.device, dtype=target.dtype).eval()  # type: ignore[arg-type]
    return AttachedModel(SpeculativeEngine(target, drafter, max_nodes, acceptance, proposal), adapter, tunings)


class AttachedModel:
    """A model with a drafter: the same text as the model alone, in fewer passes.

    last_stats: what the last call did; see `GenerationStats`.
    adapter: the LoRA adapter that was put on the model for this drafter, if any.
    """

    def __init__(
        self, engine: SpeculativeEngine, adapter: AppliedAdapter | None = None, tunings: Sequence[Tuning] = ()
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self._tunings = tunings
        self._tuned_tree: TreeTopology | None = None
        self._take_tuned_tree(1, 0.0)
        self._attached = True
        self.last_stats = GenerationStats()

    @property
    def model(self) -> PreTrainedModel:
        """The target model."""
        return self.engine.target.model

    @property
    def drafter(self) -> Drafter:
        """The attached drafter."""
        assert self.engine.drafter is not None
        return self.engine.drafter

    def detach(self) -> PreTrainedModel:
        """Give the model back as it was before `attach`, to the bit; the drafter cannot be used on it any more."""
        if self.adapter is not None:
            self.adapter.remove()
            self.adapter = None
        self._attached = False
        return self.model

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        seed: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate as `model.generate` does, with transformers' own arguments, defaults and return types.

        inputs or input_ids [B, P] long, attention_mask [B, P]: prompts, left-padded where lengths differ.
        streamer: gets the prompt, then the new tokens as they come; one row only. tokenizer: needed by stop_strings.
        seed: when sampling, an int or one per row; the text depends on the target and the seed alone. None draws one
            from torch's global generator.
        output_scores and output_logits hold zeros for a row behind its end.

        Returns [B, P + new] long, shorter rows padded at the end with pad_token_id.
        Raises ValueError for what a tree cannot do (beam search, contrastive search, guidance, ...).
        """
        for name, why in REFUSED_ARGUMENTS.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} cannot be used with an attached drafter: {why}")
        generation_config, kwargs = _with_stop_strings(self.model, generation_config, kwargs, tokenizer)
        loop = partial(self._loop, on_streamer=streamer, on_seed=seed)
        return self.model.generate(inputs, generation_config, custom_generate=loop, **kwargs)  # type: ignore[return-value]

    def __call__(self, model: PreTrainedModel, *prepared: Any, seed: Any = None, **more: Any) -> Any:
        """Serve as transformers' hook: `model.generate(**inputs, custom_generate=fast, seed=0)`.

        transformers passes neither streamer, tokenizer nor assistant_model to such a loop (a streamer would
        wait for its end in vain): use `generate` here for streaming and stop strings.
        """
        if model is not self.model:
            raise ValueError("custom_generate must be used with the model it was attached to; attach the drafter again")
        return self._loop(model, *prepared, on_streamer=None, on_seed=seed, **more)

    def _loop(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        on_streamer: BaseStreamer | None,
        on_seed: int | Sequence[int] | None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        if not self._attached:
            raise ValueError("a drafter must be attached to generate, but this one was detached; attach it again")
        mask = model_kwargs.get("attention_mask")
        prompts = true_tokens(input_ids, mask)
        refuse_inputs(model_kwargs, mask)
        if on_streamer is not None and len(prompts) != 1:
            raise ValueError(f"a streamer takes one row, but the batch has {len(prompts)}; stream rows one by one")
        length = input_ids.shape[1]
        rules = rules_of(prompts, length, generation_config, logits_processor, stopping_criteria, on_seed)
        heat = 1.0 if generation_config.temperature is None else generation_config.temperature
        self._take_tuned_tree(len(prompts), heat if rules.do_sample else 0.0)
        state = self.engine.prefill(prompts, rules)
        self._run(state, prompts, on_streamer)
        self.last_stats = state.stats
        return outputs_of(input_ids, prompts, state, generation_config)

    def _take_tuned_tree(self, batch_size: int, temperature: float) -> None:
        """Draw the kept tree that was tuned for the most similar calls; one given to the drafter since then stays."""
        changed = self._tuned_tree is not None and self.drafter.fixed_topology is not self._tuned_tree
        tuning = None if changed else nearest(self._tunings, batch_size, temperature)
        if tuning is not None:
            self.drafter.set_topology(tuning.topology)
            self._tuned_tree = self.drafter.fixed_topology

    def _run(self, state: EngineState, prompts: list[list[int]], streamer: BaseStreamer | None) -> None:
        put: Callable[[Tensor], None] = streamer.put if streamer is not None else (lambda _tokens: None)
        put(torch.tensor(prompts[:1]))
        for gained in self.engine.stream(state):
            for token in gained[0] if streamer is not None else ():
                put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()


def _with_stop_strings(
    model: PreTrainedModel,
    config: GenerationConfig | None,
    kwargs: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """Make a criterion of stop_strings: transformers does not hand the tokenizer on to a loop of our own.

    They may stand among the arguments or in the call's configuration. Raises ValueError without a tokenizer, and for
    stop strings in the model's own configuration, which transformers would put back.
    """
    assert model.generation_config is not None
    if model.generation_config.stop_strings is not None:
        raise ValueError("stop_strings must be passed to generate: take them out of model.generation_config")
    strings = kwargs.get("stop_strings") or (config.stop_strings if config is not None else None)
    if strings is None:
        return config, kwargs
    if tokenizer is None:
        raise ValueError("stop_strings need the model's tokenizer: pass tokenizer=... to generate")
    if config is not None and config.stop_strings is not None:
        config = copy.deepcopy(config)
        config.stop_strings = None
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer, strings))
    others = {name: value for name, value in kwargs.items() if name != "stop_strings"}
    return config, {**others, "stopping_criteria": criteria}
