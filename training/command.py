"""`headstart train METHOD`: the same as the method's entry script, in one process; `--drafters` trains several."""

from __future__ import annotations

import sys

from ..drafters.registry import METHODS, drafter_classes
from .command_line import UsageError, report_failure
from .curves import main as plot
from .run import main as train
from .several import main as train_several


def usage() -> str:
    """Return what `headstart train --help` prints: the methods there are, in the words of their own files."""
    methods = []
    for method in sorted(METHODS):
        words = (sys.modules[drafter_classes(method)[1].__module__].__doc__ or "").partition("\n\n")[0]
        methods.append(f"  {method:<12}{' '.join(words.split()).rstrip('.')}")
    return USAGE.replace("METHODS", "\n".join(methods))


USAGE = """usage: headstart train METHOD [--config FILE.yaml] [--name value ...]
       headstart train --drafters FILE.yaml,FILE.yaml,... [--name value ...]
       headstart train --plot FOLDER [FOLDER ...]

Train a drafter for a target; METHOD is one of:
METHODS

headstart train METHOD --help explains the settings of one. --drafters trains several, one after the other, from one
pass of the target. The same command again goes on where it stopped; after SIGTERM it saves first and exits with 75.
--dry_run tries everything out and writes nothing. --plot alone draws the learning curves of finished or running runs.

examples:
  headstart train medusa --config configs/medusa.yaml --output_dir outputs/medusa
  headstart train medusa --config configs/medusa.yaml --target my-model --train_data train.jsonl.gz
  headstart train --drafters configs/medusa.yaml,configs/hydra.yaml --features features --output_dir outputs
  accelerate launch --config_file configs/accelerate/8gpu.yaml training/train_medusa.py --config configs/medusa.yaml"""


def main(_name: str, argv: list[str]) -> int:
    """Run `headstart train`; return its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    if argv[0].partition("=")[0] == "--drafters":
        return train_several(argv)
    if argv[0] == "--plot":
        try:
            return plot(argv[1:])
        except ValueError as error:
            return report_failure(error, traceback_shown=False)
    try:
        drafter_classes(argv[0])  # an unknown method is named with the nearest before anything is loaded
    except ValueError as error:
        return report_failure(UsageError(str(error)), traceback_shown=False)
    return train(argv[0], argv[1:])
