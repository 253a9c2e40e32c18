"""Beyond the positions a target was built for: rotary embeddings go on with a warning, tables of positions cannot."""

from __future__ import annotations

import warnings

import pytest
import torch
from tiny_targets import COMMON, LIMIT, make_model, tiny_target
from transformers import PreTrainedModel

from headstart.core import hf
from headstart.drafters.registry import new_drafter
from headstart.inference.attach import attach
from headstart.inference.target import Target

DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
PROMPT = torch.arange(1, LIMIT - 3)[None]


def generate(model: PreTrainedModel, new: int) -> list[int]:
    fast = attach(model, new_drafter("medusa", Target(model)))
    out = fast.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=new, do_sample=False)
    assert isinstance(out, torch.Tensor)
    return out[0].tolist()


def test_rotary_target_goes_on_with_one_warning_and_the_targets_own_text() -> None:
    model = tiny_target("llama").model
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        texts = [generate(model, 20) for _ in range(2)]
    (one,) = told
    assert f"beyond the {LIMIT} positions that the target was built for" in str(one.message)
    plain = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=20, do_sample=False)  # type: ignore[operator]
    assert texts == [plain[0].tolist()] * 2


def test_rotary_target_within_its_positions_does_not_warn() -> None:
    assert len(generate(tiny_target("llama").model, 4)) == LIMIT


@pytest.mark.parametrize(
    "model", [tiny_target("gpt2").model, make_model("llama", COMMON | DYNAMIC)], ids=["table", "dynamic"]
)
def test_target_that_cannot_go_on_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=f"may grow by 5, but the target's window is {LIMIT}; .* at most 4"):
        generate(model, 5)


@pytest.mark.parametrize(
    ("family", "soft"),
    [("llama", True), ("gemma3-window", True), ("gpt_neox", True), ("gpt2", False), ("opt", False)],
)
def test_limit_is_soft_for_rotary_embeddings_alone(family: str, soft: bool) -> None:
    assert isinstance(hf.position_limit(tiny_target(family).model), hf.SoftLimit) == soft
