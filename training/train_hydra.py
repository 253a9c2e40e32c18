"""Train Hydra heads for a target: `accelerate launch training/train_hydra.py --config configs/hydra.yaml`.

Hydra++ is `configs/hydra_pp.yaml`. Without arguments it says what it needs; `--help` explains its settings.
"""

import sys

from headstart.training.run import main

if __name__ == "__main__":
    sys.exit(main("hydra"))
