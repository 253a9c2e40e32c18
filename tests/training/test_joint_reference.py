"""Joint training of a real model: a few steps, a small change, and the same text with and without the drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headstart import attach
from headstart.core.prompts import render_prompt
from headstart.inference.loading import load_target
from headstart.training.run import run

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / ".cache" / "smollm2-135m-instruct"
PROMPTS = ("What is the capital of France?", "Name three fruits.")


@pytest.mark.slow
@pytest.mark.skipif(not REFERENCE.is_dir(), reason="make it with scripts/reference_target.py")
def test_reference_target_learns_a_little_and_its_drafter_says_the_same(tmp_path: Path) -> None:
    flags = [
        "--config",
        str(ROOT / "configs" / "medusa2.yaml"),
        "--target",
        str(REFERENCE),
        "--output_dir",
        str(tmp_path),
    ]
    flags += ["--train_data", str(ROOT / "distill" / "data" / "smollm2_answers.jsonl.gz"), "--max_length", "160"]
    flags += ["--target_dtype", "float32", "--bf16", "false", "--max_steps", "4", "--drafter_only_steps", "2"]
    flags += ["--eval_strategy", "no", "--eval_prompts", "2", "--eval_new_tokens", "16", "--held_out_fraction", "0.01"]
    flags += ["--gradient_accumulation_steps", "1", "--report_to", "none", "--merge_adapter", "true"]
    folder = run("medusa", flags)
    report = json.loads((folder / "target_change.json").read_text(encoding="utf-8"))
    assert 0 < report["kl"] < 0.1 and report["agreement"] > 0.85
    assert report["perplexity_after"] < 1.1 * report["perplexity_before"]

    model, tokenizer = load_target(str(REFERENCE), "float32")
    prompts = [torch.tensor([render_prompt(tokenizer, [{"role": "user", "content": text}])]) for text in PROMPTS]

    def said(speaker) -> list[list[int]]:
        return [
            speaker.generate(p, attention_mask=torch.ones_like(p), max_new_tokens=32, do_sample=False)[0].tolist()
            for p in prompts
        ]

    original = said(model)
    fast = attach(model, folder, apply_adapter=True)
    assert said(fast) == said(model)
    assert said(fast.detach()) == original
    merged, _ = load_target(str(folder / "target"), "float32")
    assert said(attach(merged, folder)) == said(merged)
