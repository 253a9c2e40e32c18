"""Muon beside AdamW: who gets which, the steps of both to the bit, resuming, and where it is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import two_processes as several
from safetensors.torch import load_file
from tiny_batches import batch_of
from tiny_joint import joint_module
from tiny_targets import WIDTH, tiny_target
from torch import Tensor, nn
from transformers import get_constant_schedule

from headstart.drafters.base import Drafter
from headstart.drafters.registry import METHODS, new_drafter
from headstart.training import optimizers
from headstart.training.arguments import DrafterTrainingArguments
from headstart.training.command_line import UsageError, parse
from headstart.training.joint import Schedule
from headstart.training.optimizers import check_optimizer, hidden_matrices, muon_with_adamw
from headstart.training.rates import joining, parameter_groups
from headstart.training.run import run

Flags = Callable[..., list[str]]
VOCABULARY = 40
"""A size that nothing else of the tiny drafters has."""


def arguments(**more: Any) -> DrafterTrainingArguments:
    return DrafterTrainingArguments(output_dir="unused", optim="muon", report_to="none", **more)


def drafter_of(method: str, vocabulary: int = VOCABULARY, **more: Any) -> Drafter:
    return new_drafter(method, tiny_target("llama"), torch.arange(vocabulary), **more)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_matrices_without_a_side_along_the_vocabulary_are_hidden(method: str) -> None:
    drafter = drafter_of(method)
    matrices = {name: parameter for name, parameter in drafter.named_parameters() if parameter.ndim == 2}
    expected = {name for name, parameter in matrices.items() if VOCABULARY not in parameter.shape}
    assert expected and set(hidden_matrices(drafter)) == expected


def test_vocabulary_as_large_as_a_hidden_state_does_not_confuse() -> None:
    drafter = drafter_of("medusa", WIDTH, num_heads=2)
    assert set(hidden_matrices(drafter)) == {"blocks.0.0.linear.weight", "blocks.1.0.linear.weight"}


def test_embeddings_of_the_whole_vocabulary_are_not_hidden() -> None:
    names = set(hidden_matrices(drafter_of("mlp", embedding="own")))
    assert names == {"mixers.0.weight", "mixers.1.weight"}


def with_gradients(drafter: nn.Module, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def test_steps_are_those_of_both_optimizers_apart_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(learning_rate=0.02, weight_decay=0.1, adam_beta2=0.9)
    drafter, other = drafter_of("eagle", projection="own"), drafter_of("eagle", projection="own")
    other.load_state_dict(drafter.state_dict())
    monkeypatch.setattr(type(drafter), "learning_rate_scales", lambda _self: {"projection": 0.1})
    whole = muon_with_adamw(parameter_groups(drafter, drafter, args), drafter, args)
    hidden = set(hidden_matrices(other))
    named = dict(other.named_parameters())
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": [named["projection.weight"]], "lr": 0.002}]
    apart = [
        torch.optim.Muon([named[name] for name in hidden], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1, betas=(0.9, 0.9), fused=True),
    ]
    for step in range(4):
        for module in (drafter, other):
            with_gradients(module, step)
        for optimizer in (whole, *apart):
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
        if step == 1:  # as if a checkpoint were read
            whole.load_state_dict(whole.state_dict())
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_weights_without_a_gradient_are_passed_over() -> None:
    drafter, args = drafter_of("medusa"), arguments()
    optimizer = muon_with_adamw(parameter_groups(drafter, drafter, args), drafter, args)
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p, before[name]) for name, p in drafter.named_parameters())


def test_step_turns_every_direction_of_a_hidden_matrix_alike() -> None:
    drafter, args = drafter_of("medusa"), arguments(learning_rate=0.01)
    optimizer = muon_with_adamw(parameter_groups(drafter, drafter, args), drafter, args)
    weight = drafter.get_parameter("blocks.0.0.linear.weight")
    before = weight.detach().clone()
    with_gradients(drafter, 0)
    left, _, right = torch.linalg.svd(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
    weight.grad = left @ torch.diag(torch.linspace(0.2, 5.0, WIDTH)) @ right
    optimizer.step()
    sizes = torch.linalg.svdvals(weight.detach() - before) / (0.01 * 0.2 * WIDTH**0.5)
    assert float(sizes.min()) > 0.4 and float(sizes.max()) < 1.4


def test_tiny_drafter_learns_a_batch_by_heart() -> None:
    target = tiny_target("llama")
    drafter = new_drafter("eagle", target, projection="own").double()
    args, batch = arguments(learning_rate=0.01), batch_of(target, drafter)
    optimizer = muon_with_adamw(parameter_groups(drafter, drafter, args), drafter, args)
    torch.manual_seed(0)
    losses = []
    for _ in range(60):
        loss = drafter.train()(batch, target).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


def test_what_is_trained_of_a_target_stays_with_adamw_and_joins_at_its_time() -> None:
    joint, args = joint_module("medusa"), arguments()
    groups = parameter_groups(joint, joint.drafter, args, 1e-4)
    optimizer = muon_with_adamw(groups, joint.drafter, args)
    assert {(group["part"], group["method"]) for group in optimizer.param_groups} == {
        ("drafter", "muon"),
        ("drafter", "adamw"),
        ("target", "adamw"),
    }
    scheduler = joining(get_constant_schedule(optimizer), optimizer, Schedule(2, 10, 0.3), 0)
    rates = []
    for _ in range(4):
        rates.append({group["part"]: group["lr"] for group in reversed(optimizer.param_groups)})
        optimizer.step()
        scheduler.step()
    assert [rate["target"] for rate in rates] == [0.0, 0.0, 1e-4, 1e-4]
    assert {rate["drafter"] for rate in rates} == {1e-3}


def test_resumed_run_equals_the_uninterrupted_one_to_the_bit(command: Flags, tmp_path: Path, capsys) -> None:
    flags = ("--optim", "muon", "--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3")
    flags = (*flags, "--eval_strategy", "no", "--weight_decay", "0.1")
    whole, killed = run("medusa", command(*flags)), tmp_path / "killed"
    shutil.copytree(whole / "checkpoint-3", killed / "checkpoint-3")
    record = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    (killed / "run.json").write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    capsys.readouterr()
    resumed = run("medusa", command(*flags, output=killed))
    assert "going on from" in capsys.readouterr().out
    for name in ("checkpoint-6/optimizer.pt", "checkpoint-6/scheduler.pt"):
        one, other = (torch.load(folder / name, weights_only=True) for folder in (whole, resumed))
        assert equal(one, other), name
    saved = torch.load(whole / "checkpoint-6/optimizer.pt", weights_only=True)
    assert {group["method"] for group in saved["param_groups"]} == {"muon", "adamw"}
    assert {frozenset(state) for state in saved["state"].values()} == {
        frozenset({"momentum_buffer"}),
        frozenset({"step", "exp_avg", "exp_avg_sq"}),
    }
    weights = load_file(whole / "model.safetensors")
    assert equal(weights, load_file(resumed / "model.safetensors"))
    assert not equal(weights, load_file(whole / "checkpoint-3" / "model.safetensors"))


def equal(one: Any, other: Any) -> bool:
    """Compare nested states, tensors to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_folder_of_a_run_with_another_optimizer_is_refused(command: Flags) -> None:
    run("medusa", command("--max_steps", "1", "--eval_strategy", "no"))
    with pytest.raises(ValueError, match=r"holds another run \(muon: False there, True now\)"):
        run("medusa", command("--max_steps", "2", "--eval_strategy", "no", "--optim", "muon"))


