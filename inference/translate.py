"""From the arguments of a transformers `generate` call to the engine's rules, and from its rows back to outputs.

Left padding ends here: the engine sees each row's true tokens, so what transformers has counted from the padded start
of a batch is counted anew for every row. What the engine cannot honour is refused by name, never dropped.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..core.sampling import Sampling
from .state import DecodingRules, EngineState

REFUSED_ARGUMENTS = {
    "assistant_model": "the attached drafter takes its place",
    "prompt_lookup_num_tokens": "the attached drafter takes its place",
    "inputs_embeds": "the drafter needs token ids; pass input_ids",
    "past_key_values": "the engine keeps a cache of its own; pass the whole prompt",
    "cache": "the engine keeps a cache of its own; pass the whole prompt",
    "position_ids": "positions follow from attention_mask; leave it out",
    "custom_generate": "the engine is the generation loop here; call model.generate for another one",
}

REFUSED_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale needs a second model pass per token",
    SynthIDTextWatermarkLogitsProcessor: "SynthID's watermark counts its own calls",
}

COUNTED_FROM_PADDED_START = {
    ExponentialDecayLengthPenalty: "regulation_start",
    ForcedEOSTokenLogitsProcessor: "max_length",
    MinNewTokensLengthLogitsProcessor: "prompt_length_to_skip",
    SuppressTokensAtBeginLogitsProcessor: "begin_index",
}
"""Attributes in which transformers' processors keep a length of the padded batch."""

OF_ONE_ROW = (
    *COUNTED_FROM_PADDED_START,
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
"""Processors that may hold something of a row: its padding, its prompt or its number."""


def rules_of(
    prompts: Sequence[list[int]],
    padded_length: int,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    seed: int | Sequence[int] | None,
) -> DecodingRules:
    """Return the engine's rules for a call that transformers has prepared.

    prompts: true tokens of each row. Raises ValueError, by name, for what the engine cannot honour.
    """
    _refuse(config, processors)
    if config.max_length is None:
        raise ValueError("a generation must have an end: set max_new_tokens")
    eos = sorted({int(i) for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id})
    others = [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]
    return DecodingRules(
        max_new_tokens=config.max_length - padded_length,
        eos_token_ids=eos,
        processors=_by_row(processors, prompts, padded_length, config),
        do_sample=bool(config.do_sample),
        seed=seed,
        criteria=others,
        keep_logits=bool(config.return_dict_in_generate and (config.output_scores or config.output_logits)),
    )


def _refuse(config: GenerationConfig, processors: LogitsProcessorList) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"{mode.value.replace('_', ' ')} cannot be verified with a draft tree; use greedy decoding or sampling "
            "(num_beams=1, no penalty_alpha, no other assistant)"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(f"{name} is not available with an attached drafter; generate with the model alone for it")
    for refused, why in REFUSED_PROCESSORS.items():
        if any(isinstance(p, refused) for p in processors):
            raise ValueError(f"{why}, which a draft tree cannot honour; leave it out")


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


def true_tokens(input_ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Return each row's tokens without padding. Raises ValueError for a mask that is not padding on the left."""
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


def _by_row(
    processors: LogitsProcessorList, prompts: Sequence[list[int]], padded_length: int, config: GenerationConfig
) -> LogitsProcessorList | tuple[LogitsProcessorList, ...]:
    """Return one list a row where a processor holds something of the rows, else the list itself."""
    if not any(isinstance(p, OF_ONE_ROW) for p in processors):
        return processors
    return tuple(
        LogitsProcessorList(_for_row(p, row, prompt, padded_length - len(prompt), config) for p in processors)
        for row, prompt in enumerate(prompts)
    )


def _for_row(p: Any, row: int, prompt: list[int], padding: int, config: GenerationConfig) -> LogitsProcessor:
    """Return a processor as transformers would have made it for the row alone."""
    if not isinstance(p, OF_ONE_ROW):
        return p
    own = copy.copy(p)
    if type(p) in COUNTED_FROM_PADDED_START:
        name = COUNTED_FROM_PADDED_START[type(p)]
        setattr(own, name, getattr(p, name) - padding)
    elif isinstance(p, MinLengthLogitsProcessor) and config.min_new_tokens is not None:
        own.min_length = p.min_length - padding  # transformers has made it from min_new_tokens
    elif isinstance(p, RepetitionPenaltyLogitsProcessor) and isinstance(p.prompt_ignore_length, Tensor):
        own.prompt_ignore_length = p.prompt_ignore_length[row : row + 1] - padding
    elif isinstance(p, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = torch.tensor([prompt], device=p.encoder_input_ids.device)
    elif isinstance(p, EncoderNoRepeatNGramLogitsProcessor):
        own = EncoderNoRepeatNGramLogitsProcessor(p.ngram_size, torch.tensor([prompt]))  # type: ignore[arg-type]
    elif isinstance(p, PrefixConstrainedLogitsProcessor):
        allowed, number = p._prefix_allowed_tokens_fn, row // p._num_beams
        own = PrefixConstrainedLogitsProcessor(lambda _row, prefix: allowed(number, prefix), 1)
    return own


def outputs_of(
    input_ids: Tensor, prompts: Sequence[list[int]], state: EngineState, config: GenerationConfig
) -> Tensor | GenerateDecoderOnlyOutput:
    """Return what transformers would: the padded sequences [B, P + new] long, or its output object around them."""
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(state.rules.eos_token_ids), 0)
    longest = max(len(row) for row in state.outputs)
    new = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in state.outputs], device=input_ids.device)
    sequences = cast(torch.LongTensor, torch.cat([input_ids, new], dim=1))
    if not config.return_dict_in_generate:
        return sequences
    logits = [torch.stack(row).float() for row in state.logits] if state.rules.keep_logits else []
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_token(_processed(logits, prompts, state)) if config.output_scores else None,  # type: ignore[arg-type]
        logits=_by_token(logits) if config.output_logits else None,  # type: ignore[arg-type]
    )


def _processed(logits: Sequence[Tensor], prompts: Sequence[list[int]], state: EngineState) -> list[Tensor]:
    """Return the processed scores [n, V] of each row's n new tokens, each with its own prefix."""
    found = []
    for row, raw in enumerate(logits):
        lists = state.rules.processors
        own = lists[row] if isinstance(lists, tuple) else lists
        tokens = torch.tensor([[*prompts[row], *state.outputs[row]]], device=raw.device)
        start = len(prompts[row])
        sampling = Sampling(own if own is not None else LogitsProcessorList(), None)
        found.append(sampling.process(raw, lambda place, ids=tokens, at=start: ids[:, : at + place]))
    return found


def _by_token(rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Turn [n, V] of each row into one [B, V] a new token, as transformers has it; rows that have ended give zeros."""
    longest = max(len(row) for row in rows)
    padded = [torch.nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows]
    return torch.stack(padded, dim=1).unbind(0)
