"""Trains three steps, of which one process spoils its loss in the second; keeps the weights of each; see test_watch."""

import sys
from pathlib import Path

import torch
from transformers import TrainerCallback, set_seed
from uneven_worker import rows

from headstart.distill.dataset import Collator, DatasetReport, TokenDataset
from headstart.drafters.registry import new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training.arguments import DrafterTrainingArguments
from headstart.training.processes import join_processes
from headstart.training.trainer import DrafterTrainer
from headstart.training.watch_arguments import WatchArguments


class Spoiled(DrafterTrainer):
    """The last process's loss of the second step adds an infinity, which leaves its gradient finite."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        last = self.args.process_index == self.args.world_size - 1
        return loss + float("inf") if last and self.state.global_step == 1 else loss


class Keep(TrainerCallback):
    """Keeps all weights after each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        weights = [p.detach().float().flatten() for p in kwargs["model"].parameters()]
        self.seen.append(torch.cat(weights))


def main(target_folder: str, output: str) -> None:
    """Train, and write what was kept."""
    join_processes()
    args = DrafterTrainingArguments(
        output_dir=output, report_to="none", disable_tqdm=True, per_device_train_batch_size=2, max_steps=3,
        train_sampling_strategy="sequential", eval_strategy="no", save_strategy="no", warmup_steps=0, seed=1,
    )  # fmt: skip
    set_seed(1)
    target, keep = Target(load_target(target_folder, device=str(args.device))[0]), Keep()
    data = TokenDataset(rows(), DatasetReport())
    watch = WatchArguments(non_finite="skip")
    drafter = new_drafter("medusa", target, num_heads=2)
    trainer = Spoiled(drafter, target, args, Collator(2), data, callbacks=[keep], watch=watch)
    trainer.train()
    torch.save(keep.seen, Path(output) / f"steps-{args.process_index}.pt")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
