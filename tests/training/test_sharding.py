"""Target and drafter in one module to be cut up: the same loss, what is refused, what a file may miss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_batches import scrambled
from tiny_joint import gradients, inputs_of, own_target

from headstart.drafters.registry import METHODS, new_drafter
from headstart.training import checkpoints, joint_arguments, sharding
from headstart.training.adapters import FrozenTarget
from headstart.training.command_line import parse
from headstart.training.features import FeatureSource
from headstart.training.joint import JointModule
from headstart.training.joint_arguments import JointArguments

Flags = Callable[..., list[str]]


def beside(method: str) -> JointModule:
    """Return a drafter beside its frozen target."""
    target = own_target()
    return JointModule(scrambled(new_drafter(method, target)), FrozenTarget(target), JointArguments())


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_drafter_beside_its_frozen_target_learns_what_it_learns_alone(method: str) -> None:
    joint, inputs = beside(method).train(), inputs_of()
    torch.manual_seed(0)  # some methods draw noise
    joint(inputs, joint.changes.target).loss.backward()
    found = gradients(joint.drafter)
    joint.drafter.zero_grad()
    batch = FeatureSource(joint.changes.target, joint.drafter.feature_layers)(inputs)
    torch.manual_seed(0)
    alone = joint.drafter(batch, joint.changes.target)
    assert alone.loss is not None
    alone.loss.backward()
    for name, value in gradients(joint.drafter).items():
        assert torch.equal(found[name], value), name
    assert not gradients(joint.language_model)
    torch.manual_seed(0)
    assert torch.equal(joint(batch, joint.changes.target).loss, alone.loss)


def test_function_runs_inside_of_the_module() -> None:
    joint = beside("medusa")
    seen: list[str] = []
    joint.register_forward_pre_hook(lambda *_: seen.append("weights at hand"))
    assert joint(lambda: len(seen)) == 1


def test_checkpoint_may_miss_frozen_weights_and_no_others() -> None:
    joint = beside("medusa")
    state = {name: value for name, value in joint.state_dict().items() if name.startswith("drafter.")}
    joint.load_state_dict(state)
    del state["drafter.logit_scale.log"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"drafter.logit_scale.log\""):
        joint.load_state_dict(state)


def test_settings_that_do_not_go_with_cut_up_weights_are_refused(
    command: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse("medusa", command("--feature_cache_gb", "1"))
    sharding.check_sharding(settings.data, settings.target, settings.training)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"FSDP must be version 2 .* but is version 1"):
        sharding.check_sharding(settings.data, settings.target, settings.training)
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="must have it read equally often, but feature_cache_gb is 1"):
        sharding.check_sharding(settings.data, settings.target, settings.training)
    hybrid = parse("medusa", command("--features", "store", "--missing_features", "make"))
    with pytest.raises(ValueError, match="must have it read equally often, but missing_features is make"):
        sharding.check_sharding(hybrid.data, hybrid.target, hybrid.training)
    quantised = parse("medusa", command("--load_in_4bit", "true"))
    with pytest.raises(ValueError, match="weights of 4 bits cannot be cut up"):
        sharding.check_sharding(quantised.data, quantised.target, quantised.training)


def test_joint_training_under_fsdp_is_refused(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse("medusa", command("--train_target", "lora"))
    joint_arguments.check_joint(settings.joint, settings.data, settings.target, settings.training)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="which FSDP2 cannot do"):
        joint_arguments.check_joint(settings.joint, settings.data, settings.target, settings.training)


def test_target_is_cut_up_with_every_drafter_under_fsdp(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    args, target = parse("redrafter", command()[:6]).training, own_target()
    drafter = new_drafter("redrafter", target)
    assert sharding.side_by_side(drafter, target, JointArguments(), args) is None
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert isinstance(sharding.side_by_side(drafter, target, JointArguments(), args), JointModule)
    drafters = [new_drafter(method, target) for method in METHODS]
    assert all(p.ndim for drafter in drafters for p in drafter.parameters())  # FSDP2 cuts up no single number


def test_zero3_trains_in_the_type_of_the_target(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    args, target = parse("medusa", command()).training, own_target()
    sharding.check_type(target, args)
    monkeypatch.setattr(sharding, "deepspeed_stage", lambda _: 3)
    with pytest.raises(
        ValueError, match=r"the training, float32, but the target is in float64; set target_dtype float32"
    ):
        sharding.check_type(target, args)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ({"deepspeed_stage": 3}, "was saved with DeepSpeed ZeRO-3 and 2 processes .* this run works without DeepSpeed"),
        ({"fsdp": 2}, "was saved with FSDP .* this run works without DeepSpeed"),
        ({"rows_per_step": 8}, "was saved by 2 processes with 8 rows a step, but the 1 of this run make 4"),
        ({"rows_per_step": 4}, None),
    ],
)
def test_other_processes_go_on_only_where_it_is_right(
    command: Flags, tmp_path: Path, then: dict[str, int], told: str | None
) -> None:
    args = parse("medusa", command()).training
    saved = {"processes": 2, "deepspeed_stage": None, "fsdp": None, "rows_per_step": 4, **then}
    (tmp_path / checkpoints.MANIFEST).write_text(json.dumps(saved), encoding="utf-8")
    if told is None:
        checkpoints.check_same_way(tmp_path, args)
        return
    with pytest.raises(ValueError, match=told):
        checkpoints.check_same_way(tmp_path, args)
