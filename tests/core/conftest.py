"""Tokenizers with the chat templates of `tests/support/chat_templates.py`, each made once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chat_templates import STYLES, byte_level
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def tokenizers() -> Callable[..., PreTrainedTokenizerFast]:
    """Return a function that gives the tokenizer of a style, byte-level unless told otherwise."""
    built = {}

    def get(style: str, make=byte_level):
        if (style, make) not in built:
            template, bos, eos, _ = STYLES[style]
            built[style, make] = make(template, bos, eos)
        return built[style, make]

    return get
