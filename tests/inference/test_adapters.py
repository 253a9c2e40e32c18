"""A drafter and the adapter of its target: put on when asked for, refused when it is another, taken off to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_joint import joint_module, own_target, scramble, values
from tiny_targets import prompts_of
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headstart import AutoDrafter, attach
from headstart.drafters.registry import METHODS
from headstart.inference.adapters import Fingerprint, fingerprint
from headstart.inference.plain import plain_generate
from headstart.inference.state import DecodingRules
from headstart.inference.target import Target
from headstart.training.joint import JointModule


def saved(folder: Path, method: str = "medusa", **more: Any) -> JointModule:
    """Save a drafter with its changed target as the trainer does; return both."""
    joint = joint_module(method, disturb=0.2, **more)
    joint.drafter.config.adapted_target = joint.changes.identity()
    joint.drafter.save_pretrained(folder)
    joint.changes.save(folder)
    return joint.eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    saved(tmp_path / "drafter")
    return tmp_path / "drafter"


def text(model: PreTrainedModel, seed: int | None = None) -> list[list[int]]:
    """Return what a model says alone, greedily or sampled."""
    rules = DecodingRules(16) if seed is None else DecodingRules(16, do_sample=True, seed=seed)
    return plain_generate(Target(model), prompts_of(6, 6), rules)


def fast_text(fast: Any, **more: Any) -> list[list[int]]:
    prompts = torch.tensor(prompts_of(6, 6))
    out: Tensor = fast.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16, **more)
    return out[:, 6:].tolist()


@pytest.mark.parametrize("method", sorted(METHODS))
def test_text_is_that_of_the_adapted_target_and_after_detach_that_of_the_original(method: str, tmp_path: Path) -> None:
    joint = saved(tmp_path, method)
    adapted, model = joint.language_model, own_target().model
    original = text(model)
    before, modules = dict(values(model)), dict(model.named_modules())
    fast = attach(model, tmp_path, apply_adapter=True)
    assert fast_text(fast) == text(adapted) != original
    assert fast_text(fast, do_sample=True, seed=[3, 4]) == plain_generate(
        Target(adapted), prompts_of(6, 6), DecodingRules(16, do_sample=True, seed=[3, 4])
    )
    assert fast.detach() is model
    assert dict(model.named_modules()) == modules
    assert before.keys() == dict(values(model)).keys()
    assert all(torch.equal(value, before[name]) for name, value in values(model))
    assert text(model) == original
    with pytest.raises(ValueError, match="was detached; attach it again"):
        fast_text(fast)


def test_what_was_trained_and_in_which_mode_comes_back_too(folder: Path) -> None:
    model = own_target().model.train()
    model.lm_head.requires_grad_(True)
    before = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    attach(model, folder, apply_adapter=True).detach()
    assert before == ([p.requires_grad for p in model.parameters()], [m.training for m in model.modules()])
    assert "peft_config" not in vars(model)


def test_drafter_that_needs_its_adapter_is_refused_without_the_flag(folder: Path) -> None:
    model = own_target().model
    with pytest.raises(ValueError, match=f"put on the one in {folder / 'adapter'}, pass apply_adapter=True"):
        attach(model, folder)
    assert fingerprint(model).adapter is None


def test_flag_without_an_adapter_to_apply_is_said_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match="apply_adapter has no effect"):
        attach(own_target().model, "medusa", apply_adapter=True)


def test_adapter_of_another_base_is_refused_with_both_fingerprints(folder: Path) -> None:
    model = own_target().model
    scramble([model.model.layers[1].mlp.up_proj.weight], 0.1)  # type: ignore[index,union-attr]
    with pytest.raises(ValueError, match=f"trained on a target .*but this one has {fingerprint(model).base}"):
        attach(model, folder, apply_adapter=True)
    assert fingerprint(model).adapter is None


def changed_weight(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 1}, folder / "adapter_model.safetensors")


def changed_scale(folder: Path) -> None:
    changed_settings(folder, lora_alpha=99)


def changed_settings(folder: Path, **more: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **more}), encoding="utf-8")


def test_settings_beyond_a_plain_adapter_are_not_read(folder: Path) -> None:
    changed_settings(folder / "adapter", megatron_config={"tensor_model_parallel_size": 1}, megatron_core="antigravity")
    assert attach(own_target().model, folder, apply_adapter=True).adapter is not None


@pytest.mark.parametrize("spoil, told", [
    (changed_weight, "must hold the adapter sha256:.* but holds sha256:"),
    (changed_scale, "must hold the adapter sha256:.* but holds sha256:"),
    (shutil.rmtree, "must hold adapter_config.json and adapter_model.safetensors, but does not"),
    (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x"), "must be a whole safetensors file"),
    (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "never opened"),
    (lambda folder: changed_settings(folder, peft_type="IA3"), "must hold a LoRA adapter, but its peft_type is 'IA3'"),
    (lambda folder: changed_settings(folder, target_modules=["q_proj"]), "names others than adapter_model"),
    (lambda folder: changed_settings(folder, target_modules=["other"]), "cannot be put on"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Found unexpected keys")
def test_adapter_that_is_another_or_damaged_is_refused_and_the_model_left_as_it_was(
    folder: Path, spoil: Any, told: str
) -> None:
    model = own_target().model
    before = dict(model.named_modules())
    spoil(folder / "adapter")
    with pytest.raises(ValueError, match=told):
        attach(model, folder, apply_adapter=True)
    assert dict(model.named_modules()) == before and "peft_config" not in vars(model)


def test_second_drafter_of_the_same_adapter_needs_no_flag_and_leaves_it_on(folder: Path) -> None:
    model = own_target().model
    first = attach(model, folder, apply_adapter=True)
    second = attach(model, folder)
    said = fast_text(second)
    second.detach()
    assert fast_text(first) == said
    first.detach()


def test_model_that_carries_another_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    other = joint_module(disturb=0.3).language_model
    with pytest.raises(ValueError, match="already carries sha256:"):
        attach(other, folder, apply_adapter=True)


def test_merged_target_is_known_and_says_what_the_adapted_one_says(tmp_path: Path) -> None:
    for family, tied in (("llama", False), ("llama", True), ("gpt2", True)):  # GPT-2's weights lie the other way round
        place = tmp_path / f"{family}-{tied}"
        joint = joint_module(target=own_target(family, tie_word_embeddings=tied), disturb=0.2).eval()
        changes: Any = joint.changes
        whole = changes.save_merged(place)
        joint.drafter.config.adapted_target = {**changes.identity(), "whole": whole}
        joint.drafter.save_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(place / "target")
        assert fingerprint(model) == Fingerprint(whole, None) and model.dtype == torch.float64
        assert not AutoConfig.from_pretrained(place / "target").tie_word_embeddings
        fast = attach(model, place)
        assert fast.adapter is None and fast_text(fast) == text(joint.language_model)
        joint.changes.save(place)
        base = own_target(family, tie_word_embeddings=tied).model
        assert fast_text(attach(base, place, apply_adapter=True)) == text(joint.language_model)
        assert joint.language_model.config.tie_word_embeddings is tied


def test_target_trained_whole_is_loaded_from_beside_its_drafter(tmp_path: Path) -> None:
    joint = saved(tmp_path, train_target="full")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert fast_text(attach(model, tmp_path)) == text(joint.language_model)
    for flag in (False, True):
        with pytest.raises(ValueError, match=f"load the one in {tmp_path / 'target'}"):
            attach(own_target().model, tmp_path, apply_adapter=flag)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_is_the_same_in_every_type_a_checkpoint_is_loaded_in(folder: Path, dtype: torch.dtype) -> None:
    stored = own_target().model.to(dtype)  # type: ignore[arg-type]
    wanted = fingerprint(stored)
    assert fingerprint(stored.to(torch.float64)) == wanted  # type: ignore[arg-type]
    assert wanted.base != fingerprint(own_target("qwen2").model).base


def test_drafter_in_memory_finds_its_adapter_where_it_was_loaded_from(folder: Path) -> None:
    drafter = AutoDrafter.from_pretrained(folder)
    assert attach(own_target().model, drafter, apply_adapter=True).adapter is not None
    unsaved = joint_module(disturb=0.2)
    unsaved.drafter.config.adapted_target = unsaved.changes.identity()
    with pytest.raises(ValueError, match="was not loaded from any"):
        attach(own_target().model, unsaved.drafter, apply_adapter=True)
