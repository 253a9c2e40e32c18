"""`--dry_run`: everything that a run does, once and small, and nothing of it written.

It is the run itself, on the longest rows and for one step, so what would fail after hours of loading and training fails
now: memory, a tensor that does not learn, evaluation, generation.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..inference.options import check_writable
from .batches import PaddableRows
from .command_line import Settings
from .curves import CurveWriter
from .guards import check_weights
from .start_report import disk_needed, gigabytes, peak_memory
from .trainer import DrafterTrainer

NEW_TOKENS = 8
"""Tokens that a dry run generates for a prompt."""


@contextmanager
def nothing_written(settings: Settings) -> Iterator[None]:
    """Have a trainer leave nothing: it makes its output folder at once, and a repository on the Hub if asked to push.

    Raises ValueError when the run could not write where it is to write.
    """
    args = settings.training
    own = args.output_dir, args.push_to_hub, args.report_to
    check_writable(str(args.output_dir), folder=True)
    with TemporaryDirectory(prefix="headstart-dry-run-") as folder:
        args.output_dir, args.push_to_hub, args.report_to = folder, False, []
        try:
            yield
        finally:
            args.output_dir, args.push_to_hub, args.report_to = own


def rehearse(trainer: DrafterTrainer, folder: Path) -> str:
    """Take one step, measure one batch, generate a few tokens; return what was found, in lines to be printed.

    trainer: fresh, made within `nothing_written`; used up afterwards. folder: where the run would write.
    """
    disk = disk_needed(trainer)
    for kind in (PrinterCallback, ProgressCallback, CurveWriter):
        trainer.remove_callback(kind)
    step = _step(trainer)
    measured = _evaluate(trainer)
    free = shutil.disk_usage(next(one for one in (folder, *folder.absolute().parents) if one.exists())).free
    room = "" if free > disk else ": too little"
    table = [
        ("dry run", step),
        ("", measured),
        ("", f"{gigabytes(peak_memory(trainer.args.device))} a process at the peak of all that"),
        ("", f"{gigabytes(free)} are free in {folder}, at most {gigabytes(disk)} needed{room}"),
        ("", "nothing was written; without --dry_run the same command trains"),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in table)


def _step(trainer: DrafterTrainer) -> str:
    """Train for one step on one batch a process, of the longest rows, at the full learning rate."""
    args, data = trainer.args, trainer.train_dataset
    assert isinstance(data, PaddableRows)
    lengths = data.lengths
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])[: args.train_batch_size * args.world_size]
    rows = [data.rows[i] for i in longest]
    trainer.train_dataset = PaddableRows(rows, data.report)
    args.max_steps, args.warmup_steps, args.load_best_model_at_end = 1, 0, False
    args.eval_strategy, args.save_strategy = IntervalStrategy.NO, SaveStrategy.NO
    if trainer.joint is not None:
        trainer.joint.settings = replace(trainer.joint.settings, drafter_only_steps=0)
    start = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - start
    check_weights(trainer.drafter if trainer.joint is None else trainer.joint, 1)
    return f"one step on the {len(rows)} longest rows, up to {lengths[longest[0]]:,} tokens: {seconds:.1f} seconds"


def _evaluate(trainer: DrafterTrainer) -> str:
    args, rows = trainer.args, trainer.held_out[: trainer.args.eval_batch_size * trainer.args.world_size]
    if not rows:
        return "no row is held out: nothing to evaluate"
    wanted = trainer.evaluation
    prompts = min(wanted.eval_prompts, args.world_size)
    new_tokens = min(wanted.eval_new_tokens, NEW_TOKENS)
    trainer.evaluation = replace(wanted, eval_prompts=prompts, eval_new_tokens=new_tokens)
    trainer.evaluate(rows)  # type: ignore[arg-type]
    return f"evaluated {len(rows)} held-out rows, generated {new_tokens} tokens for {prompts} prompts"
