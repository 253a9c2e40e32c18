"""`headstart doctor` finds what is wrong before a run does, says how to mend it, and asks no network."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from packaging.requirements import Requirement
from transformers import AutoConfig, MambaConfig

from headstart.cli import main
from headstart.training import doctor_machine, doctor_packages, doctor_run
from headstart.training.findings import NOTE, OK, WRONG, failed

Doctor = Callable[..., dict[tuple[str, str], dict[str, str]]]


@pytest.fixture
def doctor(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return a way to run the command without any network: the findings by group and name, and "exit" the status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("no network unless asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)

    def examine(*words: str) -> dict[tuple[str, str], dict[str, str]]:
        code = main(["doctor", *words, "--json"])
        report = json.loads(capsys.readouterr().out)
        wrong = [one for one in report["findings"] if one["status"] == WRONG]
        assert report["ok"] == (not wrong) == (code == 0) and code in (0, 1)
        assert all(one["found"] and (one["remedy"] or one["status"] != WRONG) for one in report["findings"])
        return {(one["group"], one["name"]): one for one in report["findings"]}

    return examine


@pytest.fixture
def own_target(target_folder: Path, tmp_path: Path) -> Path:
    """Return a copy of the target that may be spoiled."""
    return Path(shutil.copytree(target_folder, tmp_path / "own"))


def test_whole_environment_is_looked_at(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor()
    for name in ("python", "torch", "transformers", "accelerate"):
        assert found["packages", name]["status"] == OK and "supported: " in found["packages", name]["found"]
    assert torch.__version__ in found["machine", "torch"]["found"]
    assert found["disk", "output folder"]["found"].startswith("outputs: can be written")
    assert not list(tmp_path.iterdir())  # nothing is made


@pytest.mark.parametrize(("capability", "slow"), [("AVX2", True), ("DEFAULT", True), ("AVX512", False)])
def test_cpu_that_converts_bfloat16_is_told_what_to_take(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, capability: str, slow: bool
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    cpu = doctor()["machine", "cpu"]
    assert cpu["status"] == (NOTE if slow else OK) and ("target_dtype float32" in cpu["remedy"]) == slow
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert doctor()["machine", "cpu"]["status"] == OK


def test_target_and_data_that_fit_are_fine(doctor: Doctor, target_folder: Path, answers_file: Path) -> None:
    found = doctor("--target", str(target_folder), "--data", str(answers_file))
    assert "llama" in found["target", "family"]["found"] and "V=48" in found["target", "family"]["found"]
    assert found["target", "eos"]["found"] == "2 (<|im_end|>)"
    assert found["target", "trained tokens"]["found"].startswith("of a conversation: 2 of 2 answers found")
    assert "20 rows (20 answers" in found["data", answers_file.name]["found"]
    assert {one["status"] for (group, _), one in found.items() if group in ("target", "data")} == {OK}


def test_people_get_a_table_and_the_status_says_whether_anything_is_wrong(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(["doctor", "--data", "nowhere.jsonl"]) == 1
    said = capsys.readouterr().out
    assert "1 wrong: nowhere.jsonl" in said and "wrong  nowhere.jsonl  " in said


def test_tokenizer_larger_than_the_model_is_wrong(doctor: Doctor, own_target: Path) -> None:
    config = json.loads((own_target / "config.json").read_text(encoding="utf-8"))
    (own_target / "config.json").write_text(json.dumps(config | {"vocab_size": 40}), encoding="utf-8")
    found = doctor("--target", str(own_target))
    assert found["target", "tokenizer"]["status"] == WRONG
    assert found["target", "tokenizer"]["found"] == "48 tokens, the model has rows for 40"


@pytest.mark.parametrize("ids, status", [([], NOTE), ([99], WRONG), ([3], NOTE)])
def test_ends_of_answers_that_cannot_be_right_are_told(
    doctor: Doctor, own_target: Path, ids: list[int], status: str
) -> None:
    (own_target / "generation_config.json").write_text(json.dumps({"eos_token_id": ids or None}), encoding="utf-8")
    found = doctor("--target", str(own_target))["target", "eos"]
    assert found["status"] == status and "generation_config.json" in found["remedy"]


def test_target_without_a_template_is_a_note(doctor: Doctor, own_target: Path) -> None:
    (own_target / "chat_template.jinja").unlink()
    assert doctor("--target", str(own_target))["target", "chat template"]["status"] == NOTE


def test_family_that_cannot_verify_trees_is_refused_by_name(doctor: Doctor, own_target: Path) -> None:
    MambaConfig(vocab_size=48, hidden_size=16, num_hidden_layers=1).save_pretrained(own_target)
    found = doctor("--target", str(own_target))["target", "family"]
    assert found["status"] == WRONG and "mamba" in found["found"] and "Llama" in found["remedy"]
    assert AutoConfig.from_pretrained(own_target).model_type == "mamba"


def test_target_that_is_none_is_wrong(doctor: Doctor, tmp_path: Path) -> None:
    assert doctor("--target", "no target at all")["target", "files"]["status"] == WRONG
    (tmp_path / "empty").mkdir()
    assert "config.json" in doctor("--target", "empty")["target", "files"]["found"]


def test_hub_is_asked_when_told_to_and_only_then(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def fetched(name: str, local_files_only: bool, **_: Any) -> str:
        asked.append(not local_files_only)
        raise LocalEntryNotFoundError(name)

    monkeypatch.setattr(doctor_run, "snapshot_download", fetched)
    doctor("--target", "owner/model")
    doctor("--target", "owner/model", "--online")
    assert asked == [False, True]


def test_names_on_the_hub_are_looked_up_in_the_cache(doctor: Doctor) -> None:
    found = doctor("--target", "owner/model", "--data", "owner/data")
    assert found["target", "files"]["status"] == found["data", "data"]["status"] == NOTE
    assert "--online" in found["target", "files"]["remedy"] and "--online" in found["data", "data"]["remedy"]


def test_rows_without_a_trained_token_are_told(doctor: Doctor, target_folder: Path, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt_ids": [1, 5], "answer_ids": ids} for ids in ([4, 2], [])]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = doctor("--target", str(target_folder), "--data", str(data))["data", "data.jsonl"]
    assert found["status"] == NOTE and "dropped 1: no trained token" in found["found"]
    data.write_text(json.dumps(rows[1]), encoding="utf-8")
    found = doctor("--target", str(target_folder), "--data", str(data))["data", "data.jsonl"]
    assert found["status"] == WRONG and "headstart distill" in found["remedy"]


def test_configuration_is_read_as_a_run_would_read_it(
    doctor: Doctor, target_folder: Path, answers_file: Path, tmp_path: Path
) -> None:
    config = tmp_path / "medusa_mine.yaml"
    text = f"target: {target_folder}\ntrain_data: [{answers_file}]\noutput_dir: {tmp_path / 'mine'}\nnum_heads: 3\n"
    config.write_text(text, encoding="utf-8")
    found = doctor("--config", str(config))
    assert found["configuration", config.name]["found"] == "4 settings for medusa, all known"
    assert found["target", "family"]["status"] == found["data", answers_file.name]["status"] == OK
    assert str(tmp_path / "mine") in found["disk", "output folder"]["found"]
    config.write_text("num_heads: 3\n", encoding="utf-8")
    found = doctor("--config", str(config))
    assert found["configuration", "required"]["found"] == "target, train_data, output_dir stand not in it"
    assert ("target", "files") not in found and ("target", "family") not in found


@pytest.mark.parametrize(
    "text, told",
    [
        ("num_haeds: 3", "did you mean num_heads?"),
        ("num_heads: 0", "num_heads"),
        ("metric_for_best_model: tokens_per_step\neval_prompts: 0", "eval_prompts"),
        ("train_target: lora\nfeature_cache_gb: 1", "feature_cache_gb"),
    ],
)
def test_configuration_that_a_run_would_refuse_is_wrong(doctor: Doctor, tmp_path: Path, text: str, told: str) -> None:
    config = tmp_path / "medusa.yaml"
    config.write_text(text, encoding="utf-8")
    found = doctor("--config", str(config))["configuration", "medusa.yaml"]
    assert found["status"] == WRONG and told in f"{found['found']}; {found['remedy']}"


def test_place_that_cannot_be_written_is_wrong(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    found = doctor("--output_dir", "file")["disk", "output folder"]
    assert found["status"] == WRONG and "must be a folder" in found["found"]


def test_versions_outside_the_range_and_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=99", "nosuchpackage>=1", 'nosuchextra>=1; extra == "lora"', 'pytest>=8; extra == "test"', "numpy"]
    monkeypatch.setattr(doctor_packages, "requires", lambda _: lines)
    found = {one.name: one for one in doctor_packages.check_packages()}
    assert found["torch"].status == WRONG and found["torch"].remedy == "pip install 'torch>=99'"
    assert found["nosuchpackage"].status == WRONG and found["nosuchextra"].status == NOTE
    assert found["nosuchextra"].remedy == "pip install 'headstart[lora]'"
    assert found["numpy"].status == OK and "pytest" not in found
    assert Requirement(lines[0]).specifier.contains("99.1")


def test_package_that_breaks_on_import_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "peft_broken.py").write_text("print('hello')\nraise OSError('libcuda.so: not found')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(doctor_machine, "OPTIONAL", ("peft_broken", "json"))
    broken, whole = doctor_machine.check_optional()
    assert broken.status == WRONG and "OSError: libcuda.so: not found" in broken.found and whole.status == OK


def test_environment_that_cannot_import_the_checks_is_told(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("torch and torchvision do not fit")

    monkeypatch.setitem(sys.modules, "headstart.training.doctor_run", Broken("headstart.training.doctor_run"))
    assert main(["doctor"]) == 1
    assert "torch and torchvision do not fit" in " ".join(capsys.readouterr().out.split())


def test_error_is_split_into_what_was_found_and_what_to_do() -> None:
    one = failed("data", "x", ValueError("a must hold; found b; do c"))
    assert (one.found, one.remedy) == ("a must hold; found b", "do c")
    alone = failed("data", "x", ValueError("a must hold"))
    assert alone.found == "a must hold" and alone.remedy == "mend the file, or name another"
