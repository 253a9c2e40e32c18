"""Short rows that share a sequence give what they give each in its own: states, losses, gradients, and a whole run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_processes as several
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_batches import scrambled
from tiny_joint import gradients, joint_module
from tiny_targets import FAMILIES, VOCAB, make_model
from torch import Tensor

from headstart.cli import main as headstart
from headstart.distill.capture import capture
from headstart.distill.dataset import Collator, DatasetReport, TokenRow
from headstart.distill.store import FeatureStore, make_manifest
from headstart.drafters.base import Drafter
from headstart.drafters.registry import METHODS, new_drafter
from headstart.inference.target import Target
from headstart.training.batches import PaddableRows, StepSampler, packed
from headstart.training.features import FeatureSource, KeptRows, KeyedCollator
from headstart.training.run import run
from headstart.training.start_report import positions_of

LENGTHS = (9, 4, 12, 3, 7, 5, 10, 6)
TRAINED = (6, 2, 8, 1, 0, 3, 5, 4)
LAYERS = ("final", 0, 1)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {method: (method, {}) for method in METHODS} | {
    "eagle": ("eagle", {"feature_noise": 0.0}),  # noise is drawn anew for every batch
    "eagle, harmonised": ("eagle", {"feature_noise": 0.0, "harmonised_steps": 3, "top_k_weight": 1.0}),
    "eagle3, hard labels": ("eagle3", {"loss": "ce", "ttt_steps": 3}),
    "hydra++": ("hydra", {"prefix_attention": True, "num_layers": 2}),
    "mlp, own weights for every step": ("mlp", {"tie_weights": False, "embedding": "own"}),
}


@pytest.fixture(scope="module")
def rows() -> PaddableRows:
    draw = torch.Generator().manual_seed(2)
    made = []
    for i, (length, trained) in enumerate(zip(LENGTHS, TRAINED, strict=True)):
        tokens = torch.randint(1, VOCAB, (length,), generator=draw).numpy().astype(np.int32)
        made.append(TokenRow(f"r{i}", tokens, np.arange(length) >= length - trained))
    return PaddableRows(made, DatasetReport())


def batches_of(rows: PaddableRows, packed_length: int | None, even: bool = False) -> list[dict[str, Tensor]]:
    """Return the batches of one step of all rows, four a batch."""
    entries = list(StepSampler(LENGTHS, len(rows), 0, batch_size=4, packed_length=packed_length))
    collate = KeyedCollator(Collator(0, even))
    return [collate([rows[entry] for entry in entries[begin : begin + 4]]) for begin in (0, 4)]


def single(family: str) -> Target:
    """Return a target in float32."""
    return Target(make_model(*FAMILIES[family]).float().requires_grad_(False))


@pytest.fixture(scope="module")
def llama() -> Target:
    return single("llama")


@pytest.fixture(scope="module")
def stored(llama: Target, rows: PaddableRows, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("store")
    capture(llama, rows.rows, folder, make_manifest({}, LAYERS, rows.rows, 20), progress=False)
    return FeatureStore(folder)


def source_of(kind: str, target: Target, drafter: Drafter, stored: FeatureStore | None) -> FeatureSource:
    layers = drafter.feature_layers
    if kind == "stored":
        assert stored is not None
        return FeatureSource(target, layers, kept=KeptRows(target, stored.layers, 0, stored))
    return FeatureSource(target, layers, 10**9 if kind == "kept" else 0)


def learnt(drafter: Drafter, target: Target, source: FeatureSource, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the loss of a step, its sums, labels and hits by depth, and the gradients."""
    drafter.zero_grad()
    items = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum()
    out = [drafter(source(batch), target, items) for batch in batches]
    loss = torch.stack([one.loss for one in out]).sum()
    loss.backward()
    by_depth = {name: torch.stack([one[name] for one in out]).sum(0) for name in ("sums", "counts", "hits")}
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return {"items": items, "loss": loss.detach(), **by_depth, **gradients}


