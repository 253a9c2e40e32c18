"""The least that a drafter's pass over a batch can take: its matrix products, noted from a real pass and called again.

Attention kernels count as products, since the two inside of them cannot be had cheaper. Knows nothing of clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..drafters import losses
from .trainer import DrafterTrainer

PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul"}
ATTENTION = "aten::_scaled_dot_product"


@dataclass(frozen=True)
class Place:
    """Where and what a tensor was: the same place stands for the same memory, as the pass used it."""

    pointer: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Place:
        """Note a tensor."""
        return cls(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def filled(self) -> Tensor:
        """Return a tensor like it, with random numbers."""
        size = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        flat = torch.zeros(max(size, 1), dtype=self.dtype, device=self.device)
        if self.dtype.is_floating_point:
            flat.uniform_(-1, 1)
        return flat.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """A matrix product or attention kernel, with places for tensors."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Products(TorchDispatchMode):
    """Notes the matrix products and attention kernels that run while it is active, the backward pass's too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the call and run it."""
        if func.name().partition(".")[0] in PRODUCTS or func.name().startswith(ATTENTION):
            noted = tree_map_only(Tensor, Place.of, (tuple(args), kwargs or {}))
            self.calls.append(Call(func, *noted))
        return func(*args, **(kwargs or {}))


def products_of(trainer: DrafterTrainer, inputs: dict[str, Tensor]) -> list[Call]:
    """Return the products of a batch's forward and backward pass, each once; nothing is left of the pass."""
    batch = trainer.make_batch(trainer._prepare_inputs(inputs))  # type: ignore[arg-type]
    device = trainer.args.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), Products() as noted, not_twice():
        with trainer.accelerator.autocast():
            loss = trainer.drafter(batch, trainer.target).loss
        loss.backward()
    trainer.drafter.zero_grad(set_to_none=True)
    return noted.calls


@contextmanager
def not_twice() -> Iterator[None]:
    """Have the loss keep what it would compute again in the backward pass."""
    own = losses.checkpoint
    losses.checkpoint = lambda function, *args, **_: function(*args)  # type: ignore[assignment]
    try:
        yield
    finally:
        losses.checkpoint = own


def again(calls: Sequence[Call]) -> Callable[[], None]:
    """Return what runs the products again, tensors at hand."""
    tensors: dict[Place, Tensor] = {}

    def at(place: Place) -> Tensor:
        if place not in tensors:
            tensors[place] = place.filled()
        return tensors[place]

    ready = [(call.function, *tree_map_only(Place, at, (call.args, call.kwargs))) for call in calls]

    def run() -> None:
        for function, args, kwargs in ready:
            function(*args, **kwargs)

    return run
