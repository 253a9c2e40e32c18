"""A store gives back what was put in, and is refused for any target, layers or rows but its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_targets import FAMILIES, make_model, tiny_target

from headstart.distill.dataset import TokenRow
from headstart.distill.store import (
    MANIFEST,
    FeatureStore,
    make_manifest,
    row_key,
    target_identity,
    write_manifest,
    write_shard,
)
from headstart.inference.target import Target

LAYERS, WIDTH = ("final", 1), 32


def row_of(name: str, *tokens: int) -> TokenRow:
    ids = np.array(tokens, dtype=np.int32)
    return TokenRow(name, ids, np.ones(len(ids), dtype=bool))


ROWS = [row_of("a", 1, 2, 3), row_of("b", 4, 5), row_of("c", 1, 2, 3), row_of("d", 6, 7, 8, 9), row_of("e", 3)]


@pytest.fixture
def identity(tokenizer) -> dict[str, Any]:
    return target_identity(tiny_target("llama"), tokenizer, "folder/llama", None)


@pytest.fixture
def store(tmp_path: Path, identity) -> tuple[Path, torch.Tensor]:
    """Return the folder of a store of two shards, and the states of all its positions."""
    manifest = make_manifest(identity, LAYERS, ROWS, tokens_per_shard=5, max_length=9)
    states = torch.randn(10, len(LAYERS), WIDTH, dtype=torch.float64)
    write_manifest(tmp_path, manifest)
    write_shard(tmp_path, manifest, "features-00000.safetensors", states[:5])
    write_shard(tmp_path, manifest, "features-00001.safetensors", states[5:])
    return tmp_path, states


def test_rows_are_found_by_their_tokens_and_stored_once(store) -> None:
    folder, states = store
    found = FeatureStore(folder)
    assert found.layers == LAYERS and found.manifest["rows"] == 4 and found.manifest["tokens"] == 10
    for row, begin, end in zip(ROWS, (0, 3, 0, 5, 9), (3, 5, 3, 9, 10), strict=True):
        assert torch.equal(found.row(row_key(row)), states[begin:end])


def test_whoever_may_read_the_manifest_may_read_the_shards(store) -> None:
    assert len({path.stat().st_mode for path in store[0].iterdir()}) == 1


def test_shards_take_whole_rows_until_they_are_full(identity) -> None:
    for size, counts in ((1, [1, 1, 1, 1]), (5, [2, 2]), (6, [3, 1]), (100, [4])):
        shards = make_manifest(identity, LAYERS, ROWS, size)["shards"]
        assert [len(shard["rows"]) for shard in shards] == counts
        assert sum(shard["tokens"] for shard in shards) == 10


def test_another_target_is_refused_with_both_sides_named(store, tokenizer) -> None:
    other = Target(copy.deepcopy(tiny_target("llama").model))
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    changed = target_identity(other, tokenizer, "folder/tuned", None)
    found = FeatureStore(store[0])
    with pytest.raises(ValueError, match=r"of the target folder/tuned, but they were made from folder/llama and differ "
                                         r"in weights: 'sha256:\w+' there, 'sha256:\w+' now"):  # fmt: skip
        found.check_target(changed)
    narrow = Target(copy.deepcopy(tiny_target("llama").model).float())
    with pytest.raises(ValueError, match="dtype: 'float64' there, 'float32' now"):
        found.check_target(target_identity(narrow, tokenizer, "folder/llama", None))
    bigger = Target(make_model(FAMILIES["llama"][0], FAMILIES["llama"][1] | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match="config: 'sha256"):
        found.check_target(target_identity(bigger, tokenizer, "folder/llama", None))


def test_same_target_under_another_name_is_accepted(store, tokenizer) -> None:
    FeatureStore(store[0]).check_target(target_identity(tiny_target("llama"), tokenizer, "moved", "main"))


def test_missing_layer_and_missing_rows_are_named_with_what_there_is(store) -> None:
    found = FeatureStore(store[0])
    found.check_layers((1, "final", 1))
    made = found.made_with()
    found.check_rows(ROWS, made)
    found.check_origin([ROWS[0], row_of("cut", 1, 2)], made)
    with pytest.raises(ValueError, match=r"must hold layers 0, which .* holds final, 1; .* --layers final,1,0"):
        found.check_layers((0, 1))
    now = {**made, "max_length": 2}
    with pytest.raises(ValueError, match=r"1 of 2 are not there .*the first: cut\); it was .*_length: 9 there, 2 now"):
        found.check_rows([ROWS[0], row_of("cut", 1, 2)], now)
    with pytest.raises(ValueError, match=r"not one is there with the same tokens; .*: max_length: 9 there, 2 now"):
        found.check_origin([row_of("cut", 1, 2)], now)


def test_rows_of_a_shard_that_is_missing_damaged_or_foreign_are_not_there(store) -> None:
    folder, states = store
    shard = folder / "features-00001.safetensors"
    whole = shard.read_bytes()
    save_file({"states": states[5:]}, str(shard), {"store": "sha256:another"})
    foreign = shard.read_bytes()
    for content in (None, whole[:-8], whole[:5], foreign):
        shard.unlink() if content is None else shard.write_bytes(content)
        found = FeatureStore(folder)
        assert found.absent == 1 and [row.id for row in ROWS if row_key(row) not in found] == ["d", "e"]
        assert found.check_rows(ROWS, {}, make=True) == 2
        with pytest.raises(ValueError, match=r"2 of 5 are not there .* 1 of its 2 shards are missing or not whole"):
            found.check_rows(ROWS, found.made_with())
        found.check_origin(ROWS[3:], found.made_with())
    shard.write_bytes(whole)
    assert FeatureStore(folder).row(row_key(ROWS[4])).shape == (1, 2, WIDTH)


@pytest.mark.parametrize("delete", [True, False])
def test_shards_are_let_go_of_when_all_their_rows_are_done(store, delete: bool) -> None:
    folder, states = store
    found = FeatureStore(folder)
    keys = [row_key(row) for row in ROWS]
    assert torch.equal(found.row(keys[3]), states[5:9])
    assert found.release(keys[:1] + keys[3:4], delete) == 0
    assert found.release(keys[3:], delete) == 1 and found.release(keys[3:], delete) == 0
    assert [key in found for key in keys] == [True] * 3 + [False] * 2
    assert torch.equal(found.row(keys[1]), states[3:5])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["features-00000.safetensors", *([] if delete else ["features-00001.safetensors"]), MANIFEST]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "must hold stored features"),
        ("{", "must be JSON"),
        ('{"headstart": "answers", "version": 1}', "describes answers of version 1"),
        ('{"headstart": "features", "version": 99}', "describes features of version 99"),
        ("[]", "describes None"),
    ],
)
def test_folder_that_is_no_store_is_told_by_what_it_is(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / MANIFEST).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=complaint):
        FeatureStore(tmp_path)


def test_manifest_says_what_was_made_from_what(store, identity) -> None:
    manifest = json.loads((store[0] / MANIFEST).read_text(encoding="utf-8"))
    assert manifest["made_from"] == identity and manifest["layers"] == ["final", 1] and manifest["max_length"] == 9
    assert all(identity[key].startswith("sha256:") for key in ("config", "weights", "tokenizer", "chat_template"))
    assert [row[1:] for shard in manifest["shards"] for row in shard["rows"]] == [
        ["a", 0, 3],
        ["b", 3, 2],
        ["d", 0, 4],
        ["e", 4, 1],
    ]
