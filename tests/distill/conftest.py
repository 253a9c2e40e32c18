"""A word-level tokenizer with a ChatML template: small enough to read token by token."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "one", "two", "three", "four", "plus", "is"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
