"""`headstart generate` and `headstart chat`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from ..core import hf
from ..core.prompts import render_prompt
from .attach import AttachedModel, attach
from .loading import DTYPES, load_target, warn_of_other_text

EXAMPLES = {
    "generate": "example: headstart generate --target my-model --drafter my-drafter --prompt 'Why is the sky blue?'",
    "chat": "example: headstart chat --target my-model --drafter my-drafter; in the chat, /new starts over, /quit ends",
}


def main(name: str, argv: list[str]) -> int:
    """Run `generate` or `chat`."""
    options = _parse(name, argv)
    model, tokenizer = load_target(options.target, options.dtype, options.target_revision)
    fast = attach(model, options.drafter)
    warn_of_other_text(fast.drafter, tokenizer)
    if name == "chat":
        return _chat(fast, tokenizer, options)
    return _generate(fast, tokenizer, options)


def _parse(name: str, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"headstart {name}",
        description="Answer with a target and its drafter: the same words, sooner.",
        epilog=EXAMPLES[name],
    )
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--target_revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--drafter", required=True, help="a drafter checkpoint: a folder or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="default: the checkpoint's own")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="longest answer (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default %(default)s)")
    parser.add_argument("--top_p", type=float, default=1.0, help="default %(default)s")
    parser.add_argument("--top_k", type=int, default=0, help="0 looks at every token (default %(default)s)")
    parser.add_argument("--seed", type=int, help="makes a sampled answer repeatable")
    parser.add_argument("--system", help="system message")
    if name == "generate":
        parser.add_argument("--prompt", help="the user's message; read from standard input if left out")
        parser.add_argument("--json", action="store_true", help="print one JSON object with text, ids and statistics")
    return parser.parse_args(argv)


def _answer(
    fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: Any, stream: bool
) -> list[int]:
    ids = torch.tensor([render_prompt(tokenizer, messages)], device=fast.engine.target.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature, "seed": options.seed}
        sampling |= {"top_p": options.top_p, "top_k": options.top_k}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None  # type: ignore[arg-type]
    mask = torch.ones_like(ids)
    limit = hf.position_limit(fast.model)
    budget = options.max_new_tokens if limit is None else min(options.max_new_tokens, limit - ids.shape[1])
    if budget < 1:
        raise ValueError(f"the conversation has {ids.shape[1]} tokens, but the target's window is {limit}; shorten it")
    out = fast.generate(ids, attention_mask=mask, max_new_tokens=budget, streamer=streamer, **sampling)
    assert isinstance(out, torch.Tensor)
    return out[0, ids.shape[1] :].tolist()


def _messages(options: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _generate(fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> int:
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    messages = [*_messages(options), {"role": "user", "content": prompt}]
    start = time.perf_counter()
    new = _answer(fast, tokenizer, messages, options, stream=not options.json)
    seconds = time.perf_counter() - start
    if options.json:
        text = tokenizer.decode(new, skip_special_tokens=True)
        print(json.dumps({"text": text, "token_ids": new, "seconds": seconds, "stats": fast.last_stats.to_dict()}))
    else:
        _report(fast, len(new), seconds)
    return 0


def _chat(fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> int:
    messages = _messages(options)
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            return 0
        if said == "/quit":
            return 0
        if said == "/new":
            messages = _messages(options)
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        start = time.perf_counter()
        try:
            new = _answer(fast, tokenizer, messages, options, stream=True)
        except ValueError as error:
            Console(stderr=True).print(f"{error}; /new starts over", style="yellow")
            messages.pop()
            continue
        _report(fast, len(new), time.perf_counter() - start)
        messages.append({"role": "assistant", "content": str(tokenizer.decode(new, skip_special_tokens=True))})


def _report(fast: AttachedModel, tokens: int, seconds: float) -> None:
    per_step = fast.last_stats.tokens_per_step
    told = f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), {per_step:.2f} tokens per step"
    Console(stderr=True).print(told, style="dim")
