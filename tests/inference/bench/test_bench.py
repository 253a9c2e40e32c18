import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tiny_targets import transformers_text

from headstart.drafters.registry import new_drafter
from headstart.inference.bench.bench import BenchSettings, run_bench
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.table import print_report

GREEDY = BenchSettings(Decoding(12, pad_token_id=0), warm_up=0)


def bench(target, drafter, prompt_set, settings):
    return run_bench(target.model, {"pairs": drafter}, prompt_set, settings, progress=False)


def test_report_holds_what_a_reader_needs_to_judge_it(target, drafter, prompt_set):
    report = json.loads(json.dumps(bench(target, drafter, prompt_set, GREEDY)))
    assert set(report["methods"]) == {"autoregressive", "pairs"}
    pairs = report["methods"]["pairs"]
    assert pairs["num_prompts"] == 4 and pairs["num_different"] == 0 and pairs["differences"] == []
    assert pairs["tokens_per_step"] > 1.5 and 0 < pairs["acceptance_by_depth"][0] <= 1
    assert pairs["speed_ratio_interval"][0] <= pairs["speed_ratio"] <= pairs["speed_ratio_interval"][1]
    assert report["methods"]["autoregressive"]["speed_ratio"] == 1
    assert {"cpu", "threads", "dtype", "versions"} <= set(report["machine"]) and report["costs"] is None
    assert report["prompts"]["num_prompts"] == 4 and report["settings"]["seed"] == 0
    assert len(report["calls"]) == 8


@pytest.mark.parametrize("batch_size", [1, 3])
def test_every_method_at_any_batch_size_says_the_same(target, drafter, prompt_set, batch_size):
    settings = replace(GREEDY, batch_size=batch_size, no_drafter=True, repeats=2)
    methods = bench(target, drafter, prompt_set, settings)["methods"]
    assert list(methods) == ["autoregressive", "no_drafter", "pairs"]
    assert all(one["num_different"] == 0 and one["new_tokens"] == 96 for one in methods.values())
    assert methods["no_drafter"]["tokens_per_step"] == 1


def test_trees_are_told_as_they_are_drawn(target, prompt_set):
    dynamic = new_drafter("medusa", target, num_heads=3, dynamic_tree={"nodes": 9, "depth": 5})
    beams = new_drafter("redrafter", target, max_depth=2, beam_width=3)
    static = new_drafter("redrafter", target, tree="topology", topology=[[0], [0, 0]])
    drafters = {"dynamic": dynamic, "beams": beams, "static": static}
    report = run_bench(target.model, drafters, prompt_set, replace(GREEDY, max_nodes=8), progress=False)
    told = {name: one["tree"] for name, one in report["methods"].items()}
    assert told["autoregressive"] is None
    assert told["dynamic"] == "dynamic tree, up to 9 nodes, depth 3; at most 8 nodes a step"
    assert told["beams"] == "beams, 3 x 2; at most 8 nodes a step"
    assert told["static"] == "static tree, 3 nodes, depth 2; at most 8 nodes a step"
    paths = {name: one["topology"] for name, one in report["methods"].items()}
    assert paths == {"autoregressive": None, "dynamic": None, "beams": None, "static": [[0], [0, 0]]}
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    printed = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert f"dynamic: {told['dynamic']}. beams: {told['beams']}." in printed


def test_contexts_that_do_not_fit_are_told_before_anything_is_measured(target, prompt_set, monkeypatch):
    monkeypatch.setattr("headstart.inference.bench.bench.interleave", None)
    with pytest.raises(ValueError, match="contexts must be at least 1 and at most"):
        run_bench(target.model, {}, prompt_set, replace(GREEDY, cost_contexts=(9999,)), progress=False)


def test_prompt_lookup_is_measured_beside_the_drafters(target, drafter, prompt_set):
    methods = bench(target, drafter, prompt_set, replace(GREEDY, prompt_lookup=True))["methods"]
    assert methods["prompt_lookup"]["num_different"] == 0 and methods["prompt_lookup"]["tokens_per_step"] >= 1
    assert methods["prompt_lookup"]["acceptance_by_depth"] is None


def test_sampled_texts_are_compared_under_our_own_noise(target, drafter, prompt_set):
    settings = replace(GREEDY, decoding=Decoding(12, pad_token_id=0, temperature=0.8, top_p=0.9), seed=5)
    report = bench(target, drafter, prompt_set, settings)
    methods = report["methods"]
    assert report["settings"]["reference"] == "no_drafter"
    assert methods["autoregressive"]["num_different"] is None and methods["pairs"]["num_different"] == 0
    assert methods["pairs"]["new_tokens"] == methods["no_drafter"]["new_tokens"]


def test_difference_is_reported_with_its_place_and_gap(target, drafter, prompt_set, monkeypatch):
    from headstart.inference.bench.methods import Autoregressive

    honest = Autoregressive.run

    def wrong(self, prompts, decoding, seeds):
        call = honest(self, prompts, decoding, seeds)
        return replace(call, outputs=[[*text[:4], 63 - text[4], *text[5:]] for text in call.outputs])

    monkeypatch.setattr(Autoregressive, "run", wrong)
    found = bench(target, drafter, prompt_set, GREEDY)["methods"]["pairs"]
    assert found["num_different"] == 4 and found["num_ties"] == 0
    first = found["differences"][0]
    assert first["position"] == 4 and first["gap"] > 0 and first["tie"] is False
    assert first["token"] == transformers_text(target, prompt_set.prompts[0].ids, 12)[4]


def test_costs_come_with_the_speed_they_predict(target, drafter, prompt_set):
    settings = replace(GREEDY, cost_contexts=(8, 16), cost_rounds=2)
    costs = bench(target, drafter, prompt_set, settings)["costs"]
    assert costs["curve"]["contexts"] == [8, 16] and costs["curve"]["nodes"][0] == 1
    explained = costs["explained"]["pairs"]
    assert set(costs["explained"]) == {"pairs"}
    step = explained["T_v"] + explained["T_d"] + explained["T_o"]
    assert explained["predicted"] == pytest.approx(explained["tau"] * explained["T_1"] / step)
    assert explained["error"] == pytest.approx(explained["predicted"] / explained["measured"] - 1)


def test_name_that_is_taken_is_refused(target, drafter, prompt_set):
    with pytest.raises(ValueError, match="autoregressive"):
        run_bench(target.model, {"autoregressive": drafter}, prompt_set, GREEDY, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 2, "prompt_lookup": True}, "one row at a time"),
        ({"batch_size": 0}, "at least 1"),
        ({"repeats": 0}, "at least 1"),
        ({"warm_up": -1}, "at least 0"),
    ],
)
def test_settings_that_cannot_be_measured_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(GREEDY, **settings)
