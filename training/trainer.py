"""DrafterTrainer: transformers' Trainer for a drafter beside its frozen target.

The model that Trainer knows is the drafter alone. The target is called for features and is in no checkpoint. What
Trainer does (loop, schedule, clipping, trackers, DeepSpeed, resuming) is left to it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..core import hf
from ..distill.dataset import Collator, TokenDataset, TokenRow
from ..distill.store import row_key
from ..drafters.base import DraftBatch, Drafter, LossOutput
from ..inference.stats import GenerationStats
from ..inference.target import Target
from ..inference.tree_search import best_topology
from .arguments import EvaluationArguments
from .batches import PaddableRows, lockstep_batches, step_sampler
from .checkpoints import PARTIAL, publish, rotate, sync, told_of_failure
from .evaluation import HeldOutFigures, evaluation_prompts, generated, teacher_forced
from .features import FeatureSource, KeptRows, KeyedCollator
from .guards import EveryTensorLearns, NotFinite, StopOnSignal, check_gradient, check_weights
from .processes import sum_over_processes

LONGEST_PROMPT = 1024
"""Tokens of a prompt that evaluation generates from; longer ones would mostly measure prefill."""


class DrafterTrainer(Trainer):
    """Trains a drafter; features come from the target under no-grad, batch by batch.

    target: frozen, in eval mode; it never becomes a sub-module. eos_token_ids: end the answers of evaluation.
    train_dataset, eval_dataset: of `TokenRow`. feature_cache_gb: memory for features of rows seen before.
    kept: rows read from a store, or shared with other drafters; then feature_cache_gb is theirs.
    """

    model: Drafter

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
    ) -> None:
        drafter.check_fits(target)
        self.target = target
        self.evaluation = evaluation or EvaluationArguments()
        self.eos_token_ids = list(eos_token_ids)
        self.collator = KeyedCollator(collator)
        self.features = FeatureSource(target, drafter.feature_layers, int(feature_cache_gb * 1e9), kept)
        self.held_out = eval_dataset.rows if eval_dataset is not None else []
        self.figures: HeldOutFigures | None = None
        self.generation: GenerationStats | None = None
        self.evaluated_at: int | None = None
        self.stopper = StopOnSignal()
        self._tally = _Tally()
        self._batches: list[dict[str, Tensor]] = []
        self._writing: Path | None = None
        checks = [EveryTensorLearns(), self.stopper, *callbacks]
        rows = PaddableRows(train_dataset.rows, train_dataset.report)
        super().__init__(drafter, args, self.collator, rows, eval_dataset, callbacks=checks)  # type: ignore[arg-type]
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
        output: LossOutput = model(self.make_batch(inputs), self.target, num_items_in_batch)
        assert output.loss is not None
        loss = output.loss
        if model.training:
            self._tally.add(output)
            loss = loss * self.accelerator.num_processes
        return (loss, output) if return_outputs else loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one batch forward and backward; stop when its loss is not a number."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not torch.isfinite(loss):
            what = f"the loss must be finite, but is {float(loss)}"
            raise NotFinite(what, self.state.global_step + 1, self._ids([inputs]))
        return loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm of the step's gradient; stop when it is not a number, before the weights follow it."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is not None and not self.args.fp16:  # whose scaler skips such steps and tries a smaller scale
            check_gradient(norm, self.state.global_step + 1, self._ids(self._batches))
        return norm

    def _ids(self, batches: Sequence[dict[str, Tensor]]) -> list[str]:
        keys = {key for batch in batches for key in batch["row_keys"].tolist()}
        return [row.id for row in self.train_dataset.rows if row_key(row) in keys]  # type: ignore[union-attr]

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
        self._batches = batch_samples
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
            optimizer_class, options = self.get_optimizer_cls_and_kwargs(self.args, module)  # type: ignore[arg-type]
            if {"params", "model", "optimizer_dict"} & options.keys():  # these optimizers group parameters themselves
                return super().create_optimizer(model)
            self.optimizer = optimizer_class(parameter_groups(module, self.drafter, self.args), **options)
        return self.optimizer  # type: ignore[return-value]

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        dataset = self.train_dataset if train_dataset is None else train_dataset
        assert isinstance(dataset, TokenDataset)
        return step_sampler([len(row.input_ids) for row in dataset.rows], self.args)

    # Evaluation

    @property
    def drafter(self) -> Drafter:
        """The drafter itself, without what wraps it for several processes."""
        return self.accelerator.unwrap_model(self.model)  # type: ignore[return-value]

    def evaluate(  # type: ignore[override]
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Measure held-out rows, choose the tree that suits them, and generate with it."""
        rows = self.held_out if eval_dataset is None else list(eval_dataset)
        start = time.perf_counter()
        self.drafter.eval()
        self.figures = teacher_forced(self.model, self.target, self._held_out_batches(rows), self.args)
        metrics = {"loss": self.figures.loss, "trained_tokens": float(self.figures.tokens)}
        metrics |= {f"accuracy_depth_{k + 1}": value for k, value in enumerate(self.figures.accuracy)}
        if self.figures.table is not None:
            topology = best_topology(self.figures.table, self.evaluation.tree_nodes)
            self.drafter.fit_topology(topology.paths())
        prompts = self.prompts_of(rows)
        if prompts:
            new_tokens, batch_size = self.evaluation.eval_new_tokens, self.args.eval_batch_size
            self.generation = generated(
                self.drafter, self.target, prompts, new_tokens, self.eos_token_ids, batch_size, self.args
            )
            metrics["tokens_per_step"] = self.generation.tokens_per_step
            rates = enumerate(self.generation.acceptance_by_depth)
            metrics |= {f"acceptance_depth_{k + 1}": value for k, value in rates}
        metrics["seconds"] = time.perf_counter() - start
        self._tally.pause(metrics["seconds"])
        metrics = {f"{metric_key_prefix}_{name}": round(value, 5) for name, value in metrics.items()}
        self.evaluated_at = self.state.global_step
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def prompts_of(self, rows: Sequence[TokenRow]) -> list[list[int]]:
        """Return the prompts that evaluation generates from."""
        limit = hf.position_limit(self.target.model)
        room = LONGEST_PROMPT if limit is None else min(LONGEST_PROMPT, limit - self.evaluation.eval_new_tokens)
        return evaluation_prompts(rows, self.evaluation.eval_prompts, room)

    def _held_out_batches(self, rows: Sequence[TokenRow]) -> Iterator[tuple[DraftBatch, bool]]:
        args = self.args
        batches = lockstep_batches(rows, args.eval_batch_size, args.process_index, args.world_size)
        self.callback_handler.eval_dataloader = batches  # type: ignore[assignment]  # for the progress bar
        for group, counts in batches:
            yield self.make_batch(self._prepare_inputs(self.collator(group))), counts  # type: ignore[arg-type]
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)

    # Checkpoints and records

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint in another folder, and give it its name when it is whole."""
        check_weights(self.drafter, self.state.global_step)
        folder, step = Path(str(self.args.output_dir)), self.state.global_step
        with told_of_failure(f"checkpoint-{step}", folder):
            self._writing = folder / PARTIAL
            super()._save_checkpoint(model, trial)
            best = self.state.best_global_step
            if best and (best == step or (folder / f"checkpoint-{best}").is_dir()):
                self.state.best_model_checkpoint = str(folder / f"checkpoint-{best}")
                if self.args.should_save:
                    self.state.save_to_json(str(self._writing / f"checkpoint-{step}" / TRAINER_STATE_NAME))
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
        """Add accuracy by depth and trained tokens to a line about training."""
        if "loss" in logs:
            logs |= self._tally.take(self.args)
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the drafter: config.json and safetensors, nothing pickled; each file is replaced as a whole."""
        if self.args.should_save:
            folder = Path(str(output_dir or self.args.output_dir))
            fresh = folder / PARTIAL
            self.drafter.save_pretrained(str(fresh), state_dict=state_dict)
            for path in fresh.iterdir():
                sync(path)
                os.replace(path, folder / path.name)
            fresh.rmdir()


