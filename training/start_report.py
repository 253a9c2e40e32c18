"""What a run is going to do, printed before the first step: sizes, data, and measured memory and time."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ..core.shapes import rounded_up
from ..distill.dataset import DatasetReport, TokenDataset, TokenRow, lengths_of
from ..drafters.base import Drafter
from .batches import Entry, PaddableRows, step_sampler
from .joint import Schedule
from .processes import cuts_up_weights
from .trainer import DrafterTrainer
from .vocabulary import ChosenVocabulary

FP32, ADAM = 4, 8


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of the target's forward and of the drafter's forward and backward on a typical batch of `tokens`.

    In joint training the latter are those of the joint step, which has the target read the batch once more.
    peak_bytes: of the process (or its GPU) after a step on the longest batch.
    """

    tokens: int
    target_seconds: float
    drafter_seconds: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps and epochs of the whole run.

    tokens, positions: of one epoch over all processes, without and with what is padded. unpacked: positions that they
    would be without packing.
    """

    steps: int
    epochs: float
    tokens: int
    positions: int
    unpacked: int


def plan(lengths: Sequence[int], args: TrainingArguments, packed_length: int | None = None) -> Plan:
    """Work out what Trainer will make of the arguments, by looking at the first epoch's batches.

    lengths: tokens of each row. packed_length: see `StepSampler`.
    """
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps_per_epoch = -(-len(lengths) // per_step)
    steps = args.max_steps if args.max_steps > 0 else -(-int(args.num_train_epochs * steps_per_epoch * 1000) // 1000)
    unpacked = sum(positions_of(batch, lengths) for batch in _batches(lengths, args))
    positions = unpacked
    if packed_length is not None:
        positions = sum(positions_of(batch, lengths) for batch in _batches(lengths, args, packed_length))
    return Plan(steps, steps / steps_per_epoch, int(sum(lengths)), positions, unpacked)


def _batches(
    lengths: Sequence[int], args: TrainingArguments, packed_length: int | None = None
) -> Iterator[list[Entry]]:
    entries = iter(step_sampler(lengths, args, packed_length))
    while batch := list(islice(entries, args.train_batch_size)):
        yield batch


def positions_of(batch: Sequence[Entry], lengths: Sequence[int]) -> int:
    """Return how many positions are computed for a batch: its sequences times the width of the longest."""
    rows = [[entry] if isinstance(entry, int) else entry for entry in batch]
    totals = [sum(int(lengths[i if i >= 0 else ~i]) for i in sequence) for sequence in rows if sequence]
    return len(totals) * rounded_up(max(totals))


def measure(trainer: DrafterTrainer, lengths: Sequence[int]) -> Measured:
    """Time one typical batch and find the memory of the longest, without changing the drafter or any random state."""
    size, device = trainer.args.train_batch_size, trainer.args.device
    if trainer.packed_length is None:
        ordered: Sequence[Entry] = sorted(range(len(lengths)), key=lengths.__getitem__)
        middle = max(0, len(ordered) // 2 - size // 2)
        typical, largest = ordered[middle : middle + size], ordered[-size:]
    else:
        batches = list(_batches(lengths, trainer.args, trainer.packed_length))
        batches.sort(key=lambda batch: positions_of(batch, lengths))
        typical, largest = batches[len(batches) // 2], batches[-1]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _step(trainer, largest)
        peak = peak_memory(device)
        tokens, target_seconds, drafter_seconds = _step(trainer, typical)
    return Measured(tokens, target_seconds, drafter_seconds, peak)


def _step(trainer: DrafterTrainer, entries: Sequence[Entry]) -> tuple[int, float, float]:
    """Return the tokens of a batch, and the seconds of the target's forward and of the drafter's step."""
    trained, fresh, data = trainer.model.train(), trainer.features.forgetful(), trainer.train_dataset
    assert isinstance(data, PaddableRows)
    clock = [_now(trainer.args.device)]
    inputs: Any = trainer._prepare_inputs(trainer.collator([data[entry] for entry in entries]))  # type: ignore[arg-type]
    batch = fresh(inputs)
    clock.append(_now(trainer.args.device))
    with trainer.accelerator.autocast():
        loss = trained(batch if trainer.joint is None else inputs, trainer.target).loss
    loss.backward()
    clock.append(_now(trainer.args.device))
    trained.zero_grad(set_to_none=True)
    return int(inputs["token_mask"].sum()), clock[1] - clock[0], clock[2] - clock[1]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Return the most bytes ever in use: of the GPU by this process, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource  # POSIX only

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def start_report(
    trainer: DrafterTrainer,
    data: DatasetReport,
    train: Sequence[TokenRow],
    held_out: Sequence[TokenRow],
    vocabulary: ChosenVocabulary | None,
) -> str:
    """Say what is going to happen, in lines to be printed; runs a few batches to measure."""
    args, drafter = trainer.args, trainer.drafter
    assert isinstance(trainer.train_dataset, TokenDataset)
    lengths = trainer.train_dataset.lengths
    ahead = plan(lengths, args, trainer.packed_length)
    seen = None if cuts_up_weights(args) else measure(trainer, lengths)
    trained = sum(int(row.loss_mask.sum()) for row in train)
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    accumulated, processes = args.gradient_accumulation_steps, args.world_size
    a_step = trained * ahead.epochs / ahead.steps
    tokens = sum(int(sum(lengths_of(rows))) for rows in (train, held_out))
    kept = _kept(trainer, tokens)
    table = [
        ("processes", f"{processes} on {args.device}{_idle(args)}"),
        (
            "global batch",
            f"{per_step} rows: {args.train_batch_size} a batch, {accumulated} accumulated, {processes} processes",
        ),
        ("data", str(data)),
        ("", f"{len(train):,} rows to train on ({trained:,} trained tokens), {len(held_out):,} held out"),
        ("vocabulary", _vocabulary(vocabulary)),
        *_parameters(trainer, drafter, ahead),
        ("steps", f"{ahead.steps:,} ({ahead.epochs:.2f} epochs), about {a_step:,.0f} trained tokens a step"),
        ("padding", _padding(trainer, ahead)),
        ("features", _features(trainer, kept, tokens)),
        *_costs(trainer, ahead, seen, kept),
        ("disk", _disk(trainer, ahead)),
    ]
    return "\n".join(f"{name:<14}{text}" for name, text in table)


def _padding(trainer: DrafterTrainer, ahead: Plan) -> str:
    """Say how much of what is computed is padding, and what packing saves of it."""
    told = f"{1 - ahead.tokens / ahead.positions:.0%} of the positions ({ahead.tokens:,} tokens in {ahead.positions:,}"
    if trainer.packed_length is None:
        return f"{told} an epoch)"
    without = f"{1 - ahead.tokens / ahead.unpacked:.0%} of {ahead.unpacked:,}"
    return f"{told} an epoch, packed up to {trainer.packed_length:,} tokens a sequence; without packing {without})"


def _idle(args: TrainingArguments) -> str:
    idle = getattr(args, "idle_gpus", 0)
    return f"; {idle} more GPUs stand idle: start with `accelerate launch` to use them" if idle else ""


def _vocabulary(vocabulary: ChosenVocabulary | None) -> str:
    if vocabulary is None:
        return "the target's, whole"
    held = "" if vocabulary.held_out_coverage is None else f", {vocabulary.held_out_coverage:.1%} of held-out ones"
    return f"{len(vocabulary.ids):,} tokens, {vocabulary.coverage:.1%} of the trained tokens{held}"


def _parameters(trainer: DrafterTrainer, drafter: Drafter, ahead: Plan) -> list[tuple[str, str]]:
    frozen = sum(p.numel() for p in trainer.target.model.parameters() if not p.requires_grad)
    groups: dict[str, int] = {}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            groups[name.split(".")[0]] = groups.get(name.split(".")[0], 0) + parameter.numel()
    scales = drafter.learning_rate_scales()
    beside = trained_weights(trainer) - sum(groups.values())
    lines = [("parameters", f"{sum(groups.values()) + beside:,} trained, {frozen:,} frozen (the target)")]
    for name, count in groups.items():
        rate = trainer.args.learning_rate * next((factor for part, factor in scales.items() if part in name), 1.0)
        lines.append(("", f"{name}: {count:,} at learning rate {rate:g}"))
    if trainer.joint is not None and trainer.joint.changes.trained:
        settings = trainer.joint.settings
        first = Schedule.of(settings, ahead.steps).first
        held = "its law before training" if settings.target_loss == "kl" else "the data"
        what = f"target ({settings.train_target}): {beside:,} at learning rate {settings.rate:g}"
        lines.append(("", f"{what}, from step {first + 1:,} on; held to {held}, lambda {settings.weight:g}"))
    return lines


def trained_weights(trainer: DrafterTrainer) -> int:
    """Return how many numbers are trained, of the drafter and of its target."""
    return sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)


def _features(trainer: DrafterTrainer, kept: float, tokens: int) -> str:
    size = gigabytes(tokens * trainer.features.bytes_per_token)
    if trainer.joint is not None and trainer.joint.changes.trained:
        return "made at every step, since the target changes"
    if trainer.features.kept is not None and trainer.features.kept.store is not None:
        return trainer.features.kept.told
    if not kept:
        return f"made anew in every epoch (keeping them would take {size}: feature_cache_gb)"
    return f"kept in memory: {kept:.0%} of {size}"


def _kept(trainer: DrafterTrainer, tokens: int) -> float:
    """Return the share of the rows' features that stay in memory, were one process to see all rows."""
    return min(1.0, trainer.features.capacity_bytes / (tokens * trainer.features.bytes_per_token))


