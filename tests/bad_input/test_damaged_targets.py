"""A target's folder with something missing or damaged says what, before or instead of a random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import COMMON, make_model, tiny_target
from tiny_tokenizer import tiny_tokenizer

from headstart.drafters.registry import AutoDrafter
from headstart.inference.attach import attach
from headstart.inference.loading import load_target, warn_of_other_text


def rewrite(folder: Path, **weights: torch.Tensor | None) -> None:
    """Change tensors of a saved model; None takes one away."""
    file = folder / "model.safetensors"
    changed = load_file(file) | weights
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file, {"format": "pt"})


def test_whole_folder_loads(target_folder: Path) -> None:
    model, tokenizer = load_target(str(target_folder))
    assert model.dtype == torch.float64 and not model.training and len(tokenizer) == COMMON["vocab_size"]


def test_folder_without_configuration_is_refused(target_folder: Path) -> None:
    (target_folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"must hold a target's config\.json, but has none"):
        load_target(str(target_folder))


@pytest.mark.parametrize(
    "text", ['{"model_type": "lla', "[1]", "", '{"a":' * 5000], ids=["cut", "list", "empty", "deep"]
)
def test_configuration_that_is_no_object_is_named(target_folder: Path, text: str) -> None:
    (target_folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json must be a JSON object"):
        load_target(str(target_folder))


@pytest.mark.parametrize("settings", [{"model_type": "no-such-family"}, {"hidden_size": "wide"}, {"hidden_size": -3}])
def test_configuration_of_no_model_is_named_with_its_folder(target_folder: Path, settings: dict) -> None:
    config = json.loads((target_folder / "config.json").read_text())
    (target_folder / "config.json").write_text(json.dumps(config | settings))
    with pytest.raises(ValueError, match=f"{target_folder} cannot be loaded as a target: .*Error"):
        load_target(str(target_folder))


def test_folder_without_weights_is_refused(target_folder: Path) -> None:
    (target_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must hold weights in safetensors files, but there is none"):
        load_target(str(target_folder))


@pytest.mark.parametrize("kept", [0, 5, 400, -100])
def test_truncated_weights_are_named(target_folder: Path, kept: int) -> None:
    file = target_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        load_target(str(target_folder))


def test_missing_tensor_is_never_filled_with_random_numbers(target_folder: Path) -> None:
    rewrite(target_folder, **{"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ValueError, match=r"must hold every weight .* 1 are missing: model\.layers\.1\.mlp\.up_proj"):
        load_target(str(target_folder))


def test_tensor_of_another_shape_is_named(target_folder: Path) -> None:
    rewrite(target_folder, **{"model.norm.weight": torch.ones(7)})
    with pytest.raises(ValueError, match=r"are mismatched: .*model\.norm\.weight"):
        load_target(str(target_folder))


def test_folder_without_a_tokenizer_says_which_files_are_wanted(target_folder: Path) -> None:
    for file in target_folder.glob("token*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"must hold the target's tokenizer \(tokenizer\.json"):
        load_target(str(target_folder))


def test_damaged_tokenizer_is_named_with_its_folder(target_folder: Path) -> None:
    (target_folder / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    with pytest.raises(ValueError, match=f"{target_folder} must hold the target's tokenizer"):
        load_target(str(target_folder))


def test_dtype_that_is_none_is_refused(target_folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of auto, float32"):
        load_target(str(target_folder), "int7")


def test_drafter_of_a_target_of_other_sizes_is_refused_when_attached(drafter_folder: Path) -> None:
    wider = make_model("llama", COMMON | {"hidden_size": 64, "vocab_size": 80})
    with pytest.raises(ValueError, match="V=64, D=32, but this one has V=80, D=64; load the matching target"):
        attach(wider, drafter_folder)


def test_drafter_of_a_target_of_the_same_sizes_but_another_tokenizer_warns(drafter_folder: Path) -> None:
    config = json.loads((drafter_folder / "config.json").read_text())
    prints = {"tokenizer_fingerprint": "sha256:0", "chat_template_fingerprint": "sha256:1"}
    (drafter_folder / "config.json").write_text(json.dumps(config | prints))
    fast = attach(tiny_target("llama").model, drafter_folder)
    with pytest.warns(UserWarning) as told:
        warn_of_other_text(fast.drafter, tiny_tokenizer())
    assert ["another tokenizer" in str(one.message) for one in told] == [True, False]
    assert ["another chat template" in str(one.message) for one in told] == [False, True]


def test_drafter_that_knows_no_fingerprints_does_not_warn(drafter_folder: Path) -> None:
    warn_of_other_text(AutoDrafter.from_pretrained(drafter_folder), tiny_tokenizer())
