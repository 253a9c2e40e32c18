"""Time the target's pass over a draft tree behind longer and longer texts: in groups, and as transformers attends.

    python scripts/tree_pass.py --target .cache/smollm2-135m-instruct

transformers copies cached keys and values once for every query head that shares them; `core/attention.py` does not.
Both take turns, a round each, for every context; medians. Between them nothing else of the pass differs.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch
from rich.table import Table
from tqdm import tqdm

from headstart.core import attention
from headstart.inference.bench.costs import check_contexts, filled_cache, time_pass
from headstart.inference.bench.table import report_console
from headstart.inference.loading import load_target
from headstart.inference.target import Target


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="the model: a folder or a Hub id")
    add("--dtype", default="bfloat16", help="default %(default)s")
    add("--nodes", type=int, default=10, help="of the tree, root included (default %(default)s)")
    add("--contexts", type=int, nargs="+", default=[128, 512, 2048], help="tokens before it (default %(default)s)")
    add("--batch_size", type=int, default=1, help="default %(default)s")
    add("--rounds", type=int, default=30, help="default %(default)s")
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    options = parse_arguments()
    model, _ = load_target(options.target, options.dtype)
    target = Target(model)
    longest = check_contexts(target, options.contexts, [options.nodes])
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(target.vocab_size, (options.batch_size, longest), generator=draw).to(target.device)
    table = Table(title=f"{options.nodes} nodes, {options.batch_size} rows, {options.dtype}; ms", title_justify="left")
    for name in ("context", "in groups", "transformers", "ratio"):
        table.add_column(name, justify="right")
    limits = attention.MOST_QUERIES, 0  # with 0 no pass counts as one over a tree
    for context in tqdm(options.contexts, unit="context", dynamic_ncols=True):
        cache = filled_cache(target, text[:, :context])
        block = text[:, context : context + options.nodes]
        took: dict[int, list[float]] = {limit: [] for limit in limits}
        for number in range(options.rounds + 2):
            for limit in limits:
                attention.MOST_QUERIES = limit
                seconds = time_pass(target, block, cache)
                if number >= 2:  # the first ones warm up
                    took[limit].append(seconds * 1000)
        ours, theirs = (median(took[limit]) for limit in limits)
        table.add_row(f"{context:,}", f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.3f}")
    report_console(stderr=False).print(table)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"tree_pass.py: {error}")
