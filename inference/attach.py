"""attach: give a loaded transformers model a drafter, and get an object with transformers' own `generate`.

The preparation of a call (defaults, masks, processors, lengths) is left to transformers: `generate` goes through the
model's own `generate` and its hook for a generation loop, `custom_generate`, with our engine as the loop. What such a
loop cannot honour is refused by name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..drafters.base import Drafter
from ..drafters.registry import METHODS, AutoDrafter, new_drafter
from .engine import EngineState, SpeculativeEngine
from .stats import GenerationStats
from .target import Target

REFUSED_ARGUMENTS = {
    "assistant_model": "the attached drafter takes its place",
    "prompt_lookup_num_tokens": "the attached drafter takes its place",
    "inputs_embeds": "the drafter needs token ids; pass input_ids",
    "past_key_values": "the engine keeps a cache of its own; pass the whole prompt",
    "cache": "the engine keeps a cache of its own; pass the whole prompt",
    "position_ids": "positions follow from attention_mask; leave it out",
    "custom_generate": "the engine is the generation loop here; call model.generate for another one",
    "stop_strings": "end on token ids (eos_token_id) or cut the text afterwards",
}

REFUSED_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale needs a second model pass per token",
    SynthIDTextWatermarkLogitsProcessor: "SynthID's watermark counts its own calls",
}
PADDED_START = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)
"""Processors that transformers prepares for the padded length; the engine shows them each row's true tokens."""


def build_drafter(
    method: str, model: PreTrainedModel, draft_vocabulary: Tensor | None = None, **settings: Any
) -> Drafter:
    """Make a fresh drafter for a loaded model, initialised from its weights.

    method: a name such as "medusa". settings: fields of the method's configuration, such as num_heads.
    draft_vocabulary [Vd] long: sorted ids of the tokens it can guess; None means all.

    Raises ValueError for an unknown method or setting, naming the nearest, and for a model that cannot verify trees.
    """
    return new_drafter(method, Target(model), draft_vocabulary, **settings)


def attach(model: PreTrainedModel, drafter: Drafter | str | Path, max_nodes: int | None = None) -> AttachedModel:
    """Give a model a drafter.

    model: any loaded transformers causal language model; it is not changed.
    drafter: a drafter (moved to the model's device and dtype), a checkpoint folder, a method's name (fresh and
        untrained), or a Hub id; looked up in that order.
    max_nodes: bound on tree nodes per step, root included; None leaves it to the drafter.

    Raises ValueError when they do not fit each other.
    """
    target = Target(model)
    if not isinstance(drafter, Drafter):
        fresh = not Path(drafter).is_dir() and str(drafter) in METHODS
        drafter = new_drafter(str(drafter), target) if fresh else AutoDrafter.from_pretrained(drafter)
    drafter.check_fits(target)
    drafter.to(device=target.device, dtype=target.dtype).eval()  # type: ignore[arg-type]
    return AttachedModel(SpeculativeEngine(target, drafter, max_nodes))


