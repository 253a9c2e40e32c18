"""What transformers' arguments mean to the engine: processors, criteria, outputs; row by row is the truth."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

import pytest
import torch
from tiny_drafters import RandomDrafter
from tiny_targets import VOCAB, prompts_of, tiny_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxTimeCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart.inference.attach import AttachedModel
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.target import Target

PROMPTS, NEW = prompts_of(7, 3, 5), 14
END = 16
PADDED = torch.tensor([[0] * (7 - len(prompt)) + prompt for prompt in PROMPTS])
MASK = torch.tensor([[0] * (7 - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])

pytestmark = pytest.mark.filterwarnings("ignore:Both `max_new_tokens`", "ignore:.*attention mask.*")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama")


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.9},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[56], [46, 8]]},
    "min_new_tokens": {"min_new_tokens": 6},
    "min_length": {"min_length": 9},
    "forced_eos_token_id": {"forced_eos_token_id": END},
    "exponential_decay": {"exponential_decay_length_penalty": (3, 1.4)},
    "suppress_tokens": {"suppress_tokens": [3, 8, 40]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(0, VOCAB, 2))},
    "sequence_bias": {"sequence_bias": [[[13], 2.5], [[13, 7], 4.0]]},
    "remove_invalid_values": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=2)},
}


def allowed(row: int, prefix: Tensor) -> list[int]:
    """Allow tokens that depend on the row's number and on what was said before."""
    return [(int(prefix[-1]) * 7 + row * 5 + i) % VOCAB for i in range(6)]


def alone(target: Target, prompt: list[int], new: int = NEW, **settings: Any) -> list[int]:
    """Return the new tokens of transformers' own greedy `generate` for one row."""
    ids, told = torch.tensor([prompt]), {"eos_token_id": END, "pad_token_id": 0, "do_sample": False, **settings}
    text: Any = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **told)  # pyright: ignore
    return text[0, len(prompt) :].tolist()


def attached(target: Target, told: list[list[int]]) -> AttachedModel:
    """Return the model with a drafter that often knows what is coming."""
    texts = [prompt + text + [1] * NEW for prompt, text in zip(PROMPTS, told, strict=True)]
    return AttachedModel(SpeculativeEngine(target, RandomDrafter(texts)))


def rows_of(sequences: Any, told: list[list[int]]) -> list[list[int]]:
    """Return each row's new tokens without padding, whose length is known."""
    return [row[7 : 7 + len(text)].tolist() for row, text in zip(sequences, told, strict=True)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_row_of_a_padded_batch_is_what_transformers_says_to_the_row_alone(target: Target, name: str) -> None:
    settings = PROCESSORS[name]
    told = [alone(target, prompt, **settings) for prompt in PROMPTS]
    fast = attached(target, told)
    out = fast.generate(
        PADDED, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, eos_token_id=END, pad_token_id=0, **settings
    )
    assert rows_of(out, told) == told
    assert isinstance(out, Tensor) and out.shape[1] == 7 + max(len(text) for text in told)
    if name != "none":
        assert told != [alone(target, prompt) for prompt in PROMPTS] or name == "remove_invalid_values"


def test_allowed_tokens_are_asked_with_the_rows_own_number_and_prefix(target: Target) -> None:
    told = [
        alone(target, prompt, prefix_allowed_tokens_fn=lambda _, prefix, row=row: allowed(row, prefix))
        for row, prompt in enumerate(PROMPTS)
    ]
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, "do_sample": False}
    out = attached(target, told).generate(PADDED, attention_mask=MASK, prefix_allowed_tokens_fn=allowed, **settings)
    assert rows_of(out, told) == told


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_k": 0},
        {"top_k": 7, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 0, "typical_p": 0.7},
        {"top_k": 0, "epsilon_cutoff": 0.02, "eta_cutoff": 0.01},
        {"top_k": 0, "top_h": 0.6},
        {"top_k": 20, "repetition_penalty": 1.3, "min_new_tokens": 5},
    ],
    ids=lambda settings: "+".join(settings),
)
def test_sampled_row_of_a_batch_is_the_text_of_the_model_alone_with_its_seed(target: Target, settings: dict) -> None:
    common = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, "do_sample": True, **settings}
    without = AttachedModel(SpeculativeEngine(target))
    told = []
    for row, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        text: Any = without.generate(ids, attention_mask=torch.ones_like(ids), seed=[40 + row], **common)
        told.append(text[0, len(prompt) :].tolist())
    out = attached(target, told).generate(PADDED, attention_mask=MASK, seed=[40, 41, 42], **common)
    assert rows_of(out, told) == told
    assert without.last_stats.tokens_per_step == 1


