"""The joint step: its losses by hand, whose gradients reach whom, and when the target learns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_batches import scrambled
from tiny_joint import gradients, inputs_of, joint_module, own_target
from torch import Tensor

from headstart.drafters.registry import METHODS, new_drafter
from headstart.inference.target import Target
from headstart.training.features import fresh_batch
from headstart.training.joint import JointModule, Schedule
from headstart.training.joint_arguments import JointArguments

each_method = pytest.mark.parametrize("method", sorted(METHODS))
TOGETHER, ALONE = Schedule(0, 10, 0.3), Schedule(5, 10, 0.3)


def stepped(joint: JointModule, schedule: Schedule | None = TOGETHER) -> Tensor:
    """Run one training step forward and backward; return the loss."""
    joint.schedule = schedule
    joint.train().zero_grad()
    loss = joint(inputs_of(), joint.changes.target).loss
    loss.backward()
    return loss.detach()


def trained_logits(target: Target, at: int = -1) -> Tensor:
    """Return the target's log-probabilities [M, V] where trained labels are guessed."""
    inputs = inputs_of()
    final = target.encode(inputs["tokens"], inputs["token_mask"], ()).final
    return target.logits(final[:, :-1][inputs["loss_mask"][:, 1:]]).log_softmax(-1)


@each_method
@pytest.mark.parametrize("how", ["lora", "full"])
def test_joint_step_gives_gradients_to_drafter_and_trained_target_and_to_nothing_else(method: str, how: str) -> None:
    joint = joint_module(method, train_target=how, disturb=0.1)
    stepped(joint)
    trained = {name for name, p in joint.named_parameters() if p.requires_grad}
    assert set(gradients(joint)) == trained
    beside = {name for name in trained if name.startswith("language_model.")}
    assert beside and (how == "full" or all(".lora_" in name for name in beside))
    assert trained - beside == {f"drafter.{name}" for name, _ in joint.drafter.named_parameters()}
    assert all(bool(gradient.any()) for gradient in gradients(joint.language_model).values())


@each_method
def test_loss_of_the_drafter_alone_moves_the_target(method: str) -> None:
    # A fresh adapter adds nothing, so that the target is its own teacher, and its own loss has no gradient.
    joint = joint_module(method, target_loss="kl")
    stepped(joint)
    moved = [
        name for name, gradient in gradients(joint.language_model).items() if gradient.abs().max() > 1e-5
    ]  # of fp32 losses
    layers = {name.split(".")[2] for name in moved if ".lora_B." in name and ".layers." in name}
    assert "0" in layers, "the drafter reads what the first layer has a part in"


@each_method
def test_drafter_learns_alone_at_first_as_beside_a_frozen_target(method: str) -> None:
    joint = joint_module(method, disturb=0.1)
    torch.manual_seed(0)
    loss = stepped(joint, ALONE)
    found = gradients(joint.drafter)
    assert not gradients(joint.language_model)
    joint.drafter.zero_grad()
    torch.manual_seed(0)
    with torch.no_grad():
        batch = fresh_batch(joint.changes.target, inputs_of(), joint.drafter.feature_layers)
    alone = joint.drafter(batch, joint.changes.target).loss
    alone.backward()
    assert torch.equal(loss, alone)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(joint.drafter).items())


@pytest.mark.parametrize("how", ["lora", "full"])
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_joint_loss_is_that_by_hand(how: str, kind: str) -> None:
    before = trained_logits(own_target())
    joint = joint_module(train_target=how, disturb=0.05, target_loss=kind)
    target, inputs = joint.changes.target, inputs_of()
    with torch.no_grad():
        now, batch = trained_logits(target), fresh_batch(target, inputs, joint.drafter.feature_layers)
        drafted = joint.drafter.train()(batch, target).loss
        labels = inputs["tokens"][:, 1:][inputs["loss_mask"][:, 1:]]
        held = F.kl_div(now, before, log_target=True, reduction="sum") if kind == "kl" else F.nll_loss(
            now, labels, reduction="sum"
        )  # fmt: skip
    assert float(held) > 0.01
    expected = held / inputs["loss_mask"].sum() + 0.3 * drafted
    assert float(stepped(joint)) == pytest.approx(float(expected), rel=1e-5)  # losses are added up in fp32


def test_lambda_weighs_what_the_target_gets_and_leaves_the_drafters_own_gradient() -> None:
    joint = joint_module(target_loss="kl")  # the target's own loss has no gradient yet
    found = {}
    for weight in (0.2, 0.4):
        stepped(joint, Schedule(0, 10, weight))
        found[weight] = gradients(joint)
    for name, gradient in found[0.2].items():
        factor = 2.0 if name.startswith("language_model.") else 1.0
        torch.testing.assert_close(found[0.4][name], factor * gradient, msg=name)


def test_gradient_of_the_joint_loss_is_its_slope() -> None:
    target = own_target()
    hard = scrambled(new_drafter("medusa", target, loss="ce"))  # labels do not follow the target
    joint = joint_module(target=target, drafter=hard, disturb=0.1, target_loss="kl")
    stepped(joint)
    name, weight = next((n, p) for n, p in joint.language_model.named_parameters() if ".1.self_attn.v_proj.lora_B" in n)
    slope, step = float(gradients(joint.language_model)[name][0, 0]), 0.01
    losses = []
    for sign in (1, -2):
        with torch.no_grad():
            weight[0, 0] += sign * step
        losses.append(float(stepped(joint)))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=0.01)


