"""A whole tuning on a tiny target, with costs that are told instead of measured."""

import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_targets import own_text

from headstart.core.tree import TreeTopology
from headstart.drafters.registry import new_drafter
from headstart.inference.bench.costs import CostCurve
from headstart.inference.bench.methods import Decoding
from headstart.inference.tune import run as tune
from headstart.inference.tune.command import keep
from headstart.inference.tune.report import print_tuning
from headstart.inference.tune.steps import draft_costs

SETTINGS = tune.TuneSettings(Decoding(16, pad_token_id=0), contexts=(8, 16), rounds=1, sizes=(2, 4, 8, 16))


def told_costs(monkeypatch, by_node):
    """Let a pass of n tokens cost 10 + by_node · n, a step of the model 10, drafting 1 a level, the rest 0.5."""

    def curve(target, contexts, nodes, batch_size, *_):
        row = [10 + by_node * n for n in nodes]
        return CostCurve(batch_size, contexts, tuple(nodes), [row, row], [10.0, 10.0], [[0.0] * len(row)] * 2)

    monkeypatch.setattr(tune, "cost_curve", curve)
    monkeypatch.setattr(tune, "draft_costs", lambda *_: ([1.0, 2.0, 3.0], 0.5))


def test_expected_tokens_are_those_of_real_decoding_on_the_same_prompts(target, drafter, prompt_set, monkeypatch):
    told_costs(monkeypatch, 0.1)
    report = json.loads(json.dumps(tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)))
    (batch,) = report["batches"]
    assert list(batch["proof"]) == [tune.TUNED, tune.OWN] and report["proof_is_new"] is False
    for one in batch["proof"].values():
        assert one["expected_tokens_per_step"] == one["measured_tokens_per_step"] and one["num_different"] == 0
        assert one["deviation"] == pytest.approx(one["expected_speedup"] / one["measured_speedup"] - 1)
    assert batch["chosen"]["expected_speedup"] > batch["own"]["expected_speedup"]
    assert batch["chosen"]["expected_speedup"] == max(one["expected_speedup"] for one in batch["candidates"])


def test_dear_nodes_make_a_small_tree(target, drafter, prompt_set, monkeypatch):
    told_costs(monkeypatch, 0.01)
    cheap = tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)["batches"][0]["chosen"]
    told_costs(monkeypatch, 5)
    dear = tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)["batches"][0]["chosen"]
    assert cheap["nodes"] == 16 and dear["nodes"] == 2


def test_every_batch_size_has_its_own_entry_and_all_is_printed(target, drafter, prompt_set, monkeypatch):
    told_costs(monkeypatch, 0.1)
    settings = tune.TuneSettings(SETTINGS.decoding, (1, 2), (8, 16), 1, sizes=(2, 4, 8))
    report = tune.run_tune(target.model, drafter, prompt_set, prompt_set, settings, False)
    assert [batch["curve"]["batch_size"] for batch in report["batches"]] == [1, 2]
    console = Console(file=io.StringIO(), width=140)
    print_tuning(report, console)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for wanted in ("rank 0", "chosen", "the drafter's own", "tuned tree", "own tree", "the same prompts", "off by",
                   "Batch size 2", "expected to bring", "batch size 1, 2"):  # fmt: skip
        assert wanted in text


@pytest.mark.parametrize(("spread", "told"), [(1.0, False), (5.0, True)])
def test_busy_machine_is_told(target, drafter, prompt_set, monkeypatch, spread, told):
    told_costs(monkeypatch, 0.1)
    settings = tune.TuneSettings(SETTINGS.decoding, (1,), (8, 16), 1, sizes=(2, 4))
    report = tune.run_tune(target.model, drafter, prompt_set, prompt_set, settings, False)
    report["batches"][0]["curve"]["forward_half_quartile_distance"][1][0] = spread  # of a pass of about 10
    console = Console(file=io.StringIO(), width=140)
    print_tuning(report, console)
    assert ("The machine is busy" in console.file.getvalue()) is told  # pyright: ignore[reportAttributeAccessIssue]


