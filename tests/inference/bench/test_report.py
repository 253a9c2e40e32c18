import pytest

from headstart.inference.bench.compare import Divergence
from headstart.inference.bench.measure import Round
from headstart.inference.bench.methods import BASELINE, Call
from headstart.inference.bench.prompts import BenchPrompt
from headstart.inference.bench.report import median_with_interval, method_report, tokens_per_step
from headstart.inference.stats import GenerationStats, StepRecord

BATCHES = [[BenchPrompt("a", "x", "en", [1])], [BenchPrompt("b", "y", "en", [1])], [BenchPrompt("c", "y", "ko", [1])]]
PHASES = {"draft": 0.1, "target": 0.5, "verify": 0.05, "commit": 0.15}


def ours(seconds, tokens=10):
    """Return a call of two steps of which the first accepts one of two nodes and the second both."""
    stats = GenerationStats(prefill_seconds=1.0)
    stats.add(StepRecord([2], [1], [2], 3, 5, 5.0, PHASES))
    stats.add(StepRecord([3], [2], [2], 3, 8, 8.0, PHASES))
    return Call([list(range(tokens))], seconds, 1.0, 2, 5, stats, 0.1)


def rounds_of(*speeds):
    """Return one round a batch and repeat, in which the baseline takes 20 seconds and ours 20 / speed."""
    base = Call([list(range(10))], 20.0, 2.0, 9, 9)
    return [Round(i % 3, i // 3, {BASELINE: base, "d": ours(20.0 / speed)}) for i, speed in enumerate(speeds)]


def test_speed_ratio_is_the_median_of_pairs():
    report = method_report("d", rounds_of(1.0, 2.0, 4.0), BATCHES, [], 0)
    assert report["speed_ratio"] == pytest.approx(2.0)
    low, high = report["speed_ratio_interval"]
    assert low == pytest.approx(1.0) and high == pytest.approx(4.0)


def test_decode_ratio_leaves_the_prefill_and_its_token_out():
    report = method_report("d", rounds_of(2.0, 2.0, 2.0), BATCHES, [], 0)
    assert report["decode_speed_ratio"] == pytest.approx((18 / 9) / (9 / 9))


def test_baseline_is_its_own_measure():
    report = method_report(BASELINE, rounds_of(1.0, 2.0, 4.0), BATCHES, [], 0)
    assert report["speed_ratio"] == 1 and report["speed_ratio_interval"] == [1, 1]
    assert report["tokens_per_step"] == 1 and report["acceptance_by_depth"] == []
    assert set(report["seconds"]) == {"total", "prefill"}


def test_ratio_is_per_token_where_texts_differ_in_length():
    rounds = [Round(0, 0, {BASELINE: Call([[1] * 10], 20.0, 2.0, 9, 9), "d": ours(10.0, tokens=5)})]
    assert method_report("d", rounds, BATCHES[:1], [], 0)["speed_ratio"] == pytest.approx(1.0)


def test_interval_is_the_same_for_the_same_seed_and_narrows_with_more_batches():
    some = [[1.0], [1.2], [1.4], [1.6]]
    assert median_with_interval(some, 3) == median_with_interval(some, 3)
    few, many = median_with_interval(some, 3)[1], median_with_interval(some * 25, 3)[1]
    assert few is not None and many is not None and many[1] - many[0] < few[1] - few[0]


def test_one_batch_alone_has_no_interval():
    assert median_with_interval([[1.5, 1.7]], 0) == (1.6, None)


def test_repeats_of_a_batch_are_drawn_together():
    _, interval = median_with_interval([[1.0] * 50, [2.0] * 50], 0)
    assert interval == [1.0, 2.0], "100 pairs, but only two independent batches"


def test_figures_of_a_drafter_come_from_all_its_steps():
    report = method_report("d", rounds_of(1.0, 2.0, 4.0, 1.0, 2.0, 4.0), BATCHES, [], 0)
    assert report["tokens_per_step"] == 2.5
    assert report["acceptance_by_depth"] == [1.0, 0.5]
    assert report["num_prompts"] == 3 and report["new_tokens"] == 60
    assert report["steps"] == {
        "row_steps": 12, "tokens": 30, "target_passes": 12, "nodes": 36, "nodes_per_pass": 3.0,
        "reached_by_depth": [12, 12], "accepted_by_depth": [12, 6],
    }  # fmt: skip


def test_times_add_up_to_the_whole():
    seconds = method_report("d", rounds_of(1.0, 2.0, 4.0), BATCHES, [], 0)["seconds"]
    parts = [value for name, value in seconds.items() if name != "total"]
    assert sum(parts) == pytest.approx(seconds["total"]) == pytest.approx(35.0)
    assert seconds["observe"] == pytest.approx(0.3) and seconds["commit"] == pytest.approx(0.6)


def test_categories_and_languages_have_their_own_figures():
    report = method_report("d", rounds_of(1.0, 2.0, 4.0), BATCHES, [], 0)
    assert {name: part["speed_ratio"] for name, part in report["by_category"].items()} == {"x": 1.0, "y": 3.0}
    assert {name: part["num_prompts"] for name, part in report["by_lang"].items()} == {"en": 2, "ko": 1}
    assert report["by_lang"]["ko"]["speed_ratio_interval"] is None


def test_texts_that_repeat_themselves_are_named_and_taken_out():
    rounds = rounds_of(1.0, 2.0, 4.0)
    loop = Call([[7] * 20], 20.0, 1.0, 2, 5, ours(1.0).stats)
    rounds[2] = Round(2, 0, {BASELINE: rounds[2].calls[BASELINE], "d": loop})
    loops = method_report("d", rounds, BATCHES, [], 0)["loops"]
    assert loops["prompts"] == ["c"]
    assert loops["without"]["num_prompts"] == 2 and loops["without"]["speed_ratio"] == pytest.approx(1.5)


def test_nothing_but_loops_leaves_no_figures():
    rounds = [Round(0, 0, {BASELINE: Call([[7] * 20], 20.0, 1.0, 19, 19)})]
    without = method_report(BASELINE, rounds, BATCHES[:1], [], 0)["loops"]["without"]
    assert without["speed_ratio"] is None and without["num_prompts"] == 0


def test_differences_are_counted_with_their_ties():
    found = [Divergence("a", 3, 1, 2, 1e-5, (1, 2), True), Divergence("b", 0, 1, 2, 0.5, (2, 3), False)]
    report = method_report("d", rounds_of(1.0, 2.0, 4.0), BATCHES, found, 0)
    assert (report["num_different"], report["num_ties"]) == (2, 1)
    assert report["differences"][0]["gap"] == 1e-5


def test_method_that_does_not_count_steps_has_no_tokens_per_step():
    assert tokens_per_step([Call([[1]], 1.0, 0.5)]) is None
    assert tokens_per_step([Call([[1]], 1.0, 1.0, 0, 0)]) == 0.0
