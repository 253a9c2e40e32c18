"""The tokenizer of the tiny targets, a copy for each test: tests may add tokens to it."""

from __future__ import annotations

from copy import deepcopy

import pytest
from tiny_tokenizer import tiny_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return deepcopy(tiny_tokenizer())