def test_own_tree_that_is_the_best_is_measured_once(target, drafter, prompt_set, monkeypatch):
    told_costs(monkeypatch, 0.1)
    best = tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)["batches"][0]["chosen"]
    drafter.set_topology(best["topology"])
    batch = tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)["batches"][0]
    assert batch["chosen"]["topology"] == best["topology"] and list(batch["proof"]) == [tune.OWN]


@pytest.mark.parametrize("faster", ["own tree", "tuned tree"])
def test_tree_that_is_not_static_is_measured_as_it_is_and_given_up_only_for_a_faster_one(
    target, prompt_set, monkeypatch, tmp_path, faster
):
    told_costs(monkeypatch, 0.1)
    measure = tune.run_bench

    def measured(*args):
        report = measure(*args)
        for name, one in report["methods"].items():
            one["decode_speed_ratio"] = 2.0 if name == faster else 1.0
        return report

    monkeypatch.setattr(tune, "run_bench", measured)
    drafter = new_drafter("redrafter", target, max_depth=3, beam_width=2)
    drafter.save_pretrained(tmp_path)
    report = tune.run_tune(target.model, drafter, prompt_set, prompt_set, SETTINGS, False)
    (batch,) = report["batches"]
    assert batch["own_tree"] == "beams, 2 x 3" == drafter.tree_told and batch["own"] is None
    assert list(batch["proof"]) == [tune.TUNED, tune.OWN]
    own = batch["proof"][tune.OWN]
    assert own["expected_speedup"] is own["deviation"] is None and own["measured_tokens_per_step"] >= 1
    assert batch["own_is_faster"] is (faster == tune.OWN)
    assert len(keep(report, str(tmp_path), target, SETTINGS)) == (faster == tune.TUNED)
    console = Console(file=io.StringIO(), width=140)
    print_tuning(report, console)
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "The drafter's own: beams, 2 x 3." in printed
    assert ("is not kept" in printed) is (faster == tune.OWN)


def test_costs_are_averaged_over_contexts_or_taken_at_one():
    curve = CostCurve(1, (100, 200), (1, 8), [[4.0, 5.0], [6.0, 9.0]], [4.0, 6.0], [[0.0] * 2] * 2)
    average, there = tune.costs_at(curve, None, [1.0], 0.5), tune.costs_at(curve, 200, [1.0], 0.5)
    assert (average.step, average.forward) == (5.0, (5.0, 7.0)) and (there.step, there.forward) == (6.0, (6.0, 9.0))


def test_drafting_is_timed_by_depth_and_nothing_else_is_taken_for_it(target, drafter, prompts, monkeypatch):
    now = [0.0]

    def clock(depth):
        now[0] += depth

    slow = type(drafter)(own_text(target, prompts, 24), clock)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    trees = [TreeTopology.chain(depth) for depth in (1, 2, 3)]
    assert draft_costs(target, slow, trees, prompts[:2], Decoding(4), 20, False) == ([1.0, 2.0, 3.0], 0.0)


def test_prompts_whose_answers_end_at_once_are_refused(target, drafter, prompt_set):
    with pytest.raises(ValueError, match="a token to guess"):
        tune.run_tune(target.model, drafter, prompt_set, prompt_set, replace(SETTINGS, decoding=Decoding(1)), False)


def test_contexts_that_do_not_fit_are_told_before_anything_is_measured(target, drafter, prompt_set, monkeypatch):
    monkeypatch.setattr(tune, "measure_acceptance", None)
    with pytest.raises(ValueError, match="contexts must be at least 1 and at most"):
        tune.run_tune(
            target.model, drafter, prompt_set, prompt_set, tune.TuneSettings(Decoding(8), contexts=(9999,)), False
        )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"batch_sizes": (0,)}, "batch sizes"), ({"rounds": 0}, "rounds"), ({"contexts": (0,)}, "contexts")],
)
def test_settings_that_cannot_be_measured_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        tune.TuneSettings(Decoding(8), **wrong)
