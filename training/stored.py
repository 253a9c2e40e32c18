"""A store of features that a run reads: opened, checked against what the run is going to read, deleted after use.

Which rows a run is going to read follows from the order of training alone, so a run that goes on needs only those of
the steps ahead and those held out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..core.prompts import template_fingerprint
from ..distill.capture import data_fingerprints
from ..distill.dataset import TokenRow
from ..distill.shards import locked
from ..distill.store import FeatureStore, read_manifest, row_key, target_identity
from ..distill.table import lengths_of
from ..drafters.base import Drafter
from ..inference.target import Target
from .batches import step_sampler
from .command_line import Settings, is_first_process
from .features import KeptRows
from .start_report import plan


@contextmanager
def stored(
    settings: Settings,
    drafter: Drafter,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    train: Sequence[TokenRow],
    held_out: Sequence[TokenRow],
    checkpoint: str | None,
) -> Iterator[KeptRows | None]:
    """Open the store that the settings name, if any, and hold it while the run reads it.

    checkpoint: from which the run goes on. Raises ValueError for a store of another target, of other rows, without a
    layer that the drafter reads, or that lacks rows which the target is not to make; and when another process has the
    store open in a way that does not go with this run.
    """
    data, name = settings.data, str(settings.target.target)
    if data.features is None:
        yield None
        return
    if drafter.trains_target:
        raise ValueError(f"{settings.method} changes the target while it learns, so features cannot be stored: drop it")
    folder = Path(data.features)
    read_manifest(folder)
    with _held(folder, data.delete_features_after_use) if is_first_process() else nullcontext():
        store = FeatureStore(folder)
        store.check_target(target_identity(target, tokenizer, name, settings.target.target_revision))
        store.check_layers(drafter.feature_layers)
        made = {"chat_template": template_fingerprint(tokenizer), "max_length": data.max_length}
        made |= {"train_on": data.train_on, "data": data_fingerprints([*data.train_data, *data.eval_data])}
        store.check_origin(chain(train, held_out), made)
        lengths = lengths_of(train)
        step, last = 0 if checkpoint is None else step_of(checkpoint), plan(lengths, settings.training).steps
        ahead, make = sorted(rows_ahead(lengths, settings.training, step, last)), data.missing_features == "make"
        missing = store.check_rows(chain((train[i] for i in ahead), held_out), made, make)
        told = _told(store, len(ahead) + len(held_out) - missing, missing, data.delete_features_after_use)
        yield KeptRows(target, store.layers, int(data.feature_cache_gb * 1e9), store, make, told)


@contextmanager
def _held(folder: Path, alone: bool) -> Iterator[None]:
    """Hold a store beside others who read it, or alone where it is going to be deleted."""
    if alone:
        refusal = (
            f"{folder} is going to be deleted after use, so no other process may have it open, but one has; wait for "
            "it, or leave delete_features_after_use out"
        )
    else:
        refusal = (
            f"{folder} must not change while it is read, but another process writes there or is going to delete it "
            "after use; wait for it, or use another store"
        )
    with locked(folder, alone, refusal) as can:
        if alone and not can:
            raise ValueError(
                f"{folder} lies on a file system without locks, so nothing tells whether others have it open; leave "
                "delete_features_after_use out, and delete it by hand"
            )
        yield


def _told(store: FeatureStore, there: int, missing: int, delete: bool) -> str:
    """Say which rows come from where, and what becomes of the store."""
    made = f"; the target makes {missing:,} rows that are not there" if missing else ""
    deleted = "; its shards are deleted after use" if delete else ""
    return f"{there:,} rows read from {store.folder}{made}{deleted}"


def step_of(checkpoint: str) -> int:
    """Return the step at which a checkpoint was saved."""
    return int(json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"])


def rows_ahead(lengths: Sequence[int], args: TrainingArguments, step: int, last: int) -> set[int]:
    """Return the rows that the steps after `step` read, up to the step `last`; both are counted over all epochs.

    lengths: tokens of each row to train on.
    """
    sampler = step_sampler(lengths, args)
    per_epoch = -(-len(lengths) // sampler.rows_per_step)
    found: set[int] = set()
    for epoch in range(step // per_epoch, -(-last // per_epoch)):
        if len(found) == len(lengths):
            break
        sampler.set_epoch(epoch)
        begin, end = ((at - epoch * per_epoch) * sampler.rows_per_step for at in (step, last))
        for i in list(sampler)[max(0, begin) : end]:
            assert isinstance(i, int), "rows that are packed are those of their step"
            found.add(i if i >= 0 else ~i)
    return found


class DeleteUsed(TrainerCallback):
    """Deletes, where it is asked for, the shards of a store of which the rest of a run reads no row.

    Only when a checkpoint has just been saved: whatever stops the run, it goes on from there and misses nothing. Shards
    with a row that is held out stay to the end, and those with a row that the run never reads stay for good.
    """

    def __init__(
        self, kept: KeptRows | None, train: Sequence[TokenRow], held_out: Sequence[TokenRow], delete: bool
    ) -> None:
        self.store = kept.store if kept is not None and delete else None
        if self.store is not None:
            self.lengths = lengths_of(train)
            self.keys, self.held_out = [row_key(row) for row in train], {row_key(row) for row in held_out}

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Delete what no step after the checkpoint reads."""
        if self.store is None:
            return
        ahead = {self.keys[i] for i in rows_ahead(self.lengths, args, state.global_step, state.max_steps)}
        self._delete(self.store, {*self.keys} - ahead - self.held_out)

    def finish(self) -> None:
        """Delete what the run has read: called when its result is saved."""
        if self.store is not None:
            self._delete(self.store, {*self.keys, *self.held_out})

    def _delete(self, store: FeatureStore, done: set[int]) -> None:
        count, shards = store.release(done, delete=is_first_process()), len(store.manifest["shards"])
        if count and is_first_process():
            print(f"deleted {count} of {shards} shards of {store.folder} after use", flush=True)
