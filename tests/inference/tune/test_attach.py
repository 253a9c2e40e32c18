"""A kept tree is used wherever a drafter is loaded, and changes no text."""

import json

import pytest
import torch

from headstart import attach
from headstart.cli import main
from headstart.core.tree import TreeTopology
from headstart.drafters.registry import AutoDrafter
from headstart.inference.bench.command import load_drafters
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.inference.tune.store import Tuning, save_tuning


@pytest.fixture
def model(saved):
    return load_target(str(saved["target"]), "float32")[0]


@pytest.fixture
def tuned(saved, model):
    save_tuning(saved["heads"], Target(model), Tuning(1, 0.0, TreeTopology.chain(2).paths()))
    return saved["heads"]


def test_attach_takes_the_kept_tree_and_says_the_same(model, tuned):
    ids = torch.tensor([[5, 6, 7]])
    own, fast = attach(model, tuned, tuned=False), attach(model, tuned)
    assert fast.drafter.topology == TreeTopology.chain(2) != own.drafter.topology
    texts = [one.generate(ids, max_new_tokens=12, do_sample=False) for one in (own, fast)]
    assert isinstance(texts[0], torch.Tensor) and isinstance(texts[1], torch.Tensor)
    assert torch.equal(texts[0], texts[1])


def test_drafter_in_memory_and_other_dtypes_keep_their_tree(model, tuned):
    drafter = AutoDrafter.from_pretrained(tuned)
    before = drafter.topology
    assert attach(model, drafter).drafter.topology == before
    assert attach(model.to(torch.bfloat16), tuned).drafter.topology == before


def test_every_call_takes_the_tree_of_the_most_similar_calls_unless_another_was_given_since(model, tuned):
    sampled, batched = TreeTopology.chain(1), TreeTopology.from_paths([[0], [1]])
    save_tuning(tuned, Target(model), Tuning(1, 1.0, sampled.paths()))
    save_tuning(tuned, Target(model), Tuning(4, 0.0, batched.paths()))
    fast = attach(model, tuned)
    ids = torch.tensor([[5, 6, 7]])

    def tree_of_a_call(rows: int, **how):
        fast.generate(ids.repeat(rows, 1), max_new_tokens=3, **how)
        return fast.drafter.topology

    assert tree_of_a_call(1, do_sample=False) == TreeTopology.chain(2)
    assert tree_of_a_call(1, do_sample=True, temperature=0.9) == sampled
    assert tree_of_a_call(1, do_sample=True) == sampled, "no temperature is temperature 1"
    assert tree_of_a_call(3, do_sample=True) == batched
    fast.drafter.set_topology([[0], [0, 1]])
    assert tree_of_a_call(1, do_sample=False) == TreeTopology.from_paths([[0], [0, 1]])


def test_benchmark_takes_either_tree_or_both(model, tuned):
    own = attach(model, tuned, tuned=False).drafter.topology
    save_tuning(tuned, Target(model), Tuning(1, 1.0, TreeTopology.chain(1).paths()))
    both = load_drafters(model, str(tuned), trees="both")
    assert {name: one.topology for name, one in both.items()} == {
        "heads (own tree)": own,
        "heads": TreeTopology.chain(2),
    }
    assert load_drafters(model, str(tuned), trees="own")["heads"].topology == own
    assert load_drafters(model, str(tuned), temperature=1.0)["heads"].topology == TreeTopology.chain(1)


def test_rule_whose_text_depends_on_the_tree_gets_the_drafters_own(model, tuned):
    own = attach(model, tuned, tuned=False).drafter.topology
    assert attach(model, tuned, acceptance="typical").drafter.topology == own


def test_benchmark_and_command_line_use_it(saved, model, tuned, capsys):
    assert load_drafters(model, str(tuned))["heads"].topology == TreeTopology.chain(2)
    words = ["generate", "--target", str(saved["target"]), "--drafter", str(tuned), "--dtype", "float32"]
    assert main([*words, "--prompt", "one two", "--max_new_tokens", "6", "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert 0 < stats["nodes"] <= 3 * stats["target_passes"], "the drafter's own tree has more nodes"
