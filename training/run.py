"""One training run from settings to a saved drafter: the story that every `train_<method>.py` tells.

Load the frozen target, read the rows, choose the draft vocabulary, build the drafter, say what is going to happen,
train, measure, choose the tree, save.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from ..core import hf
from ..core.prompts import template_fingerprint, tokenizer_fingerprint
from ..distill.dataset import (
    Collator,
    DatasetReport,
    TokenDataset,
    TokenRow,
    load_dataset,
    split_held_out,
)
from ..distill.row_cache import load_mapped
from ..drafters.base import Drafter
from ..drafters.registry import AutoDrafter, new_drafter
from ..inference.adapters import TARGET
from ..inference.loading import eos_ids, load_target
from ..inference.target import Target
from .adapters import LoraTarget
from .checkpoints import discard_partial, told_of_failure
from .command_line import Settings, UsageError, check_data, is_first_process, parse, report_failure, take_debug
from .curves import CurveWriter
from .dry_run import nothing_written, rehearse
from .features import KeptRows
from .guards import EXIT_STOPPED, NotFinite, StoppedBySignal, places_of
from .joint_arguments import check_joint
from .optimizers import check_optimizer
from .processes import check_joined
from .records import check_best, data_fingerprint, decide_resume, identity, provenance, write_record
from .sharding import check_sharding, check_type, place_to_load, side_by_side
from .speedups import check_speedups, warn_of_slow_type
from .start_report import start_report
from .starting_point import load_start, take_weights
from .stored import DeleteUsed, stored
from .target_change import write_change
from .trainer import DrafterTrainer
from .vocabulary import ChosenVocabulary, choose_vocabulary


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a run and where they came from."""

    train: Sequence[TokenRow]
    held_out: Sequence[TokenRow]
    report: DatasetReport
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The frozen target. kept: rows that drafters trained one after the other share, None for one alone."""

    target: Target
    tokenizer: PreTrainedTokenizerBase
    eos: list[int]
    kept: KeptRows | None = None


def main(method: str, argv: Sequence[str] | None = None) -> int:
    """Run a training command and return its exit status; a user's mistake is told in words, `--debug` shows where."""
    debug, flags = take_debug(sys.argv[1:] if argv is None else argv)
    try:
        run(method, flags)
    except (ValueError, OSError) as error:
        return report_failure(error, debug)
    except torch.OutOfMemoryError as error:
        smaller = "lower per_device_train_batch_size and raise gradient_accumulation_steps alike, or lower max_length"
        return report_failure(ValueError(f"out of memory ({error}); {smaller}"), debug)
    except StoppedBySignal as stopped:
        say(str(stopped))
        return EXIT_STOPPED
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def run(method: str, argv: Sequence[str], loaded: Loaded | None = None) -> Path:
    """Train a drafter as the flags say; return the folder it is saved in.

    loaded: the target, if it is there already.

    Raises UsageError for a wrong command and ValueError for anything else that the user can mend.
    """
    settings = parse(method, argv)
    args = settings.training
    check_joined(args)
    check_data(settings.data)
    check_sharding(settings.data, settings.target, args)
    check_joint(settings.joint, settings.data, settings.target, args)
    check_optimizer(args)
    check_speedups(settings.joint, args)
    warn_of_slow_type(settings.target.target_dtype, args)
    check_best(settings)
    if args.start_from is not None:
        AutoDrafter.check(args.start_from)
    folder = Path(str(args.output_dir))
    set_seed(args.seed)

    loaded = load(settings) if loaded is None else loaded
    target, tokenizer, eos = loaded.target, loaded.tokenizer, loaded.eos
    check_type(target, args)
    fit_window(settings, hf.position_limit(target.model))
    rows = read_rows(settings, tokenizer)
    who = identity(settings, target, {"tokenizer": tokenizer_fingerprint(tokenizer), "data": rows.fingerprint})
    resume = decide_resume(settings, who)
    say(resume.note)
    if resume.finished:
        return folder

    start = None
    if args.start_from is not None:
        start = load_start(args.start_from, method, target, settings.draft_vocab_size)
    vocabulary = None
    if start is None and settings.draft_vocab_size is not None:
        vocabulary = choose_vocabulary(
            settings.draft_vocab_size, rows.train, rows.held_out, tokenizer, eos, target.vocab_size
        )
    drafter = build(settings, target, tokenizer, rows, vocabulary, start)
    with stored(settings, drafter, target, tokenizer, rows.train, rows.held_out, resume.checkpoint) as from_store:
        kept = loaded.kept if from_store is None else from_store
        if settings.watch.dry_run:
            with nothing_written(settings):
                trainer = make_trainer(settings, drafter, target, rows, tokenizer, eos, kept)
                say(start_report(trainer, rows.report, rows.train, rows.held_out, vocabulary))
                say(rehearse(trainer, folder))
            return folder
        record = partial(write_record, settings, who)
        trainer = make_trainer(settings, drafter, target, rows, tokenizer, eos, kept, record)
        say(start_report(trainer, rows.report, rows.train, rows.held_out, vocabulary))
        if args.should_save:
            discard_partial(folder)
            record(folder, finished=False)
        args.idle_gpus = 0
        deleting = DeleteUsed(kept, rows.train, rows.held_out, settings.data.delete_features_after_use)
        trainer.add_callback(deleting)
        train(trainer, settings, resume.checkpoint)
        save(settings, trainer, record, tokenizer)
        deleting.finish()
        trainer.accelerator.end_training()
    return folder


