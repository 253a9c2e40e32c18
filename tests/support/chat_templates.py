"""Chat templates in the styles of the common families, and byte-level and unigram tokenizers that wear them."""

from __future__ import annotations

from itertools import groupby

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from headstart.core.prompts import RenderedRow

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'].strip() }}{{ eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (  # earlier turns lose their thinking; the last one always shows a block, empty or not
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set parts = m['content'].split('</think>') %}"
    "{% set thought = m['reasoning_content'] if m['reasoning_content'] is defined else "
    "(parts[0].split('<think>')[-1] if parts | length > 1 else '') %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # opens the thinking itself, drops it from every turn
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{% if m['tool_calls'] is defined %}{% for c in m['tool_calls'] %}<tool_call>\n"
    "{{ c['function'] | tojson }}\n</tool_call>{% endfor %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# style: template, BOS, EOS, what ends an assistant turn
STYLES = {
    "chatml": (CHATML, "<|im_start|>", "<|im_end|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<s>", "<|eot_id|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<s>", "</s>", "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>", "</s>"),
    "phi3": (PHI3, "<s>", "</s>", "<|end|>"),
    "qwen3": (QWEN3, None, "<|im_end|>", "<|im_end|>"),
    "deepseek": (DEEPSEEK, "<s>", "</s>", "</s>"),
}
SPECIAL = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|end|>",
    "<|User|>", "<|Assistant|>",
]  # fmt: skip
TEXT = [
    "Hello there, how are you today?\n\nI am fine, thank you.\n",
    "the answer is 42. 42 is the answer",
    "user\nassistant\nmodel",
]


def byte_level(template: str | None = None, bos: str | None = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A byte-level BPE, as Llama-3, Qwen and SmolLM2 have; leaves white space out of its offsets."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return wrap(core, template, bos, eos)


def sentence_piece(template: str | None = None, bos: str | None = "<s>", eos: str = "</s>") -> PreTrainedTokenizerFast:
    """A unigram model over "▁" words, as the first Mistral and Llama models have; it adds BOS by itself."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    alphabet = sorted(set("".join(TEXT)) | set("abcdefghijklmnopqrstuvwxyzT<>/|[]"))
    core.train_from_iterator(
        TEXT,
        trainers.UnigramTrainer(
            vocab_size=120,
            special_tokens=["<unk>", *SPECIAL],
            unk_token="<unk>",
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return wrap(core, template, bos, eos)


def wrap(core: Tokenizer, template: str | None, bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> list[dict]:
    """Return messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def trained_runs(tokenizer: PreTrainedTokenizerBase, row: RenderedRow) -> list[str]:
    """Return the text of each run of trained tokens."""
    assert len(row.input_ids) == len(row.loss_mask)
    runs = groupby(zip(row.input_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([i for i, _ in run])) for trained, run in runs if trained]
