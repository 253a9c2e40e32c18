"""A saved target and a saved drafter for it, fresh copies for each test to damage; and a lid on the memory."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_targets import VOCAB, tiny_target
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from headstart.drafters.registry import new_drafter

ROOM = 2 * 2**30
"""Bytes that a test with the lid on may map beyond what the process had."""


@pytest.fixture(scope="session")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    target = tiny_target("llama")
    target.model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    new_drafter("medusa", target, torch.arange(0, VOCAB, 2), num_heads=2).save_pretrained(folder / "drafter")
    return folder


@pytest.fixture
def target_folder(saved_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_once / "target", tmp_path / "target"))


@pytest.fixture
def drafter_folder(saved_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_once / "drafter", tmp_path / "drafter"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
def lid() -> Iterator[None]:
    """Bound the memory of the process, so that a huge allocation fails instead of succeeding unseen."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("needs Linux to know how much memory is mapped")
    mapped = int(status.read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