class EndsAfterPair(StoppingCriteria):
    """Stops a row whose last two tokens add up to a multiple of five."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -2:].sum(1) % 5) == 0


def test_custom_criterion_stops_inside_an_accepted_block_as_it_does_in_transformers(target: Target) -> None:
    ends = StoppingCriteriaList([EndsAfterPair(), MaxTimeCriteria(1e9)])
    told = [alone(target, prompt, stopping_criteria=ends) for prompt in PROMPTS]
    assert any(len(text) < NEW for text in told)
    longer = [alone(target, prompt, eos_token_id=None) for prompt in PROMPTS]
    fast = attached(target, longer)
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, "do_sample": False}
    out = fast.generate(PADDED, attention_mask=MASK, stopping_criteria=ends, **settings)
    assert rows_of(out, told) == told
    assert isinstance(out, Tensor) and bool((out[:, 7:] != 0).sum(1).eq(torch.tensor([len(t) for t in told])).all())


def test_scores_and_logits_are_those_of_transformers_row_by_row(target: Target) -> None:
    settings: dict[str, Any] = {"do_sample": False, "repetition_penalty": 1.4, "min_new_tokens": 4, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": END}
    own: list[Any] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        own.append(target.model.generate(ids, max_new_tokens=NEW, **settings))  # pyright: ignore
    told = [out.sequences[0, len(prompt) :].tolist() for out, prompt in zip(own, PROMPTS, strict=True)]
    out = attached(target, told).generate(PADDED, attention_mask=MASK, max_new_tokens=NEW, **settings)
    assert isinstance(out, GenerateDecoderOnlyOutput) and out.scores is not None and out.logits is not None
    assert len(out.scores) == len(out.logits) == max(len(text) for text in told)
    for row, theirs in enumerate(own):
        for mine, reference in ((out.scores, theirs.scores), (out.logits, theirs.logits)):
            for step, expected in enumerate(reference):
                assert torch.allclose(mine[step][row].double(), expected[0].double(), atol=1e-5)


def test_return_sequences_are_rows_of_their_own(target: Target) -> None:
    fast = AttachedModel(SpeculativeEngine(target))
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": True, "pad_token_id": 0, "eos_token_id": END}
    out = fast.generate(PADDED, attention_mask=MASK, num_return_sequences=2, seed=[1, 2, 3, 4, 5, 6], **settings)
    repeated, mask = PADDED.repeat_interleave(2, 0), MASK.repeat_interleave(2, 0)
    again = fast.generate(repeated, attention_mask=mask, seed=[1, 2, 3, 4, 5, 6], **settings)
    assert isinstance(out, Tensor) and isinstance(again, Tensor)
    assert torch.equal(out, again) and len(out) == 6
    assert not torch.equal(out[0], out[1])


def test_users_own_processor_is_shown_each_nodes_true_prefix(target: Target) -> None:
    seen: list[list[int]] = []

    def spy(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(input_ids[0].tolist())
        return scores

    told = [alone(target, prompt) for prompt in PROMPTS]
    texts = [prompt + text for prompt, text in zip(PROMPTS, told, strict=True)]
    settings: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_id": END, "pad_token_id": 0, "do_sample": False}
    out = attached(target, told).generate(
        PADDED,
        attention_mask=MASK,
        logits_processor=LogitsProcessorList([spy]),
        **settings,  # type: ignore[list-item]
    )
    assert rows_of(out, told) == told
    starts = [text[: len(prompt) + n] for prompt, text in zip(PROMPTS, texts, strict=True) for n in range(len(text))]
    assert all(prefix in seen for prefix in starts if any(prefix == t[: len(prefix)] and prefix != t for t in texts))


@cache
def letters() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with one letter a token, so that stop strings span several."""
    alphabet = (string.ascii_letters + string.digits + ".!")[:VOCAB]
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=core)


def spelled(tokens: list[int]) -> str:
    return str(letters().decode(tokens))


@pytest.mark.parametrize("place", ["argument", "configuration"])
def test_stop_string_over_a_border_of_tokens_ends_the_text_where_transformers_does(place: str) -> None:
    target, tokenizer = tiny_target("llama"), letters()
    whole = [alone(target, prompt, eos_token_id=None) for prompt in PROMPTS]
    strings = [spelled(whole[0][4:7]), spelled(whole[1][6:9])]
    told = [alone(target, prompt, eos_token_id=None, stop_strings=strings, tokenizer=tokenizer) for prompt in PROMPTS]
    assert [len(text) for text in told[:2]] == [7, 9]
    fast = attached(target, whole)
    more: dict[str, Any] = {}
    if place == "argument":
        more["stop_strings"] = strings
    elif place == "configuration":
        more["generation_config"] = GenerationConfig(stop_strings=strings)
    out = fast.generate(
        PADDED, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0, tokenizer=tokenizer, **more
    )
    assert rows_of(out, told) == told
    assert isinstance(out, Tensor) and int((out[0, 7:] != 0).sum()) == 7
    assert fast.last_stats.tokens_per_step > 1.3


def test_stop_strings_of_the_model_itself_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.model.generation_config, "stop_strings", ["x"])
    with pytest.raises(ValueError, match=r"model\.generation_config"):
        attached(target, [[1]] * 3).generate(PADDED, attention_mask=MASK, max_new_tokens=4, tokenizer=letters())


def test_stop_strings_without_a_tokenizer_say_what_is_missing(target: Target) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        attached(target, [[1]] * 3).generate(PADDED, attention_mask=MASK, stop_strings=["x"], max_new_tokens=4)


class _Lines(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer_sees_nothing_behind_a_stop_string(target: Target) -> None:
    whole = alone(target, PROMPTS[0], eos_token_id=None)
    stream, ids = _Lines(), torch.tensor(PROMPTS[:1])
    out = attached(target, [whole, [], []]).generate(
        ids,
        max_new_tokens=NEW,
        do_sample=False,
        streamer=stream,
        tokenizer=letters(),
        stop_strings=spelled(whole[5:7]),
    )
    assert isinstance(out, Tensor) and stream.ended
    assert [token for piece in stream.pieces for token in piece] == out[0].tolist() and len(out[0]) == 7 + 7
