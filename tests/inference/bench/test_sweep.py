from dataclasses import replace

import pytest
from tiny_batches import scrambled

from headstart.drafters.registry import new_drafter
from headstart.inference.bench import plots
from headstart.inference.bench.bench import BenchSettings
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.sweep import Sweep, parse_sweep, run_sweep

SETTINGS = BenchSettings(Decoding(8, pad_token_id=0), warm_up=0, cost_contexts=(8, 16), cost_rounds=1)


@pytest.fixture
def heads(target):
    return scrambled(new_drafter("medusa", target, num_heads=3))


def swept(target, heads, prompt_set, text, settings=SETTINGS):
    return run_sweep(target.model, {"heads": heads}, prompt_set, settings, parse_sweep(text), progress=False)


@pytest.mark.parametrize(
    ("text", "parameter", "values"),
    [
        ("draft_length=1..4", "draft_length", (1, 2, 3, 4)),
        ("nodes=2..9:3", "nodes", (2, 5, 8)),
        ("nodes=16,4,8,4", "nodes", (4, 8, 16)),
        ("draft_length=1,3..4", "draft_length", (1, 3, 4)),
    ],
)
def test_values_are_read_and_sorted(text, parameter, values):
    assert parse_sweep(text) == Sweep(parameter, values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node=2", "did you mean 'nodes'"),
        ("temperature=1", "over draft_length or nodes"),
        ("nodes=two", "1..8, 2..32:2 or 4,8,16"),
        ("nodes", "1..8, 2..32:2 or 4,8,16"),
        ("nodes=2..8:0", "1..8, 2..32:2 or 4,8,16"),
        ("nodes=1..4", "at least 2"),
        ("draft_length=0", "at least 1"),
        ("draft_length=4..2", "at least 1"),
    ],
)
def test_what_cannot_be_swept_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_sweep(text)


def test_chains_stop_where_the_heads_end_and_say_so(target, heads, prompt_set):
    report = swept(target, heads, prompt_set, "draft_length=1..5")
    points = report["sweep"]["points"]
    assert [(point["value"], point["nodes"], point["depth"]) for point in points] == [(1, 2, 1), (2, 3, 2), (3, 4, 3)]
    assert report["sweep"]["notes"] == ["heads guesses at most 3 tokens ahead: draft_length=4 and beyond is left out"]
    assert list(report["methods"]) == ["autoregressive", *(f"heads draft_length={value}" for value in (1, 2, 3))]
    assert all(method["num_different"] == 0 for method in report["methods"].values())
    assert report["costs"]["curve"]["nodes"] == [1, 2, 3, 4]


def test_longer_chains_bring_no_fewer_tokens_and_formula_is_the_identity(target, heads, prompt_set):
    points = swept(target, heads, prompt_set, "draft_length=1..3")["sweep"]["points"]
    rates = [point["tokens_per_step"] for point in points]
    assert rates == sorted(rates) and rates[-1] > 1
    for point in points:
        step = point["T_v"] + point["T_d"] + point["T_o"]
        assert point["predicted"] == pytest.approx(point["tokens_per_step"] * point["T_1"] / step)
        assert point["error"] == pytest.approx(point["predicted"] / point["measured"] - 1)


def test_trees_of_several_sizes_are_the_best_for_these_texts(target, heads, prompt_set):
    points = swept(target, heads, prompt_set, "nodes=2,6,12")["sweep"]["points"]
    assert [point["nodes"] for point in points] == [2, 6, 12]
    assert points[-1]["tokens_per_step"] > points[0]["tokens_per_step"]


def test_drafter_keeps_its_own_tree(target, heads, prompt_set):
    before = heads.topology
    swept(target, heads, prompt_set, "draft_length=1")
    assert heads.topology == before


def test_sweep_without_a_drafter_or_of_one_that_draws_its_own_trees_is_refused(target, drafter, prompt_set):
    with pytest.raises(ValueError, match="needs a drafter"):
        run_sweep(target.model, {}, prompt_set, SETTINGS, Sweep("nodes", (2,)), progress=False)
    with pytest.raises(ValueError, match="draws its own trees"):
        swept(target, drafter, prompt_set, "draft_length=1..2")


def test_picture_shows_measured_points_and_the_formula(target, heads, prompt_set):
    report = swept(target, heads, prompt_set, "draft_length=1..3")
    above, below = plots.sweep_figure(report).axes
    drawn = {line.get_label(): line for line in above.get_lines()}
    points = report["sweep"]["points"]
    assert list(drawn["heads, measured"].get_ydata()) == [point["measured"] for point in points]
    assert list(drawn["heads, formula"].get_ydata()) == [point["predicted"] for point in points]
    assert list(below.get_lines()[0].get_ydata()) == [point["tokens_per_step"] for point in points]


def test_sampled_sweep_says_what_the_model_says(target, heads, prompt_set):
    settings = replace(SETTINGS, decoding=Decoding(8, pad_token_id=0, temperature=0.8))
    methods = swept(target, heads, prompt_set, "nodes=4", settings)["methods"]
    assert methods["heads nodes=4"]["num_different"] == 0
