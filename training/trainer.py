"""DrafterTrainer: transformers' Trainer for a drafter beside its target.

The model that Trainer knows is the drafter alone, or in joint training a module that holds both. A frozen target is
called for features and is in no checkpoint; of one that is trained, what is trained is. What Trainer does (loop,
schedule, clipping, trackers, DeepSpeed, resuming) is left to it.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..core import hf
from ..distill.dataset import Collator, TokenDataset, TokenRow, lengths_of
from ..drafters.base import DraftBatch, Drafter, LossOutput
from ..inference.stats import GenerationStats
from ..inference.target import Target
from ..inference.tree_search import best_topology
from .arguments import EvaluationArguments
from .batches import PaddableRows, lockstep_batches, step_sampler
from .checkpoints import PARTIAL, publish, rotate, sync, told_of_failure
from .evaluation import HeldOutFigures, evaluation_prompts, generated, teacher_forced
from .features import FeatureSource, KeptRows, KeyedCollator
from .guards import LearningCheck, StopOnSignal, check_weights
from .joint import JointModule, Schedule
from .optimizers import MUON, muon_with_adamw
from .processes import sum_over_processes
from .rates import joining, parameter_groups
from .sharding import JoinAfresh, ShardedTrainer, whole_copy
from .tally import Tally
from .target_change import TargetChange, target_change
from .watch import StepWatch
from .watch_arguments import WatchArguments

LONGEST_PROMPT = 1024
"""Tokens of a prompt that evaluation generates from; longer ones would mostly measure prefill."""


class DrafterTrainer(ShardedTrainer):
    """Trains a drafter; features come from the target, batch by batch.

    target: in eval mode; it never becomes a sub-module of the drafter. eos_token_ids: end the answers of evaluation.
    train_dataset, eval_dataset: of `TokenRow`. feature_cache_gb: memory for features of rows seen before.
    kept: rows read from a store, or shared with other drafters; then feature_cache_gb is theirs.
    joint: the drafter beside its target, to train both or to cut both up; None leaves the target frozen and whole.
    watch: what to do about steps that go wrong. record: writes into a checkpoint where it comes from.
    packed_length: tokens of a sequence that rows share while they are trained on; None gives each row its own.
    """

    model: Any

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        args: TrainingArguments,
        collator: Collator,
        train_dataset: TokenDataset,
        eval_dataset: TokenDataset | None = None,
        evaluation: EvaluationArguments | None = None,
        eos_token_ids: Sequence[int] = (),
        feature_cache_gb: float = 0.0,
        callbacks: Sequence[TrainerCallback] = (),
        kept: KeptRows | None = None,
        joint: JointModule | None = None,
        watch: WatchArguments | None = None,
        record: Callable[[Path], None] | None = None,
        packed_length: int | None = None,
    ) -> None:
        drafter.check_fits(target)
        assert joint is None or not feature_cache_gb, "features of a target that changes cannot be kept"
        self.target, self.packed_length = target, packed_length
        self.drafter = self._at_hand = drafter
        self.joint = joint
        self.evaluation = evaluation or EvaluationArguments()
        self.eos_token_ids = list(eos_token_ids)
        self.collator = KeyedCollator(collator)
        self.features = FeatureSource(target, drafter.feature_layers, int(feature_cache_gb * 1e9), kept)
        self.held_out = eval_dataset.rows if eval_dataset is not None else []
        self.figures: HeldOutFigures | None = None
        self.generation: GenerationStats | None = None
        self.evaluated_at: int | None = None
        self.change: TargetChange | None = None
        self.stopper = StopOnSignal()
        self._tally = Tally()
        self.record = record
        self._writing: Path | None = None
        trained: Any = drafter if joint is None else joint
        if joint is not None:
            args.ddp_find_unused_parameters = True  # the target's, while the drafter learns alone
            callbacks = [JoinAfresh(joint), *callbacks]
        learning = LearningCheck(self._learning, lambda: self._tally.labels)
        self.watch = StepWatch(watch or WatchArguments(), args, train_dataset.rows, learning)
        checks = [self.watch, self.stopper, *callbacks]
        rows = PaddableRows(train_dataset.rows, train_dataset.report)
        super().__init__(trained, args, self.collator, rows, eval_dataset, callbacks=checks)  # type: ignore[arg-type]
        self._keep_sums_exact()
        vars(drafter.config).pop("use_cache", None)  # Trainer sets it on any model; a drafter has no such setting
        # Our loss is divided by the trained tokens of the whole step over all processes: Trainer must divide no more.
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True

    # Features and loss

    def make_batch(self, inputs: dict[str, Tensor]) -> DraftBatch:
        """Add the target's features to what the collator made."""
        return self.features(inputs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of one batch, divided by the trained tokens of the whole step over all processes.

        Data-parallel training averages gradients over processes, hence the factor.
        """
        if self.joint is not None:
            self.joint.step = self.state.global_step
        outside = self.joint is None or self.features.kept is not None
        read: Any = self.make_batch(inputs) if outside else inputs
        output: LossOutput = model(read, self.target, num_items_in_batch)
        assert output.loss is not None
        loss = output.loss
        if model.training:
            self._tally.add(output)
            loss = loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one batch forward and backward, and look at its loss."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        return self.watch.loss(loss, inputs, self.state.global_step + 1)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the step's gradient, looked at before the weights follow it; None for a skipped step."""
        norm = super()._get_grad_norm(model, grad_norm)
        return self.watch.gradient(norm, model, self.state.global_step + 1)

    def _learning(self) -> Iterator[tuple[str, nn.Parameter]]:
        if self.joint is not None:
            return self.joint.learning()
        return ((name, p) for name, p in self.drafter.named_parameters() if p.requires_grad)

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the loss of one batch; a drafter's logits are nothing to gather."""
        with torch.no_grad():
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
        return loss.detach(), None, None

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | None:
        """Count the trained tokens of an optimizer step over all processes; a collective call.

        With the same message the processes tell each other whether one of them has been asked to stop.
        """
        if not batch_samples:
            return None
        self.watch.begin_step(batch_samples)
        count = torch.stack([batch["loss_mask"].sum() for batch in batch_samples]).sum().to(device)
        sums = sum_over_processes(torch.stack([count, count.new_tensor(int(self.stopper.asked))]), self.args)
        self.stopper.agreed = bool(sums[1]) if self.args.world_size > 1 else self.stopper.asked
        count = sums[0].clamp(min=1)
        self._tally.begin_step(count)
        return count

    # Optimizer and order

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Group parameters by the drafter's learning-rate factors; vectors, biases and scales do not decay."""
        if self.optimizer is None:
            module = self.model if model is None else model
            rate = 0.0 if self.joint is None else self.joint.settings.rate
            groups = parameter_groups(module, self.drafter, self.args, rate)
            if self.args.optim == MUON:
                self.optimizer = muon_with_adamw(groups, self.drafter, self.args)
                return self.optimizer
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, module)  # type: ignore[arg-type]
            if {"params", "model", "optimizer_dict"} & options.keys():  # these optimizers group parameters themselves
                return super().create_optimizer(model)
            self.optimizer = optimizer_class(groups, **options)
            self._cut_up()
        return self.optimizer  # type: ignore[return-value]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Let the target join when the drafter has learned alone for its time."""
        fresh = self.lr_scheduler is None
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.joint is not None and self.joint.changes.trained and fresh:
            self.joint.schedule = Schedule.of(self.joint.settings, num_training_steps)
            if not self.joint.schedule.learns(num_training_steps - 1):
                warnings.warn("the target never learns: drafter_only_steps leaves it no step; lower it", stacklevel=2)
            warmup = self.args.get_warmup_steps(num_training_steps)
            assert self.optimizer is not None
            scheduler = joining(scheduler, optimizer or self.optimizer, self.joint.schedule, warmup)
            self.lr_scheduler = scheduler
        return scheduler

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        assert isinstance(dataset, PaddableRows)
        dataset.sampler = step_sampler(dataset.lengths, self.args, self.packed_length)
        return dataset.sampler

    # Evaluation

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure held-out rows, choose the tree that suits them, and generate with it."""
        rows = self.held_out if eval_dataset is None else list(eval_dataset)
        start = time.perf_counter()
        self.model.eval()
        with nullcontext() if self.joint is None else self.joint.changes.served():
            self._at_hand = whole_copy(self.drafter, self.args)
            metrics = self._with_weights(lambda: self._measure(rows))
        metrics["seconds"] = time.perf_counter() - start
        self._tally.pause(metrics["seconds"])
        metrics = {f"{metric_key_prefix}_{name}": round(value, 5) for name, value in metrics.items()}
        self.evaluated_at = self.state.global_step
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _measure(self, rows: Sequence[TokenRow]) -> dict[str, float]:
        """Return the figures of held-out rows: teacher-forced, of generated text, and of a target that changes."""
        batches = ((self.make_batch(inputs), counts) for inputs, counts in self._held_out_batches(rows))
        self.figures = teacher_forced(self._guesses, self.target, batches, self.args)
        metrics = {"loss": self.figures.loss, "trained_tokens": float(self.figures.tokens)}
        metrics |= {f"accuracy_depth_{k + 1}": value for k, value in enumerate(self.figures.accuracy)}
        if self.figures.table is not None:
            topology = best_topology(self.figures.table, self.evaluation.tree_nodes)
            for drafter in (self.drafter, self._at_hand):
                drafter.fit_topology(topology.paths())
        if self.joint is not None and self.joint.changes.trained:
            self.change = target_change(self.joint.changes, self._held_out_batches(rows), self.args)
            metrics |= self.change.metrics()
        prompts = self.prompts_of(rows)
        if prompts:
            new_tokens, batch_size = self.evaluation.eval_new_tokens, self.args.eval_batch_size
            self.generation = generated(
                self._at_hand, self.target, prompts, new_tokens, self.eos_token_ids, batch_size, self.args
            )
            metrics["tokens_per_step"] = self.generation.tokens_per_step
            rates = enumerate(self.generation.acceptance_by_depth)
            metrics |= {f"acceptance_depth_{k + 1}": value for k, value in rates}
        return metrics

    def _guesses(self, *args: Any) -> LossOutput:
        with self.accelerator.autocast():
            return self._at_hand(*args)

    def prompts_of(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Return the prompts that evaluation generates from."""
        limit = hf.position_limit(self.target.model)
        room = LONGEST_PROMPT if limit is None else min(LONGEST_PROMPT, limit - self.evaluation.eval_new_tokens)
        return evaluation_prompts(rows, self.evaluation.eval_prompts, room)

    def _held_out_batches(self, rows: Sequence[TokenRow]) -> Iterator[tuple[dict[str, Tensor], bool]]:
        args = self.args
        batches = lockstep_batches(lengths_of(rows), args.eval_batch_size, args.process_index, args.world_size)
        self.callback_handler.eval_dataloader = batches  # type: ignore[assignment]  # for the progress bar
        for group, counts in batches:
            yield self._prepare_inputs(self.collator([rows[i] for i in group])), counts  # type: ignore[arg-type]
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)

    # Checkpoints and records

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint in another folder, and give it its name when it is whole."""
        check_weights(self.drafter if self.joint is None else self.joint, self.state.global_step)
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        with told_of_failure(f"checkpoint-{step}", folder):
            self._writing = folder / PARTIAL
            super()._save_checkpoint(model, trial)
            best = self.state.best_global_step
            if best and (best == step or (folder / f"checkpoint-{best}").is_dir()):
                self.state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
                if self.args.should_save:
                    self.state.save_to_json(str(self._writing / f"checkpoint-{step}" / TRAINER_STATE_NAME))
            if self.record is not None and self.args.should_save:
                self.record(self._writing / f"checkpoint-{step}")
            self._writing = None
            final = publish(folder, step, self.args)
            if self.args.should_save:
                rotate(folder, self.args.save_total_limit, self.state.best_model_checkpoint)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._writing) if self._writing is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing is None:  # a folder about to be renamed is not pushed
            super()._push_from_checkpoint(checkpoint_folder)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add accuracy by depth, trained tokens and, in joint training, the target's loss to a line about training."""
        if "loss" in logs:
            logs |= self._tally.take(self.args)
            if self.joint is not None and self.joint.target_learns:
                logs["drafter_loss_weight"] = round(self.joint.weight, 5)
            logs = self.watch.line(logs)
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the drafter, and what is trained of its target: safetensors, nothing pickled, each file as a whole."""
        if self.args.should_save:
            folder = Path(str(output_dir or self.args.output_dir))
            fresh = folder / PARTIAL
            if self.joint is None:
                self.drafter.save_pretrained(str(fresh), state_dict=state_dict)
            else:
                self._save_both(self.joint, fresh, state_dict)
            for path in sorted(fresh.rglob("*")):
                place = folder / path.relative_to(fresh)
                if path.is_dir():
                    place.mkdir(exist_ok=True)
                else:
                    sync(path)
                    os.replace(path, place)
            shutil.rmtree(fresh)

    def _save_both(self, joint: JointModule, folder: Path, state: dict[str, Tensor] | None) -> None:
        """Write drafter and target; a checkpoint keeps the target as it is trained, the end as it is served."""
        self.drafter.config.adapted_target = joint.changes.identity()
        self.drafter.save_pretrained(str(folder), state_dict=state)
        with nullcontext() if self._writing is not None else joint.changes.served():
            joint.changes.save(folder)
