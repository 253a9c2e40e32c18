"""Tuned trees beside the drafter."""

import json

import pytest
import torch
from tiny_targets import COMMON, make_model

from headstart.drafters.registry import AutoDrafter, new_drafter
from headstart.inference.target import Target
from headstart.inference.tune.store import Tuning, hardware, nearest, place_of, save_tuning, tunings_of

GREEDY = Tuning(1, 0.0, [[0], [0, 0]], {"nodes": 3}, {})


@pytest.fixture
def folder(target, tmp_path):
    new_drafter("medusa", target, num_heads=2).save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def test_what_is_kept_is_found_again_and_the_drafter_is_untouched(target, folder):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    path = save_tuning(folder, target, GREEDY)
    assert tunings_of(folder, target) == [GREEDY]
    assert path.parent == folder / "tuned" and [one.name for one in path.parent.iterdir()] == [path.name]
    assert {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()} == files
    assert AutoDrafter.from_pretrained(folder).config.topology is None


def test_file_name_is_safe_and_its_fields_say_what_it_is_for(target, folder):
    content = json.loads(save_tuning(folder, target, GREEDY).read_text(encoding="utf-8"))
    assert content["hardware"] == hardware(target) and content["hardware"]["dtype"] == "float64"
    assert set(place_of(folder, target).name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-")


def test_other_machines_dtypes_and_versions_have_their_own(target, folder, monkeypatch):
    save_tuning(folder, target, GREEDY)
    assert tunings_of(folder, Target(make_model("llama", COMMON).float())) == []
    with monkeypatch.context() as other:
        other.setattr(torch, "get_num_threads", lambda: 77)
        assert tunings_of(folder, target) == []
        save_tuning(folder, target, Tuning(1, 0.0, [[1]]))
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "1.0")
        assert tunings_of(folder, target) == []
    assert tunings_of(folder, target) == [GREEDY] and len(list((folder / "tuned").iterdir())) == 2


def test_new_weights_are_not_served_with_the_old_tree(target, folder):
    save_tuning(folder, target, GREEDY)
    heads = AutoDrafter.from_pretrained(folder)
    with torch.no_grad():
        next(heads.parameters()).add_(1.0)
    heads.save_pretrained(folder)
    assert tunings_of(folder, target) == []
    save_tuning(folder, target, Tuning(4, 0.0, [[1]]))
    assert tunings_of(folder, target) == [Tuning(4, 0.0, [[1]])], "entries of the old weights are gone"


def test_nearest_batch_size_and_then_temperature_is_taken(target, folder):
    entries = [Tuning(1, 0.0, [[0]]), Tuning(1, 0.8, [[1]]), Tuning(8, 0.0, [[2]])]
    for entry in entries:
        save_tuning(folder, target, entry)
    kept = tunings_of(folder, target)
    assert kept == entries
    assert nearest(kept, 1, 0.0) == entries[0]
    assert nearest(kept, 1, 1.0) == entries[1]
    assert nearest(kept, 6, 1.0) == entries[2]
    assert nearest([], 1, 0.0) is None


def test_second_tuning_takes_the_place_of_the_first(target, folder):
    save_tuning(folder, target, GREEDY)
    save_tuning(folder, target, Tuning(1, 0.0, [[4]]))
    assert tunings_of(folder, target) == [Tuning(1, 0.0, [[4]])]


@pytest.mark.parametrize("content", ["{", "{}", '{"headstart_tuned": 1}', "[]"])
def test_broken_file_is_told_and_not_used(target, folder, content):
    path = save_tuning(folder, target, GREEDY)
    path.write_text(content, encoding="utf-8")
    with pytest.warns(UserWarning, match="headstart tune"):
        assert tunings_of(folder, target) == []


def test_folder_without_tunings_has_none(target, folder, tmp_path):
    assert tunings_of(folder, target) == [] == tunings_of(tmp_path / "nowhere", target)