def test_name_of_the_optimizer_is_a_choice(command: Flags) -> None:
    assert parse("medusa", command("--optim", "muon")).training.optim == "muon"
    assert parse("medusa", command()).training.optim.startswith("adamw_torch")
    with pytest.raises(UsageError, match="invalid choice: 'moun'"):
        parse("medusa", command("--optim", "moun"))


def test_torch_without_muon_is_refused_before_anything_is_loaded(
    command: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"optim muon needs torch 2\.9 or later, but torch is"):
        run("medusa", command("--optim", "muon", "--target", "owner/never-loaded"))
    check_optimizer(parse("medusa", command()).training)


def test_optimizer_arguments_are_not_ignored() -> None:
    with pytest.raises(ValueError, match="takes no optim_args, but they are 'momentum"):
        check_optimizer(arguments(optim_args="momentum=0.9"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_refused(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "deepspeed_stage", lambda _: stage)
    with pytest.raises(ValueError, match=rf"needs a matrix as a whole, but DeepSpeed's ZeRO \(here stage {stage}\)"):
        check_optimizer(arguments())


def test_fsdp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="needs a matrix as a whole, but FSDP cuts weights up"):
        check_optimizer(arguments())


def test_drafter_without_hidden_matrices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, args = drafter_of("medusa"), arguments()
    for block in drafter.get_submodule("blocks"):  # type: ignore[operator]
        block.requires_grad_(False)
    with pytest.raises(ValueError, match="is for hidden matrices, but MedusaDrafter has none"):
        muon_with_adamw(parameter_groups(drafter, drafter, args), drafter, args)


@pytest.mark.distributed
def test_several_processes_give_the_weights_of_one(command: Flags, tmp_path: Path) -> None:
    flags = ("--optim", "muon", "--max_steps", "4", "--eval_strategy", "no", "--per_device_train_batch_size", "2")
    alone = run("medusa", command(*flags, "--gradient_accumulation_steps", str(several.PROCESSES)))
    together = tmp_path / "together"
    done = several.launched("ddp", several.ROOT / "training" / "train_medusa.py", *command(*flags, output=together))
    assert done.returncode == 0, done.stdout + done.stderr
    found = load_file(together / "model.safetensors")
    for name, value in load_file(alone / "model.safetensors").items():
        # Muon rounds to bfloat16 within a step, so another order of additions may change more than in AdamW.
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["zero2", "fsdp2"])
def test_ways_that_cut_weights_up_are_refused_by_name(command: Flags, kind: str) -> None:
    if kind == "zero2":
        pytest.importorskip("deepspeed")
    script = several.ROOT / "training" / "train_medusa.py"
    done = several.launched(kind, script, *command("--optim", "muon", "--max_steps", "1"))
    assert done.returncode != 0
    told = {"zero2": "DeepSpeed's ZeRO (here stage 2)", "fsdp2": "FSDP cuts weights up"}
    assert told[kind] in done.stdout + done.stderr
