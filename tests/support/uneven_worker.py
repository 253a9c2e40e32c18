"""Trains on rows of which some have no trained token, in however many processes it was started; see test_processes."""

import sys

import numpy as np
import torch
from transformers import set_seed

from headstart.distill.dataset import Collator, DatasetReport, TokenDataset, TokenRow
from headstart.drafters import losses
from headstart.drafters.registry import new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training.arguments import DrafterTrainingArguments
from headstart.training.joint_arguments import JointArguments
from headstart.training.processes import check_joined, join_processes
from headstart.training.sharding import place_to_load, side_by_side
from headstart.training.trainer import DrafterTrainer

LENGTHS = (12, 9, 7, 11, 10, 8, 13, 6, 9)
TRAINED = (8, 5, 0, 0, 4, 1, 0, 0, 3)
"""9 rows, batches of 1, steps of 4: whole batches without a trained token, and an epoch that ends within a step."""


def rows() -> list[TokenRow]:
    """Return the rows: the last `TRAINED[i]` tokens of row i are trained."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for i, (length, trained) in enumerate(zip(LENGTHS, TRAINED, strict=True)):
        tokens = torch.randint(3, 40, (length,), generator=draw).numpy().astype(np.int32)
        made.append(TokenRow(f"r{i}", tokens, np.arange(length) >= length - trained))
    return made


def main(target_folder: str, output: str, accumulation: str) -> None:
    """Train for two epochs and save the drafter."""
    join_processes()
    args = DrafterTrainingArguments(
        output_dir=output,
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=int(accumulation),
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        eval_strategy="no",
        save_strategy="no",
        seed=1,
    )
    check_joined(args)
    set_seed(1)
    losses.CHUNK_BYTES = 3 * 4 * 48 * 2  # three labels a chunk: the backward pass calls modules anew
    target = Target(load_target(target_folder, device=place_to_load(args))[0])
    drafter = new_drafter("medusa", target, num_heads=2)
    joint = side_by_side(drafter, target, JointArguments(), args)
    trainer = DrafterTrainer(drafter, target, args, Collator(2), TokenDataset(rows(), DatasetReport()), joint=joint)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
