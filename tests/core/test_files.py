"""Written files can be read by whom the umask lets, whatever library wrote them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headstart.core.files import give_usual_mode


@pytest.fixture(params=[0o022, 0o007, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_file_gets_the_mode_that_open_would_have_given_it(tmp_path: Path, umask: int) -> None:
    plain, tensors = tmp_path / "plain", tmp_path / "tensors"
    plain.write_text("as usual", encoding="utf-8")
    save_file({"a": torch.zeros(2)}, tensors)
    tensors.chmod(0o600)
    give_usual_mode(tensors)
    assert tensors.stat().st_mode == plain.stat().st_mode
    (tmp_path / "later").touch()
    assert (tmp_path / "later").stat().st_mode == plain.stat().st_mode, "the umask itself is as it was"
