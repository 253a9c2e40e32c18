"""A tiny random target on disk, answers for it, and a way to train on them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 48
WORDS = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", *(f"w{i}" for i in range(VOCAB - 5))]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
FLAGS = ["--report_to", "none", "--disable_tqdm", "true", "--held_out_fraction", "0.2", "--eval_prompts", "2"]
FLAGS += ["--eval_new_tokens", "6", "--num_heads", "2", "--per_device_train_batch_size", "4", "--logging_steps", "1"]
FLAGS += ["--plot", "false"]


@pytest.fixture(autouse=True)
def any_type_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tests that train in bfloat16 warn of it on no machine."""
    monkeypatch.setattr("headstart.training.speedups.bfloat16_is_slow", lambda: False)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def answers_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 rows of unlike lengths: a prompt of 3 to 7 tokens and an answer of 4 to 13."""
    path = tmp_path_factory.mktemp("answers") / "answers-00000.jsonl"
    draw = torch.Generator().manual_seed(1)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, VOCAB - 8, (count,), generator=draw).tolist()

    rows = [
        {"id": f"r{i}", "prompt_ids": [1, *tokens(2 + i % 5)], "answer_ids": [*tokens(3 + i % 10), 2]}
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def command(target_folder: Path, answers_file: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Return the flags of a short run; further ones are appended, so they win."""

    def flags(*more: str, output: Path | None = None) -> list[str]:
        places = ["--target", str(target_folder), "--train_data", str(answers_file)]
        return [*places, "--output_dir", str(output or tmp_path / "run"), *FLAGS, *more]

    return flags
