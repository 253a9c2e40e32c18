"""Train a ReDrafter for a target: `accelerate launch training/train_redrafter.py --config configs/redrafter.yaml`.

Without arguments it says what it needs; `--help` explains its settings.
"""

import sys

from headstart.training.run import main

if __name__ == "__main__":
    sys.exit(main("redrafter"))