@pytest.mark.parametrize("kind", ["fresh", "kept", "stored"])
@pytest.mark.parametrize("case", sorted(SETTINGS))
def test_packed_rows_give_the_loss_and_the_gradients_of_padded_ones(
    case: str, kind: str, llama: Target, rows: PaddableRows, stored: FeatureStore
) -> None:
    method, settings = SETTINGS[case]
    torch.manual_seed(6)
    drafter = scrambled(new_drafter(method, llama, **settings)).float().train()
    padded, together = batches_of(rows, None), batches_of(rows, 24)
    assert all("segments" in batch and len(batch["tokens"]) < 4 for batch in together)
    wanted = learnt(drafter, llama, source_of(kind, llama, drafter, stored), padded)
    found = learnt(drafter, llama, source_of(kind, llama, drafter, stored), together)
    assert wanted.keys() == found.keys() and wanted["items"] == sum(TRAINED)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_target_yields_the_states_of_a_packed_row_that_it_yields_of_the_row_alone(
    family: str, rows: PaddableRows
) -> None:
    target, collate = single(family), KeyedCollator(Collator(0, even=True))
    source = FeatureSource(target, LAYERS)
    alone = {int(one["row_keys"]): source(one) for one in (collate([row]) for row in rows.rows)}
    for inputs in batches_of(rows, 24, even=True):
        batch, mask = source(inputs), inputs["token_mask"]
        wanted = [alone[key] for key in inputs["row_keys"].tolist()]
        for name in ("features", "final"):
            one_by_one = torch.cat([getattr(b, name)[b.token_mask] for b in wanted])
            torch.testing.assert_close(getattr(batch, name)[mask], one_by_one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["kept", "stored"])
def test_kept_states_are_those_of_the_rows_read_alone_to_the_bit(
    kind: str, llama: Target, rows: PaddableRows, stored: FeatureStore
) -> None:
    kept = KeptRows(llama, LAYERS, 10**9, stored if kind == "stored" else None)
    source = FeatureSource(llama, LAYERS, kept=kept)
    padded = {
        key: states[mask]
        for inputs in batches_of(rows, None)
        for key, states, mask in zip(
            inputs["row_keys"].tolist(), source(inputs).features, inputs["token_mask"], strict=True
        )
    }
    for inputs in batches_of(rows, 24):
        found = source(inputs).features
        assert torch.equal(found[inputs["token_mask"]], torch.cat([padded[key] for key in inputs["row_keys"].tolist()]))
        assert not found[~inputs["token_mask"]].any()


@pytest.mark.parametrize("target_loss", ["kl", "ce"])
def test_target_that_learns_beside_its_drafter_learns_the_same_from_packed_rows(
    rows: PaddableRows, target_loss: str
) -> None:
    joint = joint_module("hydra", disturb=0.1, target_loss=target_loss).train()
    found = []
    for batches in (batches_of(rows, None), batches_of(rows, 24)):
        joint.zero_grad()
        out = [joint(batch, joint.changes.target, torch.tensor(sum(TRAINED))) for batch in batches]
        torch.stack([one.loss for one in out]).sum().backward()
        found.append(gradients(joint) | {"target": torch.stack([one.target_sum for one in out]).sum()})
    assert found[0].keys() == found[1].keys() and any("lora" in name for name in found[0])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, msg=lambda text, name=name: name + text)


def test_positions_and_segments_of_rows_that_share_a_sequence(rows: PaddableRows) -> None:
    first, second, third = rows.rows[1], rows.rows[3], rows.rows[5]
    batch = Collator(9)([[first, second], [third], []])
    assert batch["tokens"].tolist() == [
        [*first.input_ids.tolist(), *second.input_ids.tolist()],
        [*third.input_ids.tolist(), 9, 9],
    ]
    assert batch["token_mask"].tolist() == [[True] * 7, [True] * 5 + [False] * 2]
    assert batch["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 0]]
    assert batch["segments"].tolist() == [[0] * 4 + [1] * 3, [0] * 7]
    assert batch["loss_mask"].tolist() == [
        [*first.loss_mask.tolist(), *second.loss_mask.tolist()],
        [*third.loss_mask.tolist(), False, False],
    ]


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(400, 900),
    st.integers(0, 8),
)
def test_rows_of_a_step_are_dealt_out_whole_and_never_to_more_positions_than_one_by_one(
    lengths: list[int], batch_size: int, packed_length: int, fillers: int
) -> None:
    step = [*range(len(lengths)), *[~int(np.argmin(lengths))] * fillers]
    entries = list(packed(step, lengths, batch_size, packed_length))
    assert len(entries) == len(step)
    dealt = [index for entry in entries for index in entry]
    batches = [entries[begin : begin + batch_size] for begin in range(0, len(step), batch_size)]
    assert Counter(i for i in dealt if i >= 0) == Counter(range(len(lengths))), "every row once"
    assert len(dealt) - len(lengths) == max(0, len(batches) - len(lengths)), "no more fillers than batches are empty"
    assert all(any(batch) for batch in batches)
    assert all(sum(lengths[i if i >= 0 else ~i] for i in entry) <= packed_length for entry in entries)
    by_length = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    alone = [by_length[begin : begin + batch_size] for begin in range(0, len(lengths), batch_size)]
    if not fillers:
        together, apart = (sum(positions_of(batch, lengths) for batch in dealt) for dealt in (batches, alone))
        assert together <= apart