class AttachedModel:
    """A model with a drafter: the same text as the model alone, in fewer passes.

    last_stats: what the last call did; see `GenerationStats`.
    """

    def __init__(self, engine: SpeculativeEngine) -> None:
        self.engine = engine
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

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        streamer: BaseStreamer | None = None,
        seed: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate as `model.generate` does, with transformers' own arguments, defaults and return types.

        inputs or input_ids [B, P] long, attention_mask [B, P]: prompts, left-padded where lengths differ.
        streamer: gets the prompt, then the new tokens as they come; one row only.
        seed: when sampling, an int or one per row; the text depends on the target and the seed alone. None draws one
            from torch's global generator.

        Returns [B, P + new] long, shorter rows padded at the end with pad_token_id.
        Raises ValueError for what a tree cannot do (beam search, contrastive search, guidance, ...).
        """
        for name, why in REFUSED_ARGUMENTS.items():
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} cannot be used with an attached drafter: {why}")
        loop = partial(self._loop, on_streamer=streamer, on_seed=seed)
        return self.model.generate(inputs, generation_config, custom_generate=loop, **kwargs)  # type: ignore[return-value]

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | Sequence[int] | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Serve as transformers' hook: `model.generate(**inputs, custom_generate=fast, seed=0)`.

        transformers passes neither streamer, tokenizer nor assistant_model to such a loop (a streamer would
        wait for its end in vain): use `generate` here for streaming.
        """
        if model is not self.model:
            raise ValueError("custom_generate must be used with the model it was attached to; attach the drafter again")
        return self._loop(
            model, input_ids, logits_processor, stopping_criteria, generation_config, None, seed, **model_kwargs
        )

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
        mask = model_kwargs.get("attention_mask")
        prompts = _true_tokens(input_ids, mask)
        refuse_unsupported(generation_config, logits_processor, stopping_criteria)
        refuse_inputs(model_kwargs, mask)
        refuse_batched(logits_processor, len(prompts), any(len(prompt) < input_ids.shape[1] for prompt in prompts))
        if on_streamer is not None and len(prompts) != 1:
            raise ValueError(f"a streamer takes one row, but the batch has {len(prompts)}; stream rows one by one")
        eos = sorted({int(i) for c in stopping_criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id})
        assert generation_config.max_length is not None
        budget = generation_config.max_length - input_ids.shape[1]
        do_sample = bool(generation_config.do_sample)
        state = self.engine.prefill(prompts, budget, eos, logits_processor, do_sample, on_seed)
        self._run(state, prompts, on_streamer)
        pad = generation_config.pad_token_id
        sequences = _padded(input_ids, state.outputs, pad if pad is not None else (eos[0] if eos else 0))
        self.last_stats = state.stats
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences))
        return sequences

    def _run(self, state: EngineState, prompts: list[list[int]], streamer: BaseStreamer | None) -> None:
        put: Callable[[Tensor], None] = streamer.put if streamer is not None else (lambda _tokens: None)
        put(torch.tensor(prompts[:1]))
        for gained in self.engine.stream(state):
            for token in gained[0] if streamer is not None else ():
                put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()


def refuse_unsupported(
    config: GenerationConfig, processors: LogitsProcessorList, criteria: StoppingCriteriaList
) -> None:
    """Raise ValueError, by name, for every setting that the engine would otherwise drop."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"{mode.value.replace('_', ' ')} cannot be verified with a draft tree; use greedy decoding or sampling "
            "(num_beams=1, no penalty_alpha, no other assistant)"
        )
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is not available with an attached drafter; generate with the model alone for it")
    for refused, why in REFUSED_PROCESSORS.items():
        if any(isinstance(p, refused) for p in processors):
            raise ValueError(f"{why}, which a draft tree cannot honour; leave it out")
    others = [type(c).__name__ for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    if others:
        raise ValueError(
            f"stopping criteria must be token ids or lengths, but found {', '.join(others)}; leave them out"
        )


def refuse_inputs(model_kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Raise ValueError for model inputs that would change the text and that the engine does not pass on."""
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(f"inputs_embeds cannot be used with a drafter: {REFUSED_ARGUMENTS['inputs_embeds']}")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        plain = torch.ones_like(positions) if mask is None else mask.long()
        shown = plain.bool().expand_as(positions)
        if not torch.equal(positions[shown], (plain.cumsum(-1) - 1).expand_as(positions)[shown]):
            raise ValueError(f"position_ids cannot be used with a drafter: {REFUSED_ARGUMENTS['position_ids']}")


def refuse_batched(processors: LogitsProcessorList, rows: int, padded: bool) -> None:
    """Raise ValueError for processors that work on a whole padded batch; ours are shown one row's true tokens."""
    names = [type(p).__name__ for p in processors if padded and isinstance(p, PADDED_START)]
    if names:
        raise ValueError(
            f"{', '.join(names)} counts tokens from the padded start of a row; pass prompts without padding, row by row"
        )
    if rows > 1 and any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors):
        raise ValueError("prefix_allowed_tokens_fn asks for the row's number; call generate row by row")


def _true_tokens(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return each row's tokens without padding. Raises ValueError for a mask that is not padding on one side."""
    rows = input_ids.tolist()
    if mask is None:
        return rows
    kept = mask.bool()
    starts, ends = kept.int().argmax(1), kept.shape[1] - kept.flip(1).int().argmax(1)
    if bool((kept.sum(1) != ends - starts).any()):
        raise ValueError("attention_mask must hide padding at the ends of a row only, but it has holes")
    if bool((ends < kept.shape[1]).any()):
        raise ValueError("prompts must be padded on the left, as transformers' generate wants; set padding_side='left'")
    return [row[start:] for row, start in zip(rows, starts.tolist(), strict=True)]


def _padded(input_ids: Tensor, outputs: Sequence[Sequence[int]], pad: int) -> Tensor:
    longest = max(len(row) for row in outputs)
    new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in outputs], device=input_ids.device)
    return torch.cat([input_ids, new], dim=1)
