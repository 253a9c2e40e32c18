"""Random generation calls against the plain loop, on tiny random targets in float64; any difference is a bug.

    python scripts/fuzz.py --cases 1000 --seed 0

A case is family x batch x tree x drafter x stop cause x processors x lengths x sampling, all from its number. Prints
what differs, with the number that brings it back; exit code 1 if anything does.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm


def main() -> int:
    """Run the cases and print what they covered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (default %(default)s)")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from fuzz_cases import differs, random_case

    torch.set_num_threads(1)
    different, covered = 0, Counter()
    for seed in tqdm(range(options.seed, options.seed + options.cases), desc="cases", unit="case"):
        case = random_case(seed)
        covered.update([case.family, f"drafter {case.drafter}", f"{len(case.prompts)} rows", *case.names])
        covered["sampled" if case.rules.do_sample else "greedy"] += 1
        covered["admitted later"] += case.waiting > 0
        told = differs(seed)
        if told:
            different += 1
            tqdm.write(told)
    print(", ".join(f"{name} {count}" for name, count in sorted(covered.items())))
    print(f"{options.cases} cases from seed {options.seed}: {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
