"""The trainer: one loss however a step is cut, the drafter alone in checkpoints, and figures that are true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_targets import tiny_target
from torch import Tensor
from transformers import AutoTokenizer, TrainerCallback

from headstart import attach
from headstart.core.tree import DynamicTree
from headstart.distill.dataset import Collator, TokenDataset, load_dataset, split_held_out
from headstart.drafters.base import Drafter
from headstart.drafters.medusa import MedusaDrafter
from headstart.drafters.modules import LogitScale, ResBlock
from headstart.drafters.registry import METHODS, new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training.arguments import DrafterTrainingArguments, EvaluationArguments
from headstart.training.evaluation import as_served
from headstart.training.trainer import DrafterTrainer, parameter_groups


def make_trainer(
    target_folder: Path,
    answers_file: Path,
    output: Path,
    dtype: str = "float64",
    drafter: Drafter | None = None,
    feature_cache_gb: float = 0.0,
    **more: Any,
) -> DrafterTrainer:
    """Return a trainer of two heads; `more` are training arguments."""
    model, _ = load_target(str(target_folder), dtype)
    target = Target(model)
    torch.manual_seed(0)
    if drafter is None:
        drafter = new_drafter("medusa", target, num_heads=2).to(getattr(torch, dtype))
    rows = load_dataset(answers_file, AutoTokenizer.from_pretrained(target_folder))
    train, held_out = split_held_out(rows.rows, 0.2)
    args = DrafterTrainingArguments(
        output_dir=str(output), report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=1, seed=3, **more
    )
    data = TokenDataset(train, rows.report), TokenDataset(held_out, rows.report)
    evaluation = EvaluationArguments(2, 6, 8)
    return DrafterTrainer(drafter, target, args, Collator(2), *data, evaluation, [2], feature_cache_gb)


def weights(trainer: DrafterTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}


@pytest.fixture
def start(target_folder: Path, answers_file: Path, tmp_path: Path):
    """Return a maker of trainers, each in a folder of its own unless told."""
    made = iter(range(100))

    def make(**settings: Any) -> DrafterTrainer:
        output = settings.pop("output", tmp_path / f"run-{next(made)}")
        return make_trainer(target_folder, answers_file, output, **settings)

    return make


@pytest.mark.parametrize("batch, accumulated", [(4, 2), (2, 4), (1, 8)])
def test_accumulated_batches_equal_the_large_one(start, batch: int, accumulated: int) -> None:
    fixed = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no", "warmup_steps": 0}
    large = start(per_device_train_batch_size=8, **fixed)
    small = start(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulated, **fixed)
    large.train()
    small.train()
    for name, value in weights(large).items():
        torch.testing.assert_close(weights(small)[name], value, rtol=0, atol=1e-6, msg=name)
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (large, small)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # of fp32 sums


def test_loss_in_the_log_is_that_of_the_step_by_hand(start) -> None:
    trainer = start(per_device_train_batch_size=16, max_steps=1, eval_strategy="no", save_strategy="no")
    drafter = trainer.drafter
    batch = trainer.make_batch(trainer.collator(trainer.train_dataset.rows))
    expected = float(drafter.train()(batch, trainer.target).loss.detach())
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["loss"] == pytest.approx(expected)
    assert line["trained_tokens_per_step"] == sum(int(row.loss_mask.sum()) for row in trainer.train_dataset.rows)


@pytest.mark.parametrize("cache_gb", [0.0, 0.00001, 1.0], ids=["anew", "some kept", "all kept"])
@pytest.mark.parametrize("stop", [5, 8], ids=["within an epoch", "at its end"])
def test_resumed_run_equals_the_uninterrupted_one_to_the_bit(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int, cache_gb: float
) -> None:
    # 16 rows in batches of 2: an epoch is 8 steps, and the 11th lies in the second. Dropout makes randomness matter.
    forward = ResBlock.forward
    monkeypatch.setattr(ResBlock, "forward", lambda self, x: F.dropout(forward(self, x), 0.1, self.training))
    fixed = {"dtype": "float32", "per_device_train_batch_size": 2, "max_steps": 11, "feature_cache_gb": cache_gb}
    fixed |= {"save_strategy": "steps", "save_steps": stop, "eval_strategy": "no"}
    straight, first, second = (start(output=tmp_path / name, **fixed) for name in ("whole", "halves", "halves"))
    torch.manual_seed(7)
    straight.train()
    first.add_callback(StopAt(stop))
    torch.manual_seed(7)
    first.train()
    assert first.state.global_step == stop
    torch.manual_seed(99)
    second.train(resume_from_checkpoint=str(tmp_path / "halves" / f"checkpoint-{stop}"))
    after = torch.get_rng_state()
    assert second.state.global_step == 11 and second.state.epoch == straight.state.epoch
    for name, value in weights(straight).items():
        assert torch.equal(weights(second)[name], value), name
    wanted, found = (tensors_in(t.optimizer.state_dict()) for t in (straight, second))
    assert len(wanted) == len(found) and all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert straight.lr_scheduler.state_dict() == second.lr_scheduler.state_dict()
    straight_state = torch.load(tmp_path / "whole" / "checkpoint-11" / "rng_state.pth", weights_only=False)
    assert torch.equal(straight_state["cpu"], after)


def test_target_stays_as_it_was_and_out_of_every_file(start, tmp_path: Path) -> None:
    trainer = start(output=tmp_path / "run", per_device_train_batch_size=4, num_train_epochs=1)
    before = {name: p.clone() for name, p in trainer.target.model.named_parameters()}
    trainer.train()
    assert all(torch.equal(p, before[name]) for name, p in trainer.target.model.named_parameters())
    assert all(not p.requires_grad and p.grad is None for p in trainer.target.model.parameters())
    own = {tuple(p.shape) for p in trainer.drafter.state_dict().values()}
    frozen = {tuple(p.shape) for p in before.values()} - own
    checkpoint = tmp_path / "run" / "checkpoint-4"
    found = [load_file(checkpoint / "model.safetensors")]
    found += [torch.load(path, weights_only=False) for path in checkpoint.glob("*.pt")]
    shapes = [tuple(value.shape) for value in tensors_in(found)]
    assert shapes and not frozen & set(shapes)
    assert set(found[0]) == set(trainer.drafter.state_dict())
    assert not list(checkpoint.glob("*.bin"))


def test_saved_drafter_holds_safetensors_and_nothing_pickled(start, tmp_path: Path) -> None:
    trainer = start(output=tmp_path / "run", per_device_train_batch_size=4, max_steps=1, save_strategy="no")
    trainer.train()
    trainer.save_model()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "model.safetensors"]


def test_learning_rate_factors_and_decay_follow_the_drafter(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MedusaDrafter, "learning_rate_scales", lambda _self: {"projections": 0.1})
    trainer = start(weight_decay=0.1, learning_rate=1e-3)
    groups = parameter_groups(trainer.drafter, trainer.drafter, trainer.args)
    names = {id(p): name for name, p in trainer.drafter.named_parameters()}
    found = {(group["lr"], group["weight_decay"]): sorted(names[id(p)] for p in group["params"]) for group in groups}
    assert found == {
        (1e-3, 0.1): ["blocks.0.0.linear.weight", "blocks.1.0.linear.weight"],
        (1e-3, 0.0): ["blocks.0.0.linear.bias", "blocks.1.0.linear.bias", "logit_scale.log"],
        (1e-4, 0.1): ["projections.0.weight", "projections.1.weight"],
    }
    assert next(iter(found)) == (1e-3, 0.1), "the log shows the first group's rate"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_logit_scales_of_every_method_learn_faster_than_its_weights_and_do_not_decay(start, method: str) -> None:
    args = start(weight_decay=0.1, learning_rate=1e-3).args
    drafter = new_drafter(method, tiny_target("llama"))
    first, *others = parameter_groups(drafter, drafter, args)
    assert (first["lr"], first["weight_decay"]) == (1e-3, 0.1), "the log shows the first group's rate"
    fast = [group for group in others if group["lr"] == 1e-3 * LogitScale.RATE]
    assert [group["weight_decay"] for group in fast] == [0.0]
    assert [id(p) for p in fast[0]["params"]] == [id(p) for n, p in drafter.named_parameters() if "logit_scale" in n]


def test_loss_that_is_not_finite_stops_the_run(start) -> None:
    trainer = start(max_steps=2, eval_strategy="no", save_strategy="no")
    with torch.no_grad():
        trainer.drafter.get_parameter("logit_scale.log").fill_(float("nan"))
    with pytest.raises(ValueError, match="loss must be finite, but is nan in step 1"):
        trainer.train()


def test_tensor_that_gets_no_gradient_stops_the_run(start) -> None:
    trainer = start(max_steps=2, eval_strategy="no", save_strategy="no")
    trainer.drafter.register_parameter("idle", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match="idle got none"):
        trainer.train()


def test_drafter_of_another_target_is_refused(start, target_folder: Path) -> None:
    target = Target(load_target(str(target_folder))[0])
    drafter = new_drafter("medusa", target, num_heads=2)
    drafter.config.target_width = 99
    with pytest.raises(ValueError, match="D=99"):
        start(drafter=drafter, dtype="float32")


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_does_not_depend_on_the_batch_size(start, batch_size: int) -> None:
    names = ["eval_loss", "eval_trained_tokens", "eval_tokens_per_step"]
    names += ["eval_accuracy_depth_1", "eval_accuracy_depth_2"]
    one = start(per_device_eval_batch_size=4).evaluate()
    other = start(per_device_eval_batch_size=batch_size).evaluate()
    assert [one[name] for name in names] == pytest.approx([other[name] for name in names], abs=1e-5)


def test_evaluation_chooses_a_tree_of_the_size_asked_for(start) -> None:
    trainer = start()
    trainer.evaluate()
    assert trainer.figures is not None and trainer.figures.table is not None
    assert trainer.figures.table.shape == (2, 16)
    assert len(trainer.drafter.config.topology or []) <= 7  # 8 nodes with the root


def test_evaluation_keeps_a_tree_that_follows_confidence(start) -> None:
    trainer = start()
    trainer.drafter.set_dynamic_tree(DynamicTree(nodes=4, depth=2, width=2))
    trainer.evaluate()
    assert trainer.drafter.config.topology is not None, "for drawn nodes"
    assert trainer.drafter.dynamic == DynamicTree(nodes=4, depth=2, width=2)


def test_evaluation_generates_with_the_drafter_as_it_is_served(start, tmp_path: Path) -> None:
    trainer = start(dtype="bfloat16")
    drafter = trainer.drafter.float()
    own = {name: p.data_ptr() for name, p in drafter.named_parameters()}
    trainer.evaluate()
    assert {name: p.data_ptr() for name, p in drafter.named_parameters()} == own and drafter.dtype == torch.float32
    drafter.save_pretrained(tmp_path / "saved")
    fast = attach(trainer.target.model, tmp_path / "saved")
    assert fast.drafter.dtype == torch.bfloat16
    assert trainer.generation is not None
    with as_served(drafter, torch.bfloat16):
        for name, value in fast.drafter.state_dict().items():
            assert torch.equal(drafter.state_dict()[name], value), name


def test_drafter_is_in_the_served_type_while_it_generates(start, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, propose = set(), MedusaDrafter.propose

    def noted(self: MedusaDrafter, *args: Any) -> Any:
        seen.add(self.dtype)
        return propose(self, *args)

    monkeypatch.setattr(MedusaDrafter, "propose", noted)
    trainer = start(dtype="bfloat16")
    trainer.drafter.float()
    trainer.evaluate()
    assert seen == {torch.bfloat16}


def test_rows_come_in_another_order_in_every_epoch(start) -> None:
    trainer = start(per_device_train_batch_size=4)
    loader: Any = trainer.get_train_dataloader()
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([key for batch in loader for key in batch["row_keys"].tolist()])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1] and orders[0] == orders[2]


def test_prediction_step_knows_the_target(start) -> None:
    trainer = start()
    inputs = trainer.collator(trainer.held_out)
    loss, logits, labels = trainer.prediction_step(trainer.drafter.eval(), inputs, True)
    assert torch.isfinite(loss) and logits is None and labels is None


def test_bfloat16_training_keeps_float32_weights(start) -> None:
    trainer = start(dtype="bfloat16", drafter=None, bf16=True, max_steps=2, save_strategy="no")
    trainer.drafter.float()
    trainer.train()
    assert {p.dtype for p in trainer.drafter.parameters()} == {torch.float32}
    assert "eval_tokens_per_step" in {key for line in trainer.state.log_history for key in line}


def test_packed_rows_keep_their_documents_apart(start) -> None:
    trainer = start()
    rows = trainer.train_dataset.rows[:2]
    alone = [trainer.make_batch(trainer.collator([row])) for row in rows]
    ids = [torch.from_numpy(row.input_ids.astype("int64")) for row in rows]
    packed = {
        "tokens": torch.cat(ids)[None],
        "token_mask": torch.ones(1, sum(map(len, ids)), dtype=torch.bool),
        "loss_mask": torch.cat([torch.from_numpy(row.loss_mask) for row in rows])[None],
        "positions": torch.cat([torch.arange(len(i)) for i in ids])[None],
        "segments": torch.cat([torch.full((len(i),), n) for n, i in enumerate(ids)])[None],
    }
    batch = trainer.make_batch(packed)
    torch.testing.assert_close(batch.final[0, -len(ids[1]) :], alone[1].final[0], rtol=0, atol=1e-9)
    one = torch.tensor(1)
    total = sum(float(trainer.drafter(b, trainer.target, one).loss.detach()) for b in alone)
    assert float(trainer.drafter(batch, trainer.target, one).loss.detach()) == pytest.approx(total)


class StopAt(TrainerCallback):
    """Ends training after a step, as if the process had been stopped there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step
        return control


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in nested lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]
