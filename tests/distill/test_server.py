"""What a server is told and what is told of it: keys, models, URLs, a process of ours that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from completions_server import CompletionsServer, Trouble
from tiny_targets import tiny_target
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from headstart.cli import main
from headstart.distill.protocol import retry_after
from headstart.distill.select import read_answers
from headstart.distill.server import KEY_VARIABLE, Server
from headstart.inference.loading import load_target
from headstart.inference.target import Target

EOS = 5


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def opened(served: CompletionsServer, url: str = "", model: str | None = None) -> Server:
    return Server(url or served.url, model, "my-model", served.tokenizer, first_wait=0.001)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://user:secret@127.0.0.1:1/v1", f"hold no password; put the server's key into .* {KEY_VARIABLE}"),
        ("127.0.0.1:8000/v1", "must be a URL like http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:1/v1", r"gave no answer in 4 tries \(ConnectError"),
    ],
)
def test_server_that_cannot_be_asked_is_told_by_what_is_wrong(
    tokenizer: PreTrainedTokenizerBase, url: str, told: str
) -> None:
    with pytest.raises((ValueError, ConnectionError), match=told) as raised:
        Server(url, None, "my-model", tokenizer, first_wait=0.001)
    assert "secret" not in str(raised.value)


def test_model_or_path_that_is_not_there_is_named(target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
    with CompletionsServer(target, tokenizer, EOS) as served:
        with pytest.raises(ValueError, match="must serve the model 'other', but has 'tiny'; name one"):
            opened(served, model="other")
        with pytest.raises(ValueError, match=r"must answer for 'my-model', but says status 404: Not Found"):
            opened(served, served.url.removesuffix("/v1"))
        with opened(served) as server:
            assert server.model == "tiny", "the only one needs no name"


def test_other_models_server_is_found_out_by_its_tokens(target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
    class Other(CompletionsServer):
        def answer(self, path: str, body: dict, text: str | None) -> tuple[int, dict]:
            status, found = super().answer(path, body, text)
            found["usage"]["prompt_tokens"] += 1
            return status, found

    with Other(target, tokenizer, EOS) as served, pytest.raises(ValueError, match=r"reads \d+ tokens where .* has \d+"):
        opened(served)


def test_key_comes_from_the_environment_and_is_told_to_nobody_else(
    target: Target, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompletionsServer(target, tokenizer, EOS, key="right-key") as served:
        monkeypatch.setenv(KEY_VARIABLE, "wrong-key")
        with pytest.raises(ValueError, match=rf"wrong key: Bearer \*\*\*; put the key into .* {KEY_VARIABLE}"):
            opened(served)
        monkeypatch.setenv(KEY_VARIABLE, "right-key")
        with opened(served) as server:
            assert "right-key" not in json.dumps(server.description())


def test_time_that_a_server_asks_for_is_a_number_or_a_date() -> None:
    assert [retry_after(value) for value in (None, "", "2.5", "soon", "-3", "1e9")] == [0, 0, 2.5, 0, 0, 600]
    assert retry_after("Fri, 31 Dec 1999 23:59:59 GMT") == 0
    assert retry_after("Fri, 31 Dec 2199 23:59:59 GMT") == 600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save a target that the command can be given, and prompts."""
    target = tiny_target("llama").model
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    rows = [json.dumps({"id": f"p{i:02}", "prompt": f"one w{20 + i}"}) + "\n" for i in range(24)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    return tmp_path


def words(folder: Path, served: CompletionsServer, out: str) -> list[str]:
    made = ["distill", "--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    made += ["--server", served.url, "--out", str(folder / out)]
    return [*made, "--requests_in_flight", "3", "--max_new_tokens", "6"]


def rows_of(folder: Path) -> list[dict]:
    return list(read_answers([folder])[1]) if list(folder.glob("answers-*.jsonl")) else []


def test_command_asks_a_server_and_says_what_has_no_effect(
    target: Target, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with CompletionsServer(target, tiny_tokenizer(), 2) as served:
        assert main([*words(folder, served, "a"), "--json"]) == 0
        counts = json.loads(capsys.readouterr().out)
        assert (counts["answered"], counts["too_long"], counts["found"]) == (24, 0, 0)
        assert main([*words(folder, served, "a"), "--dtype", "float32"]) == 2
        assert "--dtype has no effect with --server" in capsys.readouterr().err
    assert main(["distill", "--target", str(folder / "target"), "--out", "x", "--server_model", "y"]) == 2
    assert "--server_model has no effect without --server" in capsys.readouterr().err
    assert main(words(folder, served, "b")) == 1
    assert f"{served.url} gave no answer in 4 tries" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_client_loses_repeats_and_changes_nothing(folder: Path) -> None:
    target = Target(load_target(str(folder / "target"), device="cpu")[0])
    slowly = Trouble(seconds=0.1)
    with CompletionsServer(target, tiny_tokenizer(), 2, trouble=lambda _n, _b: slowly) as served:
        assert main(words(folder, served, "whole")) == 0
        command = [sys.executable, "-m", "headstart.cli", *words(folder, served, "killed")]
        for kills in range(4):
            before = len(rows_of(folder / "killed"))
            life = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            while kills < 3 and len(rows_of(folder / "killed")) == before and life.poll() is None:
                time.sleep(0.01)
            if kills < 3:
                os.kill(life.pid, signal.SIGKILL)
            assert life.wait() == (-signal.SIGKILL if kills < 3 else 0)
            assert len(rows_of(folder / "killed")) > before
    found = rows_of(folder / "killed")
    assert found == rows_of(folder / "whole"), "each once, in the same order"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"])
def test_stopped_client_keeps_what_is_finished(folder: Path, number: signal.Signals, status: int) -> None:
    target = Target(load_target(str(folder / "target"), device="cpu")[0])

    def endless(asked: int, _body: dict) -> Trouble | None:
        return Trouble(seconds=5) if asked in (1, 9) else None

    with CompletionsServer(target, tiny_tokenizer(), 2, trouble=endless) as served:
        command = [sys.executable, "-m", "headstart.cli", *words(folder, served, "stopped")]
        life = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_hear)
        while len(served.bodies) < 10:
            time.sleep(0.01)
        life.send_signal(number)
        told = life.communicate()[1]
    assert life.returncode == status
    found = len(rows_of(folder / "stopped"))
    assert found >= 7 and f"{found} of 24 answers were made and are safe" in told


def _hear() -> None:
    """Hear Ctrl-C even where the tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
