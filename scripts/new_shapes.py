"""Measure what a matrix product of a new size costs, beside one of a size met before; see core/shapes.py.

    python scripts/new_shapes.py

A linear layer, forward and backward, over as many positions as a batch may have trained ones: always the same number,
then sizes that are all new, then those sizes again.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.table import Table
from torch import nn

from headstart.inference.bench.table import report_console

FIRST = 250


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=576, help="of the input (default %(default)s)")
    parser.add_argument("--outputs", type=int, default=8192, help="default %(default)s")
    parser.add_argument("--sizes", type=int, default=80, help="how many different ones (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="default %(default)s")
    return parser.parse_args()


def milliseconds(layer: nn.Module, width: int, sizes: Sequence[int], dtype: torch.dtype) -> float:
    """Return the median time of a forward and a backward pass over inputs of these sizes."""
    found = []
    for size in sizes:
        x = torch.randn(size, width, dtype=dtype, requires_grad=True)
        start = time.perf_counter()
        layer(x).sum().backward()
        found.append((time.perf_counter() - start) * 1000)
    return median(found)


def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    dtype = getattr(torch, options.dtype)
    layer = nn.Linear(options.width, options.outputs, bias=False, dtype=dtype)
    milliseconds(layer, options.width, [FIRST] * 3, dtype)
    new = range(FIRST + 1, FIRST + 1 + options.sizes)
    table = Table(title=f"{options.width} x {options.outputs}, {options.dtype}", title_justify="left")
    for name in ("size", "ms", "peak memory, GB"):
        table.add_column(name, justify="left" if name == "size" else "right")
    for name, sizes in (("always the same", [FIRST] * options.sizes), ("each new", new), ("the same sizes again", new)):
        took = milliseconds(layer, options.width, sizes, dtype)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        table.add_row(name, f"{took:.1f}", f"{peak:.2f}")
    report_console(stderr=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