def load(settings: Settings) -> Loaded:
    """Load the target that the settings name, and check that it can verify trees."""
    model, tokenizer = load_target(
        str(settings.target.target),
        settings.target.target_dtype,
        settings.target.target_revision,
        place_to_load(settings.training),
        settings.target.bits,
    )
    target = Target(model)
    target.self_check()
    return Loaded(target, tokenizer, eos_ids(model))


def train(trainer: DrafterTrainer, settings: Settings, checkpoint: str | None) -> None:
    """Train to the end.

    Raises StoppedBySignal after SIGTERM, and NotFinite, with the places of the rows, for numbers that are none.
    """
    try:
        with trainer.stopper.listening():
            trainer.train(resume_from_checkpoint=checkpoint)
    except NotFinite as error:
        raise ValueError(f"{error}{places_of(error.row_ids, settings.data.train_data)}") from error
    step = trainer.state.global_step
    if trainer.stopper.agreed:
        trainer.accelerator.end_training()
        raise StoppedBySignal(
            f"stopped by SIGTERM after step {step}, saved as checkpoint-{step} in {settings.training.output_dir}: the "
            f"same command goes on from there (exit status {EXIT_STOPPED})"
        )


def fit_window(settings: Settings, limit: int | None) -> None:
    """Cut rows, and the answers of evaluation, to what the target was built for, and say so."""
    if limit is not None and settings.data.max_length > limit:
        say(f"max_length {settings.data.max_length} exceeds the target's window: rows are cut to {limit} tokens")
        settings.data.max_length = limit


