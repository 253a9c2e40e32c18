"""A drafter's folder with something missing, foreign or senseless says what; nothing is ever filled in at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import VOCAB, tiny_target

from headstart.drafters.checkpoint import MOST_NODES, fits
from headstart.drafters.registry import AutoDrafter, new_drafter


def configure(folder: Path, **settings: Any) -> None:
    """Change settings of a saved drafter."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def rewrite(folder: Path, **weights: torch.Tensor) -> None:
    """Change tensors of a saved drafter."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | weights, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"num_head": 3}, "has no setting 'num_head'; did you mean 'num_heads'"),
        ({"quantization_config": {}}, "has no setting 'quantization_config'"),
        ({"num_heads": "two"}, "num_heads must be int, but is 'two'"),
        ({"num_heads": True}, "num_heads must be int, but is True"),
        ({"num_heads": 2.5}, "num_heads must be int, but is 2.5"),
        ({"num_heads": -1}, "num_heads must be from 1 to 128, but is -1"),
        ({"num_heads": 10**12}, "num_heads must be from 1 to 128, but is 1000000000000"),
        ({"target_width": 0}, "target_width must be from 1"),
        ({"target_vocab_size": 2**40}, "target_vocab_size must be from 1"),
        ({"draft_vocab_size": VOCAB + 1}, "does not describe a drafter: draft_vocab_size must be between 1 and V=64"),
        ({"depth_weight": float("nan")}, "depth_weight must be float, but is nan"),
        ({"depth_weight": float("inf")}, "depth_weight must be float, but is inf"),
        ({"loss": 3}, "loss must be str, but is 3"),
        ({"loss": "mse"}, r"does not describe a drafter: loss must be 'kl' or .* or 'ce'"),
        ({"measured": [1]}, r"measured must be dict\[str, Any\] | None, but is \[1\]"),
        ({"dtype": "int4"}, "dtype must be one of float32"),
        ({"feature_layers": [3]}, r"feature_layers must be \['final'\], but is \[3\]"),
        ({"topology": 5}, r"topology must be .*, but is 5"),
        ({"topology": [[0], "1"]}, "topology must be"),
        ({"topology": [[0], [1.0]]}, "topology must be"),
        ({"topology": [[0], [0]]}, r"topology is malformed: .*\[0\] stands twice"),
        ({"topology": [[0, 0]]}, r"topology is malformed: every node needs its parent"),
        ({"topology": [[-1]]}, "topology is malformed: .*ranks >= 0"),
        ({"topology": [[]]}, "topology is malformed"),
        ({"topology": [[i] for i in range(MOST_NODES)]}, "topology must have fewer than 1024 nodes"),
        ({"topology": [[VOCAB]]}, "topology asks for 65 candidates a depth, but the drafter knows 32 tokens"),
        ({"dynamic_tree": [9]}, r"dynamic_tree must be dict\[str, Any\] \| None, but is \[9\]"),
        ({"dynamic_tree": {"node": 9}}, "dynamic_tree has no setting 'node'; did you mean 'nodes'"),
        ({"dynamic_tree": {"nodes": "many"}}, "dynamic_tree: nodes must be int, but is 'many'"),
        ({"dynamic_tree": {"nodes": 10**9}}, "dynamic_tree: nodes must be at most 1024, but is 1000000000"),
        ({"dynamic_tree": {"width": 0}}, "dynamic_tree makes no sense: a dynamic tree needs nodes >= 2"),
        ({"num_layers": 2}, r"are missing: blocks\.0\.1"),
        ({"num_heads": 1}, r"are unexpected: blocks\.1\.0"),
        ({"target_width": 2**20}, r"are of another shape: .* \(must be \[1048576"),
    ],
)
def test_setting_without_sense_is_refused_with_file_and_name(
    drafter_folder: Path, settings: dict, complaint: str
) -> None:
    configure(drafter_folder, **settings)
    with pytest.raises(ValueError, match=complaint) as told:
        AutoDrafter.from_pretrained(drafter_folder)
    assert str(drafter_folder) in str(told.value)


def test_settings_of_a_fresh_drafter_are_held_to_the_same(tmp_path: Path) -> None:
    settings: dict[str, Any]
    for settings, complaint in (
        ({"num_heads": "two"}, "medusa: num_heads must be int, but is 'two'"),
        ({"depth_weight": float("nan")}, "medusa: depth_weight must be float"),
        ({"topology": [[1, 2]]}, "medusa: topology is malformed"),
    ):
        with pytest.raises(ValueError, match=complaint):
            new_drafter("medusa", tiny_target("llama"), **settings)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(drafter_folder: Path, weight: float) -> None:
    rewrite(drafter_folder, **{"logit_scale.log": torch.tensor([1.0, weight])})
    with pytest.raises(ValueError, match=r"weights must be finite, but logit_scale\.log holds"):
        AutoDrafter.from_pretrained(drafter_folder)


@pytest.mark.parametrize("at_end", [[VOCAB], [2, 2], [-1]], ids=["beyond V", "twice", "negative"])
def test_draft_vocabulary_that_is_none_is_refused(drafter_folder: Path, at_end: list[int]) -> None:
    ids = torch.arange(0, VOCAB, 2)
    ids[-len(at_end) :] = torch.tensor(at_end)
    rewrite(drafter_folder, **{"vocabulary.ids": ids})
    with pytest.raises(ValueError, match="draft vocabulary must be ascending token ids below 64"):
        AutoDrafter.from_pretrained(drafter_folder)


def test_tensor_of_another_type_is_refused(drafter_folder: Path) -> None:
    rewrite(drafter_folder, **{"logit_scale.log": torch.ones(2, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"are of another type: logit_scale\.log"):
        AutoDrafter.from_pretrained(drafter_folder)


def test_sharded_weights_load_and_their_index_cannot_point_elsewhere(drafter_folder: Path) -> None:
    whole = AutoDrafter.from_pretrained(drafter_folder)
    (drafter_folder / "model.safetensors").unlink()
    whole.save_pretrained(drafter_folder, max_shard_size="4KB")
    index = drafter_folder / "model.safetensors.index.json"
    loaded = AutoDrafter.from_pretrained(drafter_folder).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in whole.state_dict().items())
    for places in (
        {},
        [],
        {"logit_scale.log": "../elsewhere.safetensors"},
        {"logit_scale.log": 3},
        {"logit_scale.log": "weights.bin"},
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ValueError, match=r"index\.json must map tensors to safetensors files beside it"):
            AutoDrafter.from_pretrained(drafter_folder)
    index.write_text(json.dumps({"weight_map": {"logit_scale.log": "missing.safetensors"}}))
    with pytest.raises(ValueError, match=r"missing\.safetensors must be a whole safetensors file"):
        AutoDrafter.from_pretrained(drafter_folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_folder_where_a_file_is_expected_is_refused(drafter_folder: Path, name: str) -> None:
    (drafter_folder / name).unlink()
    (drafter_folder / name).mkdir()
    with pytest.raises(ValueError, match=name):
        AutoDrafter.from_pretrained(drafter_folder)


def test_configuration_that_may_not_be_read_is_named(drafter_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(ValueError, match=r"config\.json must be a file that can be read, .*Permission denied"):
        AutoDrafter.from_pretrained(drafter_folder)


def test_annotations_are_read_as_they_are_written() -> None:
    assert fits([1, "final"], list[int | str]) and not fits([1.5], list[int | str])
    assert fits(None, int | None) and not fits(True, int) and fits(True, bool)
    assert fits(3, float) and not fits("3", float)


def test_setting_that_training_leaves_behind_is_no_mistake(drafter_folder: Path) -> None:
    configure(drafter_folder, use_cache=False)
    AutoDrafter.from_pretrained(drafter_folder)
