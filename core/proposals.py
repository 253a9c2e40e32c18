"""How a drafter's law becomes candidates: the likeliest, the likeliest under shared noise, or draws.

Any drafter that yields a law calls `candidates` and so offers every proposal. It knows neither trees nor methods.

- "top_k": the most likely tokens. What greedy decoding wants.
- "shared_noise": the top of log q + g with the noise g that the target is going to draw with: the very draw the target
  would make if q were its law. Lossless token for token; the default for sampling.
- "sampled": draws without replacement, "sampled_iid": independent draws; for the classic rule of speculative sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Sampling

PROPOSALS = ("top_k", "shared_noise", "sampled", "sampled_iid")
DRAFT_STREAM = 16
"""First stream of keyed noise for a drafter's own draws; independent draws use one each."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """What may follow a node, best first or in draw order.

    index [..., R] long: entries of the law. scores [..., Vd] fp32: what they were chosen by.
    possible [..., R] bool: False where the law, after the target's filters, had no token left to draw.
    law [..., Vd] fp32: what they were drawn from; None where they were chosen. replacement: drawn independently.
    """

    index: Tensor
    scores: Tensor
    possible: Tensor | None = None
    law: Tensor | None = None
    replacement: bool = False

    def confidence(self) -> Tensor:
        """Return the log-probability of each [..., R] fp32; under shared noise, that of winning the race, as it stands.

        A pass over the whole law, made only where asked for: static trees need none.
        """
        return self.scores.gather(-1, self.index) - self.scores.logsumexp(-1, keepdim=True)


def candidates(
    scores: Tensor, width: int, proposal: str, sampling: Sampling, positions: Tensor, token_ids: Tensor | None
) -> Candidates:
    """Choose or draw `width` candidates from every law.

    scores [B, P, Vd]: unnormalised log-laws. positions [B, P] or [B, 1] long: position of the token that each law is
    about; laws of one position share their noise. token_ids [Vd] long: tokens of the entries, None for all of V.
    Greedy decoding takes the most likely ones, whatever the proposal.
    """
    scores = scores.float()
    noise = sampling.noise
    if noise is None or proposal == "top_k":
        return Candidates(scores.topk(width, dim=-1).indices, scores)
    narrowed = sampling.narrow(scores)
    if proposal == "shared_noise":
        keys = narrowed + noise(positions, token_ids)
        return Candidates(keys.topk(width, dim=-1).indices, keys)
    log_q = narrowed.log_softmax(-1)
    if proposal == "sampled":
        index = (log_q + noise.stream(DRAFT_STREAM)(positions, token_ids)).topk(width, dim=-1).indices
    else:
        draws = [noise.stream(DRAFT_STREAM + draw)(positions, token_ids) for draw in range(width)]
        index = torch.stack([(log_q + gumbel).argmax(-1) for gumbel in draws], dim=-1)
    possible = log_q.gather(-1, index) > -torch.inf
    return Candidates(index, log_q, possible, log_q.exp(), proposal == "sampled_iid")
