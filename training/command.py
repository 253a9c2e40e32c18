"""`headstart train METHOD`: the same as the method's entry script, in one process; `--drafters` trains several."""

from __future__ import annotations

import sys

from ..drafters.registry import METHODS, drafter_classes
from .command_line import UsageError, report_failure
from .run import main as train
from .several import main as train_several

USAGE = f"""usage: headstart train METHOD [--config FILE.yaml] [options]; headstart train METHOD --help lists them all
       headstart train --drafters FILE.yaml,FILE.yaml,... [options]: several, from one pass of the target

  METHOD is one of: {", ".join(sorted(METHODS))}

example: headstart train medusa --config configs/medusa.yaml --output_dir outputs/medusa
on several GPUs: accelerate launch --config_file configs/accelerate/8gpu.yaml training/train_medusa.py --config …"""


def main(_name: str, argv: list[str]) -> int:
    """Run `headstart train`; return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0].partition("=")[0] == "--drafters":
        return train_several(argv)
    try:
        drafter_classes(argv[0])  # an unknown method is named with the nearest before anything is loaded
    except ValueError as error:
        return report_failure(UsageError(str(error)), traceback_shown=False)
    return train(argv[0], argv[1:])
