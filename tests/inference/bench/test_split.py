import pytest
import torch
from tiny_targets import WIDTH, own_text
from torch import nn

from headstart.inference.bench.clock import ClockedDrafter, ProductClock
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.split import _ForwardClock, split_steps
from headstart.inference.engine import SpeculativeEngine
from headstart.inference.state import DecodingRules


def test_products_inside_modules_are_seen_and_nothing_else_is():
    clock, linear, x = ProductClock(torch.device("cpu")), nn.Linear(64, 64), torch.ones(2, 64)
    with clock:
        torch.add(torch.relu(x), x)
        assert clock.seconds == 0
        linear(x)
    once = clock.seconds
    assert once > 0
    with clock:
        _ = x @ x.T
        torch.einsum("ij,ij->i", x, x)
    assert clock.seconds > once
    before = clock.seconds
    linear(x)
    assert clock.seconds == before


def test_clocks_do_not_change_the_text(target, drafter, prompts):
    clocked = ClockedDrafter(drafter, ProductClock(target.device))
    state = SpeculativeEngine(target, clocked).generate(prompts, DecodingRules(12))  # pyright: ignore[reportArgumentType]
    texts = own_text(target, prompts, 12)
    assert state.outputs == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert clocked.products is not None and 0 < clocked.products.seconds < clocked.propose_seconds


def test_parts_of_a_step_add_up_to_the_whole(target, drafter, prompts):
    split = split_steps(target, drafter, prompts, Decoding(12))
    assert sum(split.parts.values()) == pytest.approx(split.total)
    assert all(seconds >= 0 for seconds in split.parts.values())
    assert 0 < split.overhead < 1 and split.tokens_per_step > 1.5
    told = split.to_dict()
    assert sum(part["share"] for part in told["parts"].values()) == pytest.approx(1)
    assert told["overhead"] == split.overhead


def test_head_that_the_drafter_calls_is_the_drafters(target, drafter):
    clocked = ClockedDrafter(drafter)
    clock, state = _ForwardClock(target, clocked), torch.zeros(1, WIDTH, dtype=target.dtype)
    with clock.attached():
        clocked.inside = True
        target.logits(state)
        assert clock.seconds == 0
        clocked.inside = False
        target.logits(state)
        assert clock.seconds > 0


def test_hooks_are_gone_afterwards(target, drafter, prompts):
    split_steps(target, drafter, prompts[:1], Decoding(4))
    for module in (target.model.base_model, target.model.get_output_embeddings()):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_prompts_without_a_decoding_step_are_refused(target, drafter, prompts):
    with pytest.raises(ValueError, match="decoding step"):
        split_steps(target, drafter, prompts[:1], Decoding(1))
