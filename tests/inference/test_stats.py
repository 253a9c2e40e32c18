"""Statistics: what counts as a step, as reached, as accepted."""

from __future__ import annotations

import json

import pytest

from headstart.inference.stats import PHASES, GenerationStats, StepRecord


def record(
    emitted: list[int], accepted: list[int], depth: list[int], nodes: int = 4, columns: int = 10, retained: float = 8.0
) -> StepRecord:
    return StepRecord(emitted, accepted, depth, nodes, columns, retained, dict.fromkeys(PHASES, 0.5))


def stats_of(*records: StepRecord) -> GenerationStats:
    stats = GenerationStats()
    for step in records:
        stats.add(step)
    return stats


def test_tokens_per_step_counts_each_active_row_once_and_tokens_after_cutting() -> None:
    stats = stats_of(record([3, 1], [2, 0], [2, 2]), record([2], [4], [4]))
    assert (stats.tokens, stats.row_steps, stats.target_passes) == (6, 3, 2)
    assert stats.tokens_per_step == 2.0


def test_acceptance_at_a_depth_divides_by_the_steps_that_reached_it_and_had_a_tree_that_deep() -> None:
    # accepted 2 of depth 3; 0 of depth 3; 1 of depth 1, where the tree ended; no tree at all
    stats = stats_of(record([3, 1, 2, 1], [2, 0, 1, 0], [3, 3, 1, 0]))
    assert stats.reached == [3, 1, 1]
    assert stats.accepted == [2, 1, 0]
    assert stats.acceptance_by_depth == [2 / 3, 1.0, 0.0]


def test_depth_that_no_step_reached_has_acceptance_zero() -> None:
    assert stats_of(record([1], [0], [2])).acceptance_by_depth == [0.0, 0.0]


def test_statistics_without_steps_are_zero() -> None:
    stats = GenerationStats()
    assert (stats.tokens_per_step, stats.acceptance_by_depth, stats.wasted_columns) == (0.0, [], 0.0)


@pytest.mark.parametrize("deeper_first", [True, False])
def test_merging_calls_equals_adding_all_their_steps(deeper_first: bool) -> None:
    steps = [record([3], [2], [3]), record([1, 2], [0, 1], [1, 1], nodes=2, columns=20, retained=15.5)]
    if not deeper_first:
        steps.reverse()
    together = stats_of(*steps)
    merged = stats_of(steps[0])
    other = stats_of(steps[1])
    merged.prefill_seconds, other.prefill_seconds = 1.0, 2.0
    merged.merge(other)
    assert merged.prefill_seconds == 3.0
    merged.prefill_seconds = 0.0
    assert merged == together


def test_columns_and_waste_are_those_of_the_last_step() -> None:
    stats = stats_of(record([1], [0], [1]), record([1], [0], [1], columns=30, retained=21.5))
    assert (stats.cache_columns, stats.retained_columns, stats.wasted_columns) == (30, 21.5, 8.5)


def test_seconds_are_summed_by_phase() -> None:
    assert stats_of(record([1], [0], [1]), record([1], [0], [1])).seconds == dict.fromkeys(PHASES, 1.0)


def test_figures_go_into_json_with_the_derived_ones() -> None:
    figures = json.loads(json.dumps(stats_of(record([3], [2], [2])).to_dict()))
    assert figures["tokens_per_step"] == 3.0
    assert figures["acceptance_by_depth"] == [1.0, 1.0]
    assert figures["wasted_columns"] == 2.0
    assert figures["reached"] == [1, 1]
