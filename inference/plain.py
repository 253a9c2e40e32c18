"""The plain loop: one row, one token a pass, on the same target and sampling.

The oracle that tests hold the engine to. It shares no code with it beyond `Target` and `Sampling`: no tree, no ragged
rows, no verdict. In benchmarks "autoregressive" means transformers' own `generate`, not this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from ..core.noise import KeyedNoise, request_keys
from ..core.sampling import Sampling
from .state import DecodingRules
from .target import Target


@torch.inference_mode()
def plain_generate(target: Target, prompts: Sequence[Sequence[int]], rules: DecodingRules) -> list[list[int]]:
    """Return the new tokens of each row, generated row by row, token by token."""
    keys = request_keys(rules.seed, len(prompts), target.device) if rules.do_sample else None
    outputs = []
    for row, prompt in enumerate(prompts):
        noise = None if keys is None else KeyedNoise(keys[row : row + 1], target.vocab_size)
        processors = rules.processors[row] if isinstance(rules.processors, tuple) else rules.processors
        sampling = Sampling(processors if processors is not None else LogitsProcessorList(), noise)
        budget = rules.max_new_tokens if isinstance(rules.max_new_tokens, int) else rules.max_new_tokens[row]
        outputs.append(_generate_row(target, list(prompt), budget, rules, sampling))
    return outputs


def _generate_row(
    target: Target, tokens: list[int], budget: int, rules: DecodingRules, sampling: Sampling
) -> list[int]:
    cache = target.new_cache(1)
    done, new = 0, []
    for _ in range(budget):
        block = torch.tensor([tokens[done:]], device=target.device)
        size = block.shape[1]
        positions = torch.arange(done, done + size, device=target.device)[None]
        lower = torch.ones(1, size, size, dtype=torch.bool, device=target.device).tril()
        out = target.forward(block, positions, lower, cache, ())
        cache.commit(torch.arange(size, device=target.device)[None], torch.tensor([size], device=target.device))
        done += size
        logits = target.logits(out.final[:, -1])
        everything = torch.tensor([tokens], device=target.device)
        at = torch.tensor([done], device=target.device)
        token = int(sampling.pick(logits, at, lambda _row, ids=everything: ids))
        tokens.append(token)
        new.append(token)
        so_far = torch.tensor([tokens], device=target.device)
        if token in rules.eos_token_ids or any(bool(criterion(so_far, None)) for criterion in rules.criteria):
            break
    return new
