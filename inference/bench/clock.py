"""Where the time of a decoding step goes: a drafter with a clock, and clocks on the matrix products.

The engine's own statistics know its phases. Two things they cannot see are timed here: how much of the commit phase is
the drafter taking in what was committed, and how much of the drafter's time is its own matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...core.tree import DraftTree
from ...drafters.base import Drafter, DraftRequest, DraftState, Observed, TargetView
from ..clock import synchronise

PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    torch.nn.functional.scaled_dot_product_attention,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
}
"""Functions that count as matrix products: what a drafter cannot do without."""


class ProductClock(TorchFunctionMode):
    """While active, adds up the seconds spent in matrix products; costs a microsecond or two a torch call."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.seconds = device, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; time it if it is a matrix product."""
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        synchronise(self.device)
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        synchronise(self.device)
        self.seconds += time.perf_counter() - start
        return result


class ClockedDrafter:
    """Passes everything on to a drafter and notes how long it took; stands in for it in the engine.

    products: a clock for the drafter's own matrix products; None leaves them untimed and the drafter undisturbed.
    waits: wait for the device before a clock is read; without it a GPU's time shows up wherever it is next waited for.
    inside: whether the drafter is at work right now.
    """

    def __init__(self, drafter: Drafter, products: ProductClock | None = None, waits: bool = True) -> None:
        self.drafter, self.products, self.waits = drafter, products, waits
        self.inside = self._after_prefill = False
        self.reset()

    def __getattr__(self, name: str) -> Any:
        """Answer as the drafter would; called only for what is not defined here."""
        return getattr(self.drafter, name)

    def reset(self) -> None:
        """Set the clocks to zero."""
        self.propose_seconds = self.observe_seconds = 0.0

    def init_state(self, batch_size: int) -> DraftState:
        """Pass on; what is observed next is the prompt."""
        self._after_prefill = True
        return self.drafter.init_state(batch_size)

    def observe(self, observed: Observed, state: DraftState, target: TargetView) -> None:
        """Pass on and time, but not the prompt's observation, which belongs to the prefill."""
        if self._after_prefill:
            self._after_prefill = False
            return self.drafter.observe(observed, state, target)
        start = self._now(target)
        with self._counting():
            self.drafter.observe(observed, state, target)
        self.observe_seconds += self._now(target) - start

    def propose(self, state: DraftState, target: TargetView, request: DraftRequest) -> DraftTree:
        """Pass on and time."""
        start = self._now(target)
        with self._counting():
            tree = self.drafter.propose(state, target, request)
        self.propose_seconds += self._now(target) - start
        return tree

    def _now(self, target: TargetView) -> float:
        if self.waits:
            synchronise(target.device)
        return time.perf_counter()

    @contextmanager
    def _counting(self) -> Iterator[None]:
        self.inside = True
        with nullcontext() if self.products is None else self.products:
            yield
        self.inside = False
