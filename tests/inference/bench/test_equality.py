import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from headstart.inference.bench.methods import Decoding, Engine
from headstart.inference.bench.prompts import BenchPrompt

SCRIPT = Path(__file__).parents[3] / "scripts" / "equality.py"


@pytest.fixture(scope="module")
def equality() -> ModuleType:
    spec = importlib.util.spec_from_file_location("equality_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "equality_script", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def words_of(saved, tmp_path):
    return [
        "equality.py", "--target", str(saved["target"]), "--drafter", str(saved["heads"]), "--prompts",
        str(saved["prompts"]), "--out", str(tmp_path / "out" / "equality.jsonl"), "--max_new_tokens", "6",
    ]  # fmt: skip


def run(equality, words, monkeypatch):
    monkeypatch.setattr("sys.argv", words)
    return equality.main()


def test_drafter_that_keeps_its_promise_passes_and_resumes(equality, words_of, monkeypatch, tmp_path, capsys):
    assert run(equality, words_of, monkeypatch) == 0
    first = capsys.readouterr().out
    out = tmp_path / "out" / "equality.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 9, "a header, and one chunk of each part"
    out.write_bytes(b"".join(lines[:-2]) + lines[-2][:40])  # a crash tore the last but one line
    assert run(equality, words_of, monkeypatch) == 0
    assert capsys.readouterr().out == first and out.read_bytes() == b"".join(lines)


def test_results_of_other_settings_are_not_mixed(equality, words_of, monkeypatch):
    run(equality, words_of, monkeypatch)
    with pytest.raises(ValueError, match="differs in max_new_tokens"):
        run(equality, [*words_of, "--max_new_tokens", "5"], monkeypatch)


def test_difference_that_is_no_tie_fails(equality, words_of, monkeypatch, tmp_path, capsys):
    run(equality, words_of, monkeypatch)
    out = tmp_path / "out" / "equality.jsonl"
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    found = {"prompt": "82", "position": 1, "token": 4, "reference": 5, "gap": 2e-5, "best": [4, 5], "at_edge": False}
    records[1]["rows"][0]["differences"] = [found | {"tie": True}]
    out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    capsys.readouterr()
    assert run(equality, words_of, monkeypatch) == 0
    assert "2.0e-05 apart: tie" in capsys.readouterr().out
    records[1]["rows"][0]["differences"] = [found | {"tie": False}]
    out.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    assert run(equality, words_of, monkeypatch) == 1
    assert "DIFFERENT" in capsys.readouterr().out


def test_replay_finds_a_wrong_token_and_a_wrong_end(equality, target, drafter, prompts):
    subject = equality.Subject(target, Engine(target, drafter, "drafter"), Decoding(8, (63,), 0))
    prompt = BenchPrompt("p", "", "", prompts[0])
    text = subject.engine.run([prompts[0]], subject.greedy, [0]).outputs[0]
    assert equality.not_the_argmax(subject, prompt, text) == []
    wrong = [*text[:3], (text[3] + 1) % 63, *text[4:]]
    found = equality.not_the_argmax(subject, prompt, wrong)
    assert found[0].position == 3 and found[0].tie is False and found[0].best[0] == text[3]
    early = equality.not_the_argmax(subject, prompt, text[:5])
    assert [(one.position, one.tie) for one in early] == [(5, False)]


def test_same_weights_have_the_same_fingerprint(equality, drafter):
    first = equality.fingerprint(drafter)
    assert equality.fingerprint(drafter) == first
    drafter.linear.weight.data[0, 0] += 1
    assert equality.fingerprint(drafter) != first
