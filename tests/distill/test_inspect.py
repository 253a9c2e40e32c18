"""What `headstart distill inspect` prints."""

import io

import numpy as np
from rich.console import Console

from headstart.distill.dataset import TokenRow
from headstart.distill.inspect import TRAINED, coloured, inspect

ROW = TokenRow(
    "a", np.array([1, 3, 5, 9, 6, 2, 1, 4, 7, 2], dtype=np.int32), np.arange(10) >= 8, category="math", source="made up"
)


def printed(rows, tokenizer, **options):
    file = io.StringIO()
    inspect(rows, tokenizer, Console(file=file, width=100, **options))
    return file.getvalue()


def test_trained_text_carries_the_style_and_the_rest_does_not(tokenizer):
    text = coloured(ROW, tokenizer)
    assert text.plain == tokenizer.decode(ROW.input_ids)
    (trained,) = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED]
    assert trained.split() == ["three", "<|im_end|>"]


def test_counts_of_the_row_and_of_all_rows_are_printed(tokenizer):
    shown = printed([ROW] * 5, tokenizer)
    assert "row 1: a (math, made up)" in shown and "row 3" in shown and "row 4" not in shown
    assert "10 tokens, 2 trained" in shown
    assert "5 rows, 50 tokens, 10 trained (20%)" in shown


def test_without_colours_brackets_show_what_is_trained(tokenizer):
    assert "⟦ three <|im_end|>⟧" in printed([ROW], tokenizer)
    assert "⟦" not in printed([ROW], tokenizer, force_terminal=True)


def test_text_that_looks_like_markup_is_printed_as_it_is(tokenizer):
    tokenizer.add_tokens(["[bold]"])
    row = TokenRow("b", np.array([5, tokenizer.convert_tokens_to_ids("[bold]")]), np.array([False, True]))
    assert "[bold]" in printed([row], tokenizer, force_terminal=True)


def test_no_rows_print_zero_counts(tokenizer):
    assert "0 rows, 0 tokens, 0 trained" in printed([], tokenizer)
