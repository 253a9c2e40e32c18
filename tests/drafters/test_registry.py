"""How drafters are made and found, and what a damaged or foreign checkpoint says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import VOCAB

from headstart.drafters.medusa import MedusaDrafter
from headstart.drafters.registry import AutoDrafter, config_fields, drafter_classes, new_drafter
from headstart.inference.target import Target


@pytest.fixture
def saved(target: Target, tmp_path: Path) -> Path:
    new_drafter("medusa", target, torch.arange(0, VOCAB, 2), num_heads=2).save_pretrained(tmp_path)
    return tmp_path


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'medusa'"):
        drafter_classes("medsua")


def test_unknown_setting_names_the_nearest(target: Target) -> None:
    with pytest.raises(ValueError, match="no setting 'num_head'; did you mean 'num_heads'"):
        new_drafter("medusa", target, num_head=3)


def test_size_of_a_draft_vocabulary_alone_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="which tokens"):
        new_drafter("medusa", target, draft_vocab_size=10)


@pytest.mark.parametrize("ids", [[3, 2, 1], [1, 1, 2]], ids=["unsorted", "twice"])
def test_draft_vocabulary_must_be_sorted_and_distinct(target: Target, ids: list[int]) -> None:
    with pytest.raises(ValueError, match="distinct ids in ascending order"):
        new_drafter("medusa", target, torch.tensor(ids))


def test_settings_are_the_fields_of_the_configuration() -> None:
    fields = config_fields(drafter_classes("medusa")[0])
    assert fields["num_heads"] == 4
    assert {"num_layers", "projection", "loss", "topology"} <= fields.keys()
    assert "measured" not in fields


def test_loaded_drafter_knows_its_target_and_vocabulary(saved: Path) -> None:
    drafter = AutoDrafter.from_pretrained(saved)
    assert (drafter.config.target_vocab_size, drafter.config.draft_vocab_size) == (VOCAB, VOCAB // 2)
    assert drafter.config.feature_layers == ["final"]
    assert isinstance(drafter, MedusaDrafter)
    assert drafter.vocabulary.ids.tolist() == list(range(0, VOCAB, 2))
    assert not drafter.training


def test_name_without_a_slash_that_is_no_folder_never_goes_to_the_hub() -> None:
    with pytest.raises(ValueError, match="folder or a Hub id"):
        AutoDrafter.from_pretrained("my-drafter")


def test_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold a drafter's config\.json .* but has none"):
        AutoDrafter.from_pretrained(tmp_path)


def test_configuration_that_is_not_json_is_refused(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "headst')
    with pytest.raises(ValueError, match="must be a JSON object"):
        AutoDrafter.from_pretrained(saved)


def test_foreign_checkpoint_is_refused_by_its_type(saved: Path) -> None:
    (saved / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="is a transformers model"):
        AutoDrafter.from_pretrained(saved)


def test_truncated_weights_are_refused(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match="copy the checkpoint again"):
        AutoDrafter.from_pretrained(saved)


def test_missing_weights_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"whole weights in model\.safetensors"):
        AutoDrafter.from_pretrained(saved)


def test_pickled_weights_are_never_read(saved: Path) -> None:
    torch.save(load_file(saved / "model.safetensors"), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"whole weights in model\.safetensors"):
        AutoDrafter.from_pretrained(saved)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_match_the_configuration_are_refused_by_name(saved: Path, change: str) -> None:
    weights = load_file(saved / "model.safetensors")
    name = "logit_scale.log"
    if change == "missing":
        del weights[name]
    elif change == "unexpected":
        name = "surplus"
        weights[name] = torch.zeros(1)
    else:
        weights[name] = torch.zeros(7)
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"exactly the weights.*{name}"):
        AutoDrafter.from_pretrained(saved)
