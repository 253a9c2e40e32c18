"""A capture stores what training would make, and survives being stopped anywhere."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import VOCAB, tiny_target
from transformers import PreTrainedTokenizerFast

from headstart.cli import main
from headstart.distill.capture import capture, data_fingerprints, read_layers, row_states
from headstart.distill.dataset import TokenRow, load_dataset
from headstart.distill.store import MANIFEST, FeatureStore, make_manifest, row_key, target_identity
from headstart.inference.target import Target, TargetOutput

LAYERS = ("final", 0, 1)


class FailingTarget(Target):
    """Reads so many rows and then breaks, as a killed process would."""

    left = 10**9

    def encode(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> TargetOutput:
        self.left -= len(tokens)
        if self.left < 0:
            raise RuntimeError("killed")
        return super().encode(tokens, *args, **kwargs)


@pytest.fixture
def target() -> FailingTarget:
    return FailingTarget(tiny_target("llama").model)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(3)
    path = tmp_path / "answers.jsonl"
    answers = [torch.randint(3, VOCAB, (2 + i % 4,), generator=draw).tolist() for i in range(9)]
    rows = [{"id": f"r{i}", "prompt_ids": [1, 2], "answer_ids": answer} for i, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows(data: Path, tokenizer: PreTrainedTokenizerFast) -> Sequence[TokenRow]:
    return load_dataset(data, tokenizer).rows


@pytest.fixture
def manifest(target: Target, rows, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Describe a store of several shards."""
    return make_manifest(target_identity(target, tokenizer, "llama", None), LAYERS, rows, 12)


def test_stored_states_are_those_of_each_row_read_alone(target, rows, manifest, tmp_path: Path, capsys) -> None:
    tokens = capture(target, rows, tmp_path / "store", manifest, progress=False)
    assert tokens == manifest["tokens"] == sum(len(row.input_ids) for row in rows)
    said = capsys.readouterr().err
    size = tokens * 3 * target.width * 8
    assert f"9 rows, {tokens} tokens, layers final, 0, 1: {size / 1e9:.3f} GB to write, about" in said
    store = FeatureStore(tmp_path / "store")
    for row in rows:
        ids = torch.from_numpy(row.input_ids).long()[None]
        alone = target.encode(ids, torch.ones_like(ids, dtype=torch.bool), LAYERS)
        found = store.row(row_key(row))
        assert torch.equal(found, row_states(target, ids[0], LAYERS))
        torch.testing.assert_close(found, alone.features[0])
        torch.testing.assert_close(found[:, 0], alone.final[0])


def test_stopped_capture_keeps_its_whole_shards_and_goes_on(target, rows, manifest, tmp_path: Path, capsys) -> None:
    capture(target, rows, tmp_path / "whole", manifest, progress=False)
    folder, shards = tmp_path / "store", manifest["shards"]
    assert len(shards) >= 3
    target.left = 4 + len(shards[0]["rows"]) + 1  # four to estimate the time, the first shard, a row of the second
    with pytest.raises(RuntimeError, match="killed"):
        capture(target, rows, folder, manifest, progress=False)
    assert [path.name for path in sorted(folder.glob("features-*"))] == ["features-00000.safetensors"]
    (folder / "features-00001.safetensors.partial").write_bytes(b"half")
    half = FeatureStore(folder)
    with pytest.raises(ValueError, match="the same `headstart distill capture` command makes shards that are missing"):
        half.check_rows(rows, half.made_with())
    first = (folder / "features-00000.safetensors").stat().st_mtime_ns
    target.left = 10**9
    capsys.readouterr()
    assert capture(target, rows, folder, manifest, progress=False) == manifest["tokens"] - shards[0]["tokens"]
    assert f"1 of {len(shards)} shards are there already" in capsys.readouterr().err
    assert (folder / "features-00000.safetensors").stat().st_mtime_ns == first
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }
    target.left = 0
    assert capture(target, rows, folder, manifest, progress=False) == 0
    assert f"all {len(shards)} shards are there already" in capsys.readouterr().err


def test_folder_of_other_features_or_other_files_is_refused(target, rows, manifest, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    capture(target, rows, folder, manifest, progress=False)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    fewer = {**manifest, "rows": 3}
    with pytest.raises(ValueError, match="holds other features, which differ in rows: 9 there, 3 now"):
        capture(target, rows, folder, fewer, progress=False)
    other = {**manifest, "made_from": {**manifest["made_from"], "weights": "sha256:other"}}
    with pytest.raises(ValueError, match=r"differ in weights: 'sha256:\w+' there, 'sha256:other' now"):
        capture(target, rows, folder, other, progress=False)
    assert before == {p.name: p.read_bytes() for p in folder.iterdir()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"must be empty or hold stored features, but holds thesis.tex"):
        capture(target, rows, tmp_path / "mine", manifest, progress=False)


def test_disk_without_room_is_refused_before_anything_is_written(
    target, rows, manifest, tmp_path: Path, monkeypatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(ValueError, match=r"must have room for 0.000 GB .* but 0.000 GB are free"):
        capture(target, rows, tmp_path / "store", manifest, progress=False)
    assert not list((tmp_path / "store").iterdir())


def test_layer_that_the_target_lacks_is_refused_before_anything_is_written(
    target, rows, tokenizer, tmp_path: Path
) -> None:
    wrong = make_manifest(target_identity(target, tokenizer, "llama", None), ("final", 7), rows, 12)
    with pytest.raises(ValueError, match="block numbers from 0 to 1"):
        capture(target, rows, tmp_path / "store", wrong, progress=False)
    assert not list((tmp_path / "store").iterdir())


def test_layers_hold_the_final_state_first_and_each_once() -> None:
    assert read_layers("1, 14,final,1") == ("final", 1, 14)
    for text in ("1,-1", "all", "", "1,,2"):
        with pytest.raises(ValueError, match="layers must be block numbers from 0 up and `final`"):
            read_layers(text)


def test_data_files_of_folders_are_told_apart_by_their_bytes(tmp_path: Path, data: Path) -> None:
    before = data_fingerprints([str(data), "owner/name"])
    (tmp_path / "shards").mkdir()
    shutil.copy(data, tmp_path / "shards" / "answers.jsonl")
    assert data_fingerprints([str(tmp_path / "shards"), "owner/name"]) == before
    data.write_text("{}\n", encoding="utf-8")
    assert data_fingerprints([str(data)])[0][1] != before[0][1] and before[1] == ["owner/name", "Hub"]


def test_command_captures_and_goes_on(target, tokenizer, data: Path, tmp_path: Path, capsys) -> None:
    model, folder = tmp_path / "model", tmp_path / "store"
    target.model.save_pretrained(model)
    tokenizer.save_pretrained(model)
    words = ["distill", "capture", "--target", str(model), "--data", str(data), "--out", str(folder)]
    words += ["--layers", "final,1", "--max_length", "5"]
    assert main(words) == 0
    store = FeatureStore(folder)
    assert store.layers == ("final", 1) and store.manifest["max_length"] == 5
    assert store.check_rows(load_dataset(data, tokenizer, 5).rows, {}) == 0
    assert "the features are in" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    told = capsys.readouterr()
    counts = json.loads(told.out)
    assert "are there already" in told.err and counts["tokens_read"] == 0
    assert counts["tokens"] == store.manifest["tokens"] and counts["layers"] == ["final", 1]
    assert main([*words, "--layers", "0"]) == 1
    assert "layers: ['final', 1] there, ['final', 0] now" in capsys.readouterr().err
    (folder / MANIFEST).unlink()
    assert main(words) == 1 and "must be empty" in capsys.readouterr().err
