"""Sizes that come again.

A kernel library makes and keeps a kernel for every shape it meets (oneDNN, which CPUs use, compiles one: tens of
milliseconds and megabytes for each matrix product of a new size). Rows have any length, so work whose size follows them
is filled up to a multiple of `STEP`: a few shapes instead of hundreds, for a few percent more positions.
"""

from __future__ import annotations

STEP = 64


def rounded_up(size: int, step: int = STEP) -> int:
    """Return the next multiple of `step`, from `size` on."""
    return size + -size % step
