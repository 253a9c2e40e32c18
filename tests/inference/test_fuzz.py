"""Random calls against the plain loop: whatever is combined, the text is the target's own."""

from __future__ import annotations

import pytest
from fuzz_cases import differs, random_case


@pytest.mark.parametrize("seed", range(40))
def test_random_call_says_what_the_plain_loop_says(seed: int) -> None:
    assert differs(seed) is None


def test_random_calls_cover_what_they_should() -> None:
    cases = [random_case(seed) for seed in range(1_000)]
    assert {case.drafter for case in cases} == {"none", "random", "scripted", "medusa"}
    assert len({case.family for case in cases}) == 13
    assert sum(case.waiting > 0 for case in cases) > 50
    assert len({name for case in cases for name in case.names}) == 12
    assert {len(case.prompts) for case in cases} == {1, 2, 3, 5}


@pytest.mark.slow
def test_a_thousand_random_calls_say_what_the_plain_loop_says() -> None:
    found = [differs(seed) for seed in range(1_000)]
    assert not [case for case in found if case]
