"""One prompt answered twice, side by side: by the model alone and with its drafter.

    python -m headstart.inference.bench.sidebyside --target my-model --drafter my-drafter --prompt "Why?"

On the right the tokens that were guessed are coloured, so one sees what the drafter found. Both columns hold the same
text; in float32 that is a promise (but for ties), so float32 is the default here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ...core.prompts import render_prompt
from ..attach import AttachedModel, attach
from ..engine import SpeculativeEngine
from ..loading import DTYPES, eos_ids, load_target
from ..stats import GenerationStats
from .compare import first_difference
from .measure import WARM_UP_TOKENS
from .methods import Autoregressive, Decoding, padding_id
from .table import report_console

DEFAULT_PROMPT = "Explain in a few sentences why the sky is blue, then list three things that look different on Mars."
GUESSED = "bold green"


@dataclass(frozen=True, slots=True)
class Answers:
    """One prompt's two answers.

    alone, ours: new tokens. guessed: for each of ours, whether it was a draft token. Seconds are of whole calls.
    """

    alone: list[int]
    alone_seconds: float
    ours: list[int]
    guessed: list[bool]
    seconds: float
    stats: GenerationStats

    @property
    def same(self) -> bool:
        """Whether both texts are the same, token for token."""
        return first_difference(self.ours, self.alone) is None


def answer_both(fast: AttachedModel, prompt: list[int], decoding: Decoding) -> Answers:
    """Answer greedily by transformers' `generate` on the model alone, then with the drafter; both after a warm-up."""
    target, engine = fast.engine.target, fast.engine
    short = Decoding(min(WARM_UP_TOKENS, decoding.max_new_tokens), decoding.eos_token_ids, decoding.pad_token_id)
    alone = Autoregressive(target)
    alone.run([prompt], short, [0])
    call = alone.run([prompt], decoding, [0])
    _with_drafter(engine, prompt, short)
    start = time.perf_counter()
    ours, guessed, stats = _with_drafter(engine, prompt, decoding)
    return Answers(call.outputs[0], call.seconds, ours, guessed, time.perf_counter() - start, stats)


def side_by_side(answers: Answers, tokenizer: PreTrainedTokenizerBase, width: int) -> Group:
    """Return two panels for a console of this width, and a line that says whether the texts are the same."""
    decode = tokenizer.decode
    alone = Text(str(decode(answers.alone, skip_special_tokens=True)).strip())
    panels = [
        Panel(alone, title="the model alone", subtitle=_rate(answers.alone, answers.alone_seconds), width=width // 2),
        Panel(
            _coloured(answers, tokenizer),
            title="with the drafter",
            subtitle=f"{_rate(answers.ours, answers.seconds)}, {answers.stats.tokens_per_step:.2f} tokens per step",
            width=width // 2,
        ),
    ]
    share = sum(answers.guessed) / max(len(answers.guessed), 1)
    verdict = Text("the same text, token for token; " if answers.same else "the texts DIFFER; ", style="bold")
    verdict.append(f"{share:.0%} of the tokens were guessed ", style="none")
    verdict.append("(this colour)", style=GUESSED)
    return Group(Columns(panels, padding=0), verdict)


def main(argv: Sequence[str] | None = None) -> int:
    """Answer and print; exit code 1 when the texts differ where they must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="the model: a folder or a Hub id")
    parser.add_argument("--drafter", required=True, help="a drafter checkpoint: a folder or a Hub id")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="default: a question about the sky")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="longest answer (default %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="default %(default)s")
    options = parser.parse_args(argv)
    model, tokenizer = load_target(options.target, options.dtype)
    fast = attach(model, options.drafter)
    ends = tuple(eos_ids(model))
    prompt = render_prompt(tokenizer, [{"role": "user", "content": options.prompt}])
    answers = answer_both(fast, prompt, Decoding(options.max_new_tokens, ends, padding_id(model, ends)))
    console: Console = report_console(stderr=False)
    console.print(Text(options.prompt, style="italic"))
    console.print(side_by_side(answers, tokenizer, console.width))
    return 0 if answers.same or model.dtype not in (torch.float32, torch.float64) else 1


def _with_drafter(
    engine: SpeculativeEngine, prompt: list[int], decoding: Decoding
) -> tuple[list[int], list[bool], GenerationStats]:
    """Return the new tokens, which of them were guessed, and the statistics.

    A step emits the draft tokens that were accepted and then one of the target's own; the prefill emits just that one.
    """
    state = engine.prefill([prompt], decoding.rules(0))
    guessed: list[bool] = []
    for (new,) in engine.stream(state):
        guessed += [True] * (len(new) - 1) + [False] * bool(new)
    return state.outputs[0], guessed, state.stats


def _coloured(answers: Answers, tokenizer: PreTrainedTokenizerBase) -> Text:
    """Return our text with guessed tokens coloured; a character of several tokens takes the last one's colour."""
    text, shown = Text(), ""
    for count, guessed in enumerate(answers.guessed, start=1):
        whole = str(tokenizer.decode(answers.ours[:count], skip_special_tokens=True))
        if not whole.endswith("\ufffd"):  # not yet a whole character
            text.append(whole[len(shown) :], style=GUESSED if guessed else "")
            shown = whole
    return text


def _rate(tokens: list[int], seconds: float) -> str:
    return f"{len(tokens)} tokens in {seconds:.1f} s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(f"sidebyside: {error}")
