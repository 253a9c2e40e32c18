"""A word-level tokenizer as large as the tiny targets' vocabulary, with a ChatML template."""

from __future__ import annotations

from functools import cache

from tiny_targets import VOCAB
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = ["user", "assistant", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer; every id below V is a word."""
    words = [*SPECIAL, *WORDS]
    words += [f"w{i}" for i in range(len(words), VOCAB)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