class _Tally:
    """Sums of training batches since the last log line."""

    def __init__(self) -> None:
        self.hits: Tensor | None = None
        self.counts: Tensor | None = None
        self.tokens: list[Tensor] = []
        self.since: float | None = None

    def begin_step(self, tokens: Tensor) -> None:
        """Count a step's trained tokens over all processes; the clock starts with the first step."""
        self.since = time.perf_counter() if self.since is None else self.since
        self.tokens.append(tokens)

    def pause(self, seconds: float) -> None:
        """Leave out time that went into something else."""
        self.since = None if self.since is None else self.since + seconds

    def add(self, output: LossOutput) -> None:
        """Count one batch of this process."""
        assert output.hits is not None and output.counts is not None
        hits, counts = output.hits.detach(), output.counts.detach()
        self.hits = hits if self.hits is None else self.hits + hits
        self.counts = counts if self.counts is None else self.counts + counts

    def take(self, args: TrainingArguments) -> dict[str, float]:
        """Return the figures over all processes and start again."""
        figures: dict[str, float] = {}
        if self.hits is not None and self.counts is not None:
            hits, counts = sum_over_processes(torch.stack([self.hits, self.counts]), args).tolist()
            shares = [hit / max(count, 1) for hit, count in zip(hits, counts, strict=True)]
            figures = {f"accuracy_depth_{k + 1}": round(share, 4) for k, share in enumerate(shares)}
        now = time.perf_counter()
        if self.tokens and self.since is not None:
            tokens = float(torch.stack(self.tokens).sum())
            figures["trained_tokens_per_step"] = round(tokens / len(self.tokens), 1)
            figures["trained_tokens_per_second"] = round(tokens / max(now - self.since, 1e-9), 1)
        self.hits, self.counts, self.tokens, self.since = None, None, [], now
        return figures


def parameter_groups(module: nn.Module, drafter: Drafter, args: TrainingArguments) -> list[dict[str, Any]]:
    """Group trained parameters by learning-rate factor and by whether they decay; plain ones first."""
    scales = drafter.learning_rate_scales()
    groups: dict[tuple[float, bool], list[Tensor]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = next((factor for part, factor in scales.items() if part in name), 1.0)
            decays = parameter.ndim > 1 and not name.endswith(("bias", "scale", "scales"))
            groups.setdefault((scale, decays), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: (-item[0][0], not item[0][1]))
    return [
        {"params": params, "lr": args.learning_rate * scale, "weight_decay": args.weight_decay if decays else 0.0}
        for (scale, decays), params in ordered
    ]