def test_short_rows_share_sequences_of_about_the_same_length() -> None:
    lengths = [300, 40, 200, 100, 60, 250, 50, 150, 90, 110, 70, 180, 30, 20, 120, 230]
    entries = list(packed(range(16), lengths, 8, 768))
    totals = [sum(lengths[i] for i in entry) for entry in entries if entry]
    assert max(totals) - min(totals) <= 64 and len(totals) < 8
    assert sum(map(len, map(tuple, entries))) == 16


@pytest.mark.parametrize("strategy", ["group_by_length", "random", "sequential"])
def test_steps_and_number_of_batches_do_not_depend_on_packing(strategy: str) -> None:
    lengths = torch.randint(5, 200, (53,), generator=torch.Generator().manual_seed(0)).tolist()
    plain, together = (
        StepSampler(lengths, 24, 3, 8, strategy, batch_size=4, packed_length=length) for length in (None, 512)
    )
    one, other = list(plain), list(together)
    assert len(one) == len(other) == len(plain) == len(together)
    for begin in range(0, len(one), 24):
        step = {i for i in one[begin : begin + 24] if isinstance(i, int) and i >= 0}
        assert step == {i for entry in other[begin : begin + 24] if isinstance(entry, tuple) for i in entry if i >= 0}


Flags = Callable[..., list[str]]
SHORT = ["--max_steps", "6", "--save_strategy", "steps", "--save_steps", "3", "--eval_strategy", "no"]
SHORT += ["--gradient_accumulation_steps", "2", "--max_length", "64"]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def assert_alike(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=several.TOLERANCE, msg=name)


@pytest.fixture
def features(target_folder: Path, answers_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "features"
    words = ["distill", "capture", "--target", str(target_folder), "--data", str(answers_file), "--out", str(folder)]
    assert headstart([*words, "--max_length", "64"]) == 0
    return folder


def test_packed_run_learns_what_the_padded_one_does_and_says_what_it_saves(
    command: Flags, features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = weights(run("medusa", command(*SHORT, output=tmp_path / "padded")))
    assert "padding       78% of the positions (224 tokens in 1,024 an epoch)" in capsys.readouterr().out
    ways = {"fresh": [], "kept": ["--feature_cache_gb", "1"], "stored": ["--features", str(features)]}
    for name, flags in ways.items():
        folder = run("medusa", command(*SHORT, "--packing", *flags, output=tmp_path / name))
        assert_alike(weights(folder), wanted)
        told = "12% of the positions (224 tokens in 256 an epoch, packed up to 64 tokens a sequence; without packing"
        assert told in capsys.readouterr().out


def halfway(whole: Path, folder: Path) -> Path:
    """Make a run that was stopped at its first checkpoint, within an epoch."""
    shutil.copytree(whole / "checkpoint-3", folder / "checkpoint-3")
    record = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", [[], ["--feature_cache_gb", "1"]], ids=["fresh", "kept"])
def test_packed_run_goes_on_to_the_bit_and_without_packing_in_the_same_place(
    command: Flags, tmp_path: Path, kind: list[str]
) -> None:
    whole = run("medusa", command(*SHORT, "--packing", *kind, output=tmp_path / "whole"))
    halves = halfway(whole, tmp_path / "halves")
    run("medusa", command(*SHORT, "--packing", *kind, output=halves))
    for name, value in weights(whole).items():
        assert torch.equal(weights(halves)[name], value), name
    changed = halfway(whole, tmp_path / "changed")
    run("medusa", command(*SHORT, "--packing", "false", *kind, output=changed))
    assert_alike(weights(changed), weights(whole))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["ddp", "zero2", "zero3", "fsdp2"])
def test_two_processes_with_packed_rows_give_the_drafter_of_one_with_padded_ones(
    command: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind.startswith("zero"):
        pytest.importorskip("deepspeed")
    wanted = weights(run("medusa", command(*SHORT, output=tmp_path / "alone")))
    script = several.ROOT / "training" / "train_medusa.py"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    two = ["--packing", "--streaming", "--gradient_accumulation_steps", "1"]
    done = several.launched(kind, script, *command(*SHORT, *two, output=tmp_path / "together"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packed up to 64 tokens a sequence" in done.stdout and "tokenised rows " in done.stdout
    made = [path.suffix for path in (tmp_path / "cache" / "headstart").iterdir()]
    assert sorted(made) == ["", ".lock"]
    assert_alike(weights(tmp_path / "together"), wanted)
    halves = halfway(tmp_path / "together", tmp_path / "halves")
    done = several.launched(kind, script, *command(*SHORT, *two, output=halves))
    assert done.returncode == 0, done.stdout + done.stderr
    for name, value in weights(tmp_path / "together").items():
        assert torch.equal(weights(halves)[name], value), name
