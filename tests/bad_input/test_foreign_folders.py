"""Folders of other projects, given as drafter or target, are told by what they are, and pickles are never opened."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headstart.drafters.registry import AutoDrafter
from headstart.inference.loading import load_target

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
READERS: dict[str, Callable[[str], object]] = {"drafter": AutoDrafter.from_pretrained, "target": load_target}
as_drafter_and_target = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)


class Trap:
    """A pickle that leaves a file behind when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def folder_of(path: Path, config: dict | None = None, tensors: dict | None = None, trap: str | None = None) -> Path:
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / "model.safetensors")
    if trap is not None:
        (path / trap).write_bytes(pickle.dumps(Trap(path.parent / "opened")))
    return path


FOREIGN = {
    "official medusa": ({"medusa_num_heads": 5}, None, "medusa_lm_head.pt", "official Medusa release"),
    "official hydra": ({"hydra_num_heads": 4}, None, "hydra_lm_head.pt", "official Hydra release"),
    "eagle by its fc layer": (LLAMA, {"fc.weight": torch.zeros(4, 8)}, None, "an EAGLE drafter"),
    "eagle-3": (LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, None, "pytorch_model.bin", "an EAGLE drafter"),
    "eagle-3 by its vocabulary": (LLAMA | {"draft_vocab_size": 32}, {}, None, "an EAGLE drafter"),
    "speculators": (LLAMA | {"speculators_model_type": "eagle3"}, {}, None, "speculators library"),
}


@as_drafter_and_target
@pytest.mark.parametrize("name", FOREIGN)
def test_drafter_of_another_project_is_told_by_its_kind(tmp_path: Path, reader: Callable, name: str) -> None:
    config, tensors, trap, kind = FOREIGN[name]
    with pytest.raises(ValueError, match=kind):
        reader(str(folder_of(tmp_path / "it", config, tensors, trap)))
    assert not (tmp_path / "opened").exists()


@as_drafter_and_target
@pytest.mark.parametrize("config", [None, LLAMA], ids=["alone", "beside a configuration"])
def test_lora_adapter_is_told_by_its_file(tmp_path: Path, reader: Callable, config: dict | None) -> None:
    folder = folder_of(tmp_path / "it", config)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/name"}')
    with pytest.raises(ValueError, match="is a LoRA adapter"):
        reader(str(folder))


def test_model_given_as_drafter_and_drafter_given_as_target(target_folder: Path, drafter_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"but is a transformers model .model_type 'llama'"):
        AutoDrafter.from_pretrained(target_folder)
    with pytest.raises(ValueError, match=r"is a headstart drafter .*give the model it was made for"):
        load_target(str(drafter_folder))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_by_name_and_never_opened(tmp_path: Path, drafter_folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"only {name}: pickles can run code"):
        load_target(str(folder_of(tmp_path / "it", LLAMA, trap=name)))
    (drafter_folder / "model.safetensors").unlink()
    (drafter_folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "opened")))
    with pytest.raises(ValueError, match=f"only {name}: pickles can run code"):
        AutoDrafter.from_pretrained(drafter_folder)
    assert not (tmp_path / "opened").exists()


@as_drafter_and_target
def test_file_where_a_folder_is_expected_is_refused(tmp_path: Path, reader: Callable) -> None:
    folder_of(tmp_path / "it", trap="heads.pt")
    with pytest.raises(ValueError, match=r"must be a folder .* is a file"):
        reader(str(tmp_path / "it" / "heads.pt"))
    assert not (tmp_path / "opened").exists()


@as_drafter_and_target
def test_misspelt_folder_names_the_nearest(target_folder: Path, reader: Callable) -> None:
    with pytest.raises(ValueError, match=f"did you mean {target_folder}"):
        reader(str(target_folder.parent / "targte"))


@as_drafter_and_target
@pytest.mark.parametrize("name", ["", ".", "a", "a/b/c", "-x/y", "../nothing", "/nowhere/at/all"])
def test_name_that_is_no_folder_and_no_hub_id_never_reaches_for_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: Callable, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Hub id|config\.json"):
        reader(name)


@as_drafter_and_target
def test_hub_id_that_cannot_be_fetched_is_named(reader: Callable) -> None:
    with pytest.raises(ValueError, match="owner/nothing"):
        reader("owner/nothing")