@pytest.mark.parametrize("schedule, learns", [(TOGETHER, True), (ALONE, False)])
def test_features_carry_gradients_once_the_target_learns_and_its_law_never_does(
    schedule: Schedule, learns: bool
) -> None:
    joint, seen = joint_module(), []
    joint.drafter.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    stepped(joint, schedule)
    assert (seen[0].features.requires_grad, seen[0].final.requires_grad) == (learns, False)


def test_states_that_serve_as_labels_alone_get_no_gradient() -> None:
    # EAGLE's last label is the state before the last token; no slot reads that state and has a label.
    joint = joint_module("eagle")
    batch = fresh_batch(joint.changes.target, inputs_of(), joint.drafter.feature_layers)
    features = batch.features.detach().requires_grad_()
    joint.drafter.train()(type(batch)(**{f: getattr(batch, f) for f in batch.__slots__} | {"features": features}),
                          joint.changes.target).loss.backward()  # fmt: skip
    assert features.grad is not None
    assert bool(features.grad[0, -3].any()) and not features.grad[0, -2:].any()


@pytest.mark.parametrize("how", ["lora", "full"])
def test_original_is_the_target_before_training_and_the_change_comes_back(how: str) -> None:
    before = trained_logits(own_target())
    joint = joint_module(train_target=how, disturb=0.1)
    target = joint.changes.target
    with torch.no_grad():
        now = trained_logits(target)
        with joint.changes.original(target.model):
            assert torch.equal(trained_logits(target), before)
        assert torch.equal(trained_logits(target), now) and not torch.allclose(now, before)
    assert all(p.requires_grad for p in joint.changes.trained.values()) and joint.changes.trained


def test_targets_own_dropout_stays_off_and_that_of_the_adapter_comes_on() -> None:
    target = own_target("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    with_dropout = joint_module(target=target, lora_dropout=0.5, disturb=0.1).train()
    drawn = [trained_logits(target) for _ in range(2)]
    assert not torch.equal(*drawn)
    with with_dropout.changes.original(target.model):
        assert torch.equal(*(trained_logits(target) for _ in range(2)))
    with_dropout.eval()
    assert torch.equal(*(trained_logits(target) for _ in range(2)))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_are_the_same_where_layers_recompute_their_insides(family: str) -> None:
    found, calls = [], []
    for recompute in (False, True):
        joint = joint_module(target=own_target(family), disturb=0.1)
        layer = joint.language_model.get_submodule("model.layers.0.mlp" if family == "llama" else "transformer.h.0.mlp")
        seen: list[int] = []
        layer.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        if recompute:
            joint.activation_checkpointing_enable()
        stepped(joint)
        found.append(gradients(joint))
        calls.append(len(seen))
    assert calls[1] == calls[0] + 1, "the layer ran once more in the backward pass"
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


@pytest.mark.parametrize("shape, expected", [
    ("constant", [1.0, 1.0, 1.0, 1.0]), ("linear", [0.25, 0.5, 0.75, 1.0]), ("sine", [0.3827, 0.7071, 0.9239, 1.0])
])  # fmt: skip
def test_lambda_rises_over_the_joint_steps(shape: str, expected: list[float]) -> None:
    schedule = Schedule.of(JointArguments(train_target="lora", drafter_loss_weight=2.0, drafter_only_steps=0.6,
                                          drafter_loss_schedule=shape), 10)  # fmt: skip
    assert [schedule.learns(step) for step in range(10)] == [False] * 6 + [True] * 4
    assert [schedule.weight_at(step) / 2 for step in range(6, 10)] == pytest.approx(expected, abs=1e-4)


def test_rate_of_the_target_rises_from_zero_when_it_joins() -> None:
    schedule = Schedule.of(JointArguments(train_target="lora", drafter_only_steps=3), 10)
    assert [schedule.rate_at(step, 4) for step in range(9)] == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1, 1]
    assert [schedule.rate_at(step, 0) for step in range(5)] == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("settings, told", [
    ({"target_learning_rate": 0.0}, "target_learning_rate must be above 0"),
    ({"drafter_loss_weight": -1.0}, "drafter_loss_weight must be above 0"),
    ({"drafter_only_steps": -1.0}, "drafter_only_steps must be at least 0"),
    ({"lora_dropout": 1.0}, "lora_dropout at least 0 and below 1"),
    ({"merge_adapter": True, "train_target": "full"}, "merge_adapter needs train_target lora"),
])  # fmt: skip
def test_senseless_settings_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        JointArguments(**settings)


def test_layers_to_adapt_are_those_named_and_an_unknown_name_is_told_with_the_nearest() -> None:
    joint = joint_module(lora_target_modules=["q_proj", "lm_head"])
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in joint.changes.trained} == {"q_proj", "lm_head"}
    with pytest.raises(ValueError, match="one is 'q_prog'; did you mean q_proj"):
        joint_module(lora_target_modules=["q_prog"])
