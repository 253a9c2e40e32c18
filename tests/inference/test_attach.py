"""attach: transformers' own arguments, defaults and return types; what does not fit is refused by name."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_batches import scrambled
from tiny_targets import VOCAB, prompts_of
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from headstart import AttachedModel, AutoDrafter, attach, build_drafter
from headstart.inference.target import Target


@pytest.fixture
def fast(target: Target) -> AttachedModel:
    return attach(target.model, scrambled(build_drafter("medusa", target.model, num_heads=3)))


def inputs(*lengths: int) -> dict[str, Tensor]:
    rows, width = prompts_of(*lengths), max(lengths)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def test_greedy_text_padding_and_shape_are_those_of_the_model_alone(fast: AttachedModel) -> None:
    given = inputs(4, 9, 6)
    own = fast.model.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=[3, 17, 40], pad_token_id=0)
    ours = fast.generate(**given, max_new_tokens=20, do_sample=False, eos_token_id=[3, 17, 40], pad_token_id=0)
    assert torch.equal(ours, own)
    assert fast.last_stats.tokens_per_step >= 1.0
    assert len(fast.last_stats.acceptance_by_depth) == 3


def test_hook_of_transformers_gives_the_same(fast: AttachedModel) -> None:
    given = inputs(5, 5)
    hooked = fast.model.generate(**given, max_new_tokens=12, custom_generate=fast)
    assert torch.equal(hooked, fast.generate(**given, max_new_tokens=12))
    sampled = fast.model.generate(**given, max_new_tokens=12, do_sample=True, seed=3, custom_generate=fast)
    assert torch.equal(sampled, fast.generate(**given, max_new_tokens=12, do_sample=True, seed=3))


def test_hook_refuses_a_model_it_was_not_attached_to(fast: AttachedModel) -> None:
    other = type(fast.model)(fast.model.config)
    with pytest.raises(ValueError, match="attached to"):
        other.generate(**inputs(4), max_new_tokens=4, custom_generate=fast)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_default_length_and_max_length_are_those_of_transformers(fast: AttachedModel) -> None:
    given = inputs(6)
    for more in ({}, {"max_length": 15}, {"generation_config": GenerationConfig(max_new_tokens=7)}):
        assert torch.equal(fast.generate(**given, **more), fast.model.generate(**given, **more, do_sample=False))


def test_seed_decides_the_sampled_text_and_one_per_row_equals_single_calls(fast: AttachedModel) -> None:
    given = inputs(5, 5)
    settings = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.9, "top_k": 30}
    together = fast.generate(**given, **settings, seed=[8, 9])
    for row, seed in enumerate((8, 9)):
        alone = fast.generate(given["input_ids"][row : row + 1], **settings, seed=seed)
        assert torch.equal(alone[0], together[row])
    assert not torch.equal(together, fast.generate(**given, **settings, seed=[9, 8]))


def test_without_a_seed_torchs_global_generator_decides(fast: AttachedModel) -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(fast.generate(**inputs(5), max_new_tokens=16, do_sample=True))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_several_sequences_for_a_prompt_differ(fast: AttachedModel) -> None:
    out = fast.generate(**inputs(5), max_new_tokens=16, do_sample=True, num_return_sequences=3, seed=1)
    assert len({tuple(row) for row in out.tolist()}) == 3


def test_processors_that_read_the_text_equal_transformers(fast: AttachedModel) -> None:
    given = inputs(6, 6)
    for more in ({"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [9, 11]]}):
        own = fast.model.generate(**given, max_new_tokens=20, do_sample=False, **more)
        assert torch.equal(fast.generate(**given, max_new_tokens=20, do_sample=False, **more), own)


def test_return_dict_holds_the_sequences(fast: AttachedModel) -> None:
    out = fast.generate(**inputs(4), max_new_tokens=5, return_dict_in_generate=True)
    assert isinstance(out, GenerateDecoderOnlyOutput)
    assert torch.equal(out.sequences, fast.generate(**inputs(4), max_new_tokens=5))


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[list[int]] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


def test_streamer_gets_the_prompt_and_then_every_token(fast: AttachedModel) -> None:
    streamer = Collected()
    out = fast.generate(**inputs(4), max_new_tokens=9, streamer=streamer)
    assert [token for part in streamer.parts for token in part] == out[0].tolist()
    assert len(streamer.parts[0]) == 4
    assert streamer.ended


def test_streamer_of_a_batch_is_refused(fast: AttachedModel) -> None:
    with pytest.raises(ValueError, match="streamer takes one row"):
        fast.generate(**inputs(4, 4), max_new_tokens=4, streamer=Collected())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"past_key_values": object()}, "past_key_values"),
        ({"maxx_new_tokens": 3}, "maxx_new_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_tree_cannot_do_is_refused_by_name(fast: AttachedModel, settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fast.generate(**inputs(4), max_new_tokens=4, **settings)


@pytest.mark.filterwarnings("ignore")
def test_hook_refuses_what_transformers_would_let_through(fast: AttachedModel) -> None:
    with pytest.raises(ValueError, match="beam search"):
        fast.model.generate(**inputs(4), max_new_tokens=4, num_beams=2, custom_generate=fast)


def test_processors_that_read_true_tokens_work_on_ragged_rows(fast: AttachedModel) -> None:
    given = inputs(3, 6)
    together = fast.generate(**given, max_new_tokens=14, no_repeat_ngram_size=2, pad_token_id=0)
    for row, length in enumerate((3, 6)):
        alone = given["input_ids"][row : row + 1, -length:]
        own = fast.model.generate(alone, max_new_tokens=14, no_repeat_ngram_size=2, do_sample=False, pad_token_id=0)
        assert together[row, 6:].tolist() == own[0, length:].tolist()


def test_hook_refuses_inputs_it_would_not_pass_on(fast: AttachedModel) -> None:
    given = inputs(5)
    for name, value in (
        ("inputs_embeds", fast.model.get_input_embeddings()(given["input_ids"])),
        ("position_ids", torch.arange(3, 8)[None]),
    ):
        with pytest.raises(ValueError, match=name):
            fast.model.generate(**given, **{name: value}, max_new_tokens=4, custom_generate=fast)


def test_right_padding_and_holes_are_refused(fast: AttachedModel) -> None:
    given = inputs(6)
    for mask, said in (([1, 1, 1, 1, 0, 0], "padded on the left"), ([1, 1, 0, 1, 1, 1], "holes")):
        with pytest.raises(ValueError, match=said):
            fast.generate(given["input_ids"], attention_mask=torch.tensor([mask]), max_new_tokens=4, pad_token_id=0)


def test_drafter_may_be_a_folder_a_name_or_an_object(fast: AttachedModel, tmp_path: Path) -> None:
    fast.drafter.save_pretrained(tmp_path / "heads")
    from_folder = attach(fast.model, tmp_path / "heads")
    assert torch.equal(
        from_folder.generate(**inputs(4), max_new_tokens=9), fast.generate(**inputs(4), max_new_tokens=9)
    )
    assert from_folder.last_stats.accepted == fast.last_stats.accepted
    assert type(attach(fast.model, "medusa").drafter) is type(fast.drafter)
    assert isinstance(AutoDrafter.from_pretrained(tmp_path / "heads"), type(fast.drafter))


def test_attaching_changes_nothing_about_the_model(target: Target) -> None:
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    hooks = sum(len(m._forward_hooks) for m in target.model.modules())
    attributes = set(vars(target.model))
    attach(target.model, "medusa").generate(**inputs(4), max_new_tokens=6)
    assert set(vars(target.model)) == attributes
    assert sum(len(m._forward_hooks) for m in target.model.modules()) == hooks
    assert all(torch.equal(value, before[name]) for name, value in target.model.state_dict().items())


def test_drafter_takes_the_models_dtype(target: Target) -> None:
    assert attach(target.model, "medusa").drafter.dtype == target.dtype


def test_drafter_for_another_vocabulary_is_refused(target: Target) -> None:
    drafter = build_drafter("medusa", target.model)
    drafter.config.target_vocab_size = VOCAB + 1
    with pytest.raises(ValueError, match=f"V={VOCAB + 1}"):
        attach(target.model, drafter)