def read_rows(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Rows:
    """Read the rows to train on and those held out."""
    data = settings.data

    def load(source: list[str]) -> TokenDataset:
        if not data.streaming:
            return load_dataset(source, tokenizer, data.max_length, data.train_on)
        # Of the processes on a machine one writes, whichever comes first, and the others find it.
        found, told = load_mapped(source, tokenizer, data.max_length, data.train_on, progress=True)
        say(told)
        return found

    everything = load(data.train_data)
    if data.eval_data:
        train, held_out = everything.rows, load(data.eval_data).rows
    else:
        train, held_out = split_held_out(everything.rows, data.held_out_fraction)
    return Rows(train, held_out, everything.report, data_fingerprint(chain(train, held_out)))


def build(
    settings: Settings,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    rows: Rows,
    vocabulary: ChosenVocabulary | None,
    start: Drafter | None = None,
) -> Drafter:
    """Make the drafter, fresh or with the weights of another; its configuration tells where it comes from."""
    names = {str(header["target"]) for header in rows.report.headers if header.get("target")}
    folder = Path(str(settings.target.target))
    # A path on this machine says nothing elsewhere: the answers know the target by its public name.
    name = str(settings.target.target) if not folder.is_dir() else names.pop() if len(names) == 1 else folder.name
    ids = start.draft_token_ids if start is not None else None if vocabulary is None else vocabulary.ids
    drafter = new_drafter(
        settings.method,
        target,
        ids,
        **settings.drafter,
        target_name=name,
        target_revision=settings.target.target_revision,
    )
    if start is not None:
        take_weights(drafter, start, str(settings.training.start_from))
    drafter.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
    drafter.config.chat_template_fingerprint = template_fingerprint(tokenizer)
    drafter.config.training_data = provenance(settings, rows.train, rows.held_out, rows.fingerprint, vocabulary)
    return drafter


def make_trainer(
    settings: Settings,
    drafter: Drafter,
    target: Target,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    kept: KeptRows | None = None,
    record: Callable[[Path], None] | None = None,
) -> DrafterTrainer:
    """Put everything together. record: writes beside each checkpoint where it comes from."""
    if not rows.held_out and settings.training.eval_strategy != "no":
        warnings.warn("no row is held out, so nothing is evaluated: set held_out_fraction or eval_data", stacklevel=2)
        settings.training.eval_strategy = "no"
    pad = tokenizer.pad_token_id if isinstance(tokenizer.pad_token_id, int) else 0
    return DrafterTrainer(
        drafter,
        target,
        settings.training,
        Collator(pad, even=True),
        TokenDataset(rows.train, rows.report),
        TokenDataset(rows.held_out, rows.report) if rows.held_out else None,
        settings.evaluation,
        eos_token_ids,
        settings.data.feature_cache_gb,
        callbacks=[CurveWriter(settings.watch.plot)],
        kept=kept,
        joint=side_by_side(drafter, target, settings.joint, settings.training),
        watch=settings.watch,
        record=record,
        packed_length=settings.data.max_length if settings.data.packing else None,
    )


def save(
    settings: Settings, trainer: DrafterTrainer, record: Callable[..., None], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Measure once more, write the drafter with its figures, and mark the run as finished."""
    other_weights = settings.training.load_best_model_at_end  # than those of the last evaluation
    if trainer.held_out and (other_weights or trainer.evaluated_at != trainer.state.global_step):
        trainer.evaluate()
    figures, generation = trainer.figures, trainer.generation
    measured: dict[str, Any] = {"steps": trainer.state.global_step}
    if figures is not None:
        measured["held_out"] = {"loss": round(figures.loss, 4), "accuracy_by_depth": _rounded(figures.accuracy)}
        if figures.table is not None:
            measured["held_out"]["rank_table"] = [_rounded(row) for row in figures.table.tolist()]
    if generation is not None:
        measured["generation"] = {
            "prompts": len(trainer.prompts_of(trainer.held_out)),
            "new_tokens": settings.evaluation.eval_new_tokens,
            "tokens_per_step": round(generation.tokens_per_step, 3),
            "acceptance_by_depth": _rounded(generation.acceptance_by_depth),
        }
    if trainer.change is not None:
        measured["target_change"] = trainer.change.to_dict()
    trainer.drafter.config.measured = measured
    with told_of_failure("the drafter", Path(str(settings.training.output_dir))):
        trainer.save_model()
        if settings.training.should_save:
            save_target(settings, trainer, tokenizer)
            record(Path(str(settings.training.output_dir)), finished=True, measured=measured)
    say(f"saved the drafter in {settings.training.output_dir}" + (
        f": {generation.tokens_per_step:.2f} tokens per step on held-out prompts" if generation is not None else ""
    ))  # fmt: skip


def save_target(settings: Settings, trainer: DrafterTrainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write what joint training leaves besides: the report, the merged target if asked for, a tokenizer beside it."""
    if trainer.joint is None:
        return
    folder, changes = Path(str(settings.training.output_dir)), trainer.joint.changes
    config = trainer.drafter.config
    if isinstance(changes, LoraTarget) and settings.joint.merge_adapter:
        assert config.adapted_target is not None
        config.adapted_target["whole"] = changes.save_merged(folder)
        config.save_pretrained(str(folder))
    if (folder / TARGET).is_dir():
        tokenizer.save_pretrained(str(folder / TARGET))
    if trainer.change is not None:
        write_change(trainer.change, changes, folder)
        say(str(trainer.change))


def say(text: str) -> None:
    """Print for all processes, once."""
    if text and is_first_process():
        print(text, flush=True)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in values]


__all__ = ["UsageError", "main", "run"]
