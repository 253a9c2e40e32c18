"""`headstart generate` and `headstart chat`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from contextlib import suppress
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase, TextStreamer

from ..core import hf
from ..core.prompts import check_text, render_prompt
from ..drafters.registry import AutoDrafter
from .attach import AttachedModel, attach
from .loading import check_name, load_target, warn_of_other_text
from .options import Parser, add_adapter, add_target, real, whole, working

DESCRIPTIONS = {
    "generate": """Answer one prompt with a target and its drafter: the words the target would have said, sooner.
The answer goes to standard output as it comes, its statistics to standard error.""",
    "chat": """Talk to a target with its drafter: the words the target would have said, sooner.
In the chat, /new starts over and /quit (or the end of the input) ends.""",
}

EXAMPLES = {
    "generate": [
        "headstart generate --target my-model --drafter my-drafter --prompt 'Why is the sky blue?'",
        "headstart generate --target my-model --drafter my-drafter --temperature 0.8 --seed 1 < prompt.txt",
        "headstart generate --target my-model --drafter my-drafter --prompt 'Hello' --json > answer.json",
    ],
    "chat": [
        "headstart chat --target my-model --drafter my-drafter",
        "headstart chat --target my-model --drafter my-drafter --system 'Answer in French.' --temperature 0.7",
    ],
}


def main(name: str, argv: list[str]) -> int:
    """Run `generate` or `chat`."""
    options = _parse(name, argv)
    prompt = _prompt(options) if name == "generate" else ""
    check_name(options.target)
    AutoDrafter.check(options.drafter)  # both before anything is loaded
    with working(f"loading {options.target}", options.target):
        model, tokenizer = load_target(options.target, options.dtype, options.target_revision, options.device)
    with working(f"loading {options.drafter}", options.drafter):
        fast = attach(model, options.drafter, apply_adapter=options.apply_adapter)
    warn_of_other_text(fast.drafter, tokenizer)
    if tokenizer.chat_template is None:
        warnings.warn(
            "this target's tokenizer has no chat template, so messages are joined by empty lines; an instruction-tuned "
            "model needs its template (chat_template.jinja)",
            stacklevel=2,
        )
    return _chat(fast, tokenizer, options) if name == "chat" else _generate(fast, tokenizer, prompt, options)


def _parse(name: str, argv: list[str]) -> argparse.Namespace:
    parser = Parser(f"headstart {name}", DESCRIPTIONS[name], EXAMPLES[name])
    add_target(parser)
    group = parser.add_argument_group("drafter")
    group.add_argument("--drafter", required=True, metavar="NAME", help="a drafter checkpoint: a folder or a Hub id")
    add_adapter(group)
    group = parser.add_argument_group("answer")
    if name == "generate":
        group.add_argument("--prompt", metavar="TEXT", help="the user's message; left out, standard input is read")
    group.add_argument("--system", metavar="TEXT", help="system message")
    group.add_argument("--max_new_tokens", type=whole(1), default=256, metavar="N", help="default %(default)s")
    group.add_argument("--temperature", type=real(), default=0.0, metavar="T", help="0 is greedy (default %(default)s)")
    group.add_argument("--top_p", type=real(0, 1), metavar="P", help="when sampling: the likeliest share of tokens")
    group.add_argument("--top_k", type=whole(0), metavar="K", help="when sampling: the likeliest K tokens")
    group.add_argument("--seed", type=whole(0), help="when sampling: makes the answer repeatable")
    if name == "generate":
        group = parser.add_argument_group("output")
        group.add_argument("--json", action="store_true", help="one JSON object: text, token ids, seconds, statistics")
    options = parser.read(argv)
    for setting in ("top_p", "top_k", "seed"):
        if options.temperature == 0 and getattr(options, setting) is not None:
            warnings.warn(f"--{setting} has no effect at temperature 0; set --temperature to sample", stacklevel=2)
    if options.system is not None:
        check_text(options.system, "--system")
    return options


def _prompt(options: argparse.Namespace) -> str:
    """Return the user's message, before anything is loaded. Raises ValueError for an empty or undecodable one."""
    place = "--prompt"
    if options.prompt is None:
        place = "standard input"
        if sys.stdin.isatty():
            print("type the prompt, then Ctrl-D on a line of its own", file=sys.stderr)
        try:
            options.prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input must be text in UTF-8, but is not ({error})") from error
    if not options.prompt.strip():
        raise ValueError(f"{place} must say something, but is empty; give --prompt or pipe a text in")
    return check_text(options.prompt, place)


def _answer(
    fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: Any, stream: bool
) -> list[int]:
    ids = torch.tensor([render_prompt(tokenizer, messages)], device=fast.engine.target.device)
    sampling: dict[str, Any] = {"do_sample": False}
    if options.temperature > 0:
        sampling = {"do_sample": True, "temperature": options.temperature, "seed": options.seed}
        sampling |= {"top_p": 1.0 if options.top_p is None else options.top_p, "top_k": options.top_k or 0}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None  # type: ignore[arg-type]
    limit, budget = hf.position_limit(fast.model), options.max_new_tokens
    if limit is not None and not isinstance(limit, hf.SoftLimit):
        budget = min(budget, limit - ids.shape[1])
        if budget < 1:
            raise ValueError(
                f"the conversation must fit the target's window of {limit} tokens, but has {ids.shape[1]}; shorten it"
            )
    out = fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, streamer=streamer, **sampling)
    assert isinstance(out, torch.Tensor)
    return out[0, ids.shape[1] :].tolist()


def _messages(options: argparse.Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": options.system}] if options.system else []


def _generate(fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, options: argparse.Namespace) -> int:
    messages = [*_messages(options), {"role": "user", "content": prompt}]
    start = time.perf_counter()
    if not options.json:
        _report(fast, len(_answer(fast, tokenizer, messages, options, stream=True)), time.perf_counter() - start)
        return 0
    with working("answering"):
        new = _answer(fast, tokenizer, messages, options, stream=False)
    seconds = time.perf_counter() - start
    text = tokenizer.decode(new, skip_special_tokens=True)
    print(json.dumps({"text": text, "token_ids": new, "seconds": seconds, "stats": fast.last_stats.to_dict()}))
    return 0


def _chat(fast: AttachedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> int:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a line that can be edited, where the platform has it
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
            check_text(said, "the message")
            new = _answer(fast, tokenizer, messages, options, stream=True)
        except ValueError as error:
            Console(stderr=True).print(f"{error}; /new starts over", style="yellow", markup=False)
            messages.pop()
            continue
        _report(fast, len(new), time.perf_counter() - start)
        messages.append({"role": "assistant", "content": str(tokenizer.decode(new, skip_special_tokens=True))})


def _report(fast: AttachedModel, tokens: int, seconds: float) -> None:
    per_step = fast.last_stats.tokens_per_step
    told = f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), {per_step:.2f} tokens per step"
    Console(stderr=True).print(told, style="dim")