def _costs(trainer: DrafterTrainer, ahead: Plan, seen: Measured | None, kept: float) -> list[tuple[str, str]]:
    weights = sum(p.numel() * p.element_size() for p in trainer.target.model.parameters())
    trained = trained_weights(trainer)
    parts = (("target", weights), ("drafter", trained * FP32), ("its gradients and optimizer", trained * (FP32 + ADAM)))
    sizes = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts)
    if seen is None:
        return [("memory", f"{sizes}, cut up between {trainer.args.world_size} processes; nothing is measured ahead")]
    step_seconds = seen.target_seconds + seen.drafter_seconds
    readings = ahead.epochs * (1 - kept) + min(1.0, ahead.epochs) * kept
    total = seen.target_seconds * readings + seen.drafter_seconds * ahead.epochs
    total *= ahead.tokens / seen.tokens / trainer.args.world_size
    peak = seen.peak_bytes + trained * ADAM
    return [
        ("memory", sizes),
        ("", f"{gigabytes(peak)} a process at the longest batch, measured"),
        ("time", f"target {seen.tokens / seen.target_seconds:,.0f} tokens/s, with the drafter's step "
                 f"{seen.tokens / step_seconds:,.0f} tokens/s: about {_duration(total)}, evaluation aside"),
    ]  # fmt: skip


