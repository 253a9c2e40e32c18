"""The plain loop: one row, one token a pass, on the same target and sampling.

The oracle that tests hold the engine to. It shares no code with it beyond `Target` and `Sampling`: no tree, no ragged
rows, no verdict. In benchmarks "autoregressive" means transformers' own `generate`, not this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from ..core.sampling import KeyedNoise, Sampling, request_keys
from .target import Target


@torch.inference_mode()
def plain_generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    processors: LogitsProcessorList | None = None,
    do_sample: bool = False,
    seed: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the new tokens of each row, generated row by row, token by token."""
    keys = request_keys(seed, len(prompts), target.device) if do_sample else None
    outputs = []
    for row, prompt in enumerate(prompts):
        noise = None if keys is None else KeyedNoise(keys[row : row + 1], target.vocab_size)
        sampling = Sampling(processors if processors is not None else LogitsProcessorList(), noise)
        outputs.append(_generate_row(target, list(prompt), max_new_tokens, set(eos_token_ids), sampling))
    return outputs


def _generate_row(target: Target, tokens: list[int], budget: int, eos: set[int], sampling: Sampling) -> list[int]:
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
        if token in eos:
            break
    return new
