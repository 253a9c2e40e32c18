"""Train an EAGLE drafter: `accelerate launch training/train_eagle.py --config configs/eagle.yaml`.

EAGLE-2 and HASS are settings of the same drafter, named there. Without arguments it says what it needs; `--help`
explains its settings.
"""

import sys

from headstart.training.run import main

if __name__ == "__main__":
    sys.exit(main("eagle"))
