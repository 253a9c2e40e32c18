"""How far a drafter's law q is from the target's law p, label by label, with gradients written down.

Each function takes logits [M, Vd] of the drafter and the target's law [M, Vd], computes in the law's type (fp32 in
training) and returns a loss [M]. Over a draft vocabulary p is renormalised: each row sums to 1, and what the target
says outside is not missed. Softmaxes of M x Vd numbers are nothing to compute and much to move, and these are a large
part of a drafter's step, so values and gradients share passes. The gradient of the logits is q (u - sum q u) for a loss
whose derivative by q is u. A law may be 0 where it is too small for its type: nothing here takes the logarithm of 0.
Knows neither chunks nor depths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LK_DECAY = 3.0
"""How fast the LK-hybrid loss goes over from KL to total variation: the paper's best (arXiv 2602.23881)."""


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Return -sum p log q [M]: the KL divergence of q from p up to a constant, the entropy of p."""
    return SoftCrossEntropy.apply(logits, law)  # type: ignore[return-value]


class SoftCrossEntropy(torch.autograd.Function):
    """log Z - sum p s for scores s, with the gradient q - p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor) -> Tensor:
        """Return the loss [M]."""
        q, loss = _cross_entropy(logits, law)
        ctx.save_for_backward(q, law)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [M, Vd]; the law is the target's and gets none."""
        q, law = ctx.saved_tensors
        return ((q - law) * gradients[0][:, None]).to(ctx.dtype), None


def reverse_kl(logits: Tensor, law: Tensor) -> Tensor:
    """Return sum q log(q / p) [M]: the KL divergence of p from q, large where q says what p never would.

    A probability p below the smallest normal number of its type counts as that number.
    """
    return ReverseKL.apply(logits, law)  # type: ignore[return-value]


class ReverseKL(torch.autograd.Function):
    """The loss l, with the gradient q (log(q / p) - l), which alone is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor) -> Tensor:
        """Return the loss [M]."""
        q = logits.to(law.dtype).softmax(-1)
        ratio = law.clamp(min=_tiny(law))
        parts = _times_log(q, torch.div(q, ratio, out=ratio))
        loss = parts.sum(-1)
        ctx.save_for_backward(parts.addcmul_(q, loss[:, None], value=-1))
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [M, Vd]; the law is the target's and gets none."""
        return (ctx.saved_tensors[0] * gradients[0][:, None]).to(ctx.dtype), None


def jensen_shannon(logits: Tensor, law: Tensor) -> Tensor:
    """Return KL(p | m) / 2 + KL(q | m) / 2 [M] with the even mixture m = (p + q) / 2: from 0 to log 2."""
    return JensenShannon.apply(logits, law)  # type: ignore[return-value]


class JensenShannon(torch.autograd.Function):
    """The loss, with the gradient q (log(q / m) - KL(q | m)) / 2, which alone is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor) -> Tensor:
        """Return the loss [M]."""
        q = logits.to(law.dtype).softmax(-1)
        mixture = q.add(law).div_(2).clamp_(min=_tiny(law))
        of_p = _times_log(law, law / mixture).sum(-1)
        parts = _times_log(q, torch.div(q, mixture, out=mixture))
        of_q = parts.sum(-1)
        ctx.save_for_backward(parts.addcmul_(q, of_q[:, None], value=-1))
        ctx.dtype = logits.dtype
        return (of_p + of_q) / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [M, Vd]; the law is the target's and gets none."""
        return (ctx.saved_tensors[0] * (gradients[0] / 2)[:, None]).to(ctx.dtype), None


def total_variation(logits: Tensor, law: Tensor) -> Tensor:
    """Return 1 - sum min(p, q) = sum |p - q| / 2 [M].

    The probability that speculative sampling rejects a token drawn from q (arXiv 2211.17192), exactly so where the
    draft vocabulary is the whole one. Where p and q are equal it has no derivative, and 0 is taken for that of |p - q|.
    """
    return TotalVariation.apply(logits, law)  # type: ignore[return-value]


class TotalVariation(torch.autograd.Function):
    """1 - sum min(p, q), with the gradient q (e - sum q e) / 2 for the signs e of q - p."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor) -> Tensor:
        """Return the loss [M]."""
        q = logits.to(law.dtype).softmax(-1)
        ctx.save_for_backward(q, law)
        ctx.dtype = logits.dtype
        return 1 - torch.minimum(q, law).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [M, Vd]; the law is the target's and gets none."""
        q, law = ctx.saved_tensors
        signed = (q - law).sign_().mul_(q)
        signed.addcmul_(q, signed.sum(-1, keepdim=True), value=-1)
        return signed.mul_((gradients[0] / 2)[:, None]).to(ctx.dtype), None


def lk_parts(logits: Tensor, law: Tensor) -> Tensor:
    """Return the two losses that the LK-hybrid loss blends [2, M]: soft cross-entropy and total variation."""
    return torch.stack(LKParts.apply(logits, law))  # type: ignore[arg-type]


class LKParts(torch.autograd.Function):
    """`SoftCrossEntropy` and `TotalVariation` from one softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
        """Return both losses [M]."""
        q, cross_entropy = _cross_entropy(logits, law)
        ctx.save_for_backward(q, law)
        ctx.dtype = logits.dtype
        return cross_entropy, 1 - torch.minimum(q, law).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits [M, Vd]; the law is the target's and gets none."""
        q, law = ctx.saved_tensors
        of_cross_entropy, of_variation = gradients[0][:, None], gradients[1][:, None] / 2
        difference = q - law
        signed = difference.sign().mul_(q)
        signed.addcmul_(q, signed.sum(-1, keepdim=True), value=-1)
        return difference.mul_(of_cross_entropy).addcmul_(signed, of_variation).to(ctx.dtype), None


def lk_blend(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the LK-hybrid loss [K], a sum over the labels of each depth (arXiv 2602.23881).

    sums [K, 2]: of `lk_parts`. counts [K]: labels. With the mean acceptance a = 1 - TV of a depth's labels, the loss is
    w KL + (1 - w) TV with w = exp(-3 a), through which no gradient goes: KL while the drafter is bad, TV once it is
    good. For KL the cross-entropy stands, as in "kl".
    """
    acceptance = 1 - sums[:, 1].detach() / counts.clamp(min=1)
    weight = torch.exp(-LK_DECAY * acceptance)
    return weight * sums[:, 0] + (1 - weight) * sums[:, 1]


LAW_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "lk": lk_parts,
}
"""Losses against the target's law by name: logits [M, Vd] and law [M, Vd] to a loss [M], or parts of one [2, M]."""


def hard_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log q(label) [M]; 0 where the label is negative, that is, outside the draft vocabulary.

    logits [M, Vd]; labels [M] long: indices into Vd.
    """
    return F.cross_entropy(logits.float(), labels, ignore_index=-1, reduction="none")


def _cross_entropy(logits: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Return q [M, Vd] and -sum p log q [M]."""
    scores = logits.to(law.dtype)
    q = scores.softmax(-1)
    log_normaliser = scores.amax(-1) - q.amax(-1).log()
    return q, log_normaliser - (scores * law).sum(-1)


def _times_log(law: Tensor, ratio: Tensor) -> Tensor:
    """Return law x log(ratio) [M, Vd] in the place of the ratio, 0 where the law is."""
    return ratio.clamp_(min=_tiny(law)).log_().mul_(law)


def _tiny(law: Tensor) -> float:
    return torch.finfo(law.dtype).tiny
