import io

import torch
from rich.console import Console
from tiny_targets import transformers_text

from headstart.inference.attach import AttachedModel
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.sidebyside import GUESSED, Answers, _coloured, answer_both, main, side_by_side
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.stats import GenerationStats


def test_both_answers_are_the_same_and_the_guesses_are_marked(target, drafter, prompts):
    fast = AttachedModel(SpeculativeEngine(target, drafter))
    answers = answer_both(fast, prompts[0], Decoding(12, pad_token_id=0))
    assert answers.ours == answers.alone == transformers_text(target, prompts[0], 12) and answers.same
    assert len(answers.guessed) == 12 and not answers.guessed[0]
    own = answers.guessed.count(False)
    assert own == answers.stats.row_steps + 1, "one token of the target's own from the prefill and from every step"


def test_panels_hold_both_texts_and_say_whether_they_are_the_same(words):
    for ours, verdict in (([5, 6, 7], "the same text"), ([5, 6, 8], "DIFFER")):
        console = Console(file=io.StringIO(), width=100)
        answers = Answers([5, 6, 7], 2.0, ours, [False, True, False], 1.0, GenerationStats(tokens=3, row_steps=2))
        console.print(side_by_side(answers, words, console.width))
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert verdict in shown and "one two three" in shown and "1.50 tokens per step" in shown and "33%" in shown


def test_guessed_tokens_alone_are_coloured(words):
    text = _coloured(Answers([], 1.0, [5, 6, 7], [False, True, False], 1.0, GenerationStats()), words)
    assert text.plain == "one two three"
    assert [text.plain[span.start : span.end].strip() for span in text.spans if span.style == GUESSED] == ["two"]


def test_command_prints_both_answers(saved, capsys):
    words = ["--target", str(saved["target"]), "--drafter", str(saved["heads"]), "--prompt", "one two"]
    assert main([*words, "--max_new_tokens", "6"]) == 0
    out = capsys.readouterr().out
    assert "the model alone" in out and "with the drafter" in out and "the same text" in out
    assert torch.is_grad_enabled()