def disk_needed(trainer: DrafterTrainer) -> int:
    """Return the bytes that a run's checkpoints and the drafter take at most at one time, estimated for Adam."""
    assert isinstance(trainer.train_dataset, TokenDataset)
    count = _most_checkpoints(trainer.args, plan(trainer.train_dataset.lengths, trainer.args))
    return count * _checkpoint_bytes(trainer) + _saved_bytes(trainer)


def _disk(trainer: DrafterTrainer, ahead: Plan) -> str:
    count, saved = _most_checkpoints(trainer.args, ahead), _saved_bytes(trainer)
    size = f"{gigabytes(_checkpoint_bytes(trainer))} a checkpoint, {count} of them at most at one time; "
    return f"{size if count else 'no checkpoint; '}{gigabytes(saved)} the result"


def _saved_bytes(trainer: DrafterTrainer) -> int:
    own = sum(tensor.numel() * tensor.element_size() for tensor in trainer.drafter.state_dict().values())
    beside = trained_weights(trainer) - sum(p.numel() for p in trainer.drafter.parameters() if p.requires_grad)
    return own + beside * FP32


def _checkpoint_bytes(trainer: DrafterTrainer) -> int:
    return _saved_bytes(trainer) + (0 if trainer.args.save_only_model else trained_weights(trainer) * ADAM)


def _most_checkpoints(args: TrainingArguments, ahead: Plan) -> int:
    """Return how many checkpoints lie in the folder at one time: one more than are kept, while it is written."""
    kind, every = args.save_strategy, args.save_steps
    if kind == SaveStrategy.BEST:
        kind, every = SaveStrategy(IntervalStrategy(args.eval_strategy).value), args.eval_steps or 1
    if kind == SaveStrategy.NO:
        return 0
    steps = every if every >= 1 else math.ceil(every * ahead.steps)
    saves = math.ceil(ahead.epochs if kind == SaveStrategy.EPOCH else ahead.steps / steps)
    kept = args.save_total_limit and max(args.save_total_limit, 2 if args.metric_for_best_model else 1)
    return min(saves, kept + 1) if kept else saves


def gigabytes(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 1e9:.2f} GB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"
