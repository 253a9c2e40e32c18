from collections import defaultdict

from headstart.inference.bench.measure import WARM_UP_TOKENS, interleave, raw_calls, row_seeds
from headstart.inference.bench.methods import Call, Decoding, Method
from headstart.inference.bench.prompts import BenchPrompt


class Noting(Method):
    def __init__(self, name, log):
        self.name, self.log = name, log

    def run(self, prompts, decoding, seeds):
        self.log.append((self.name, prompts, decoding.max_new_tokens, list(seeds)))
        return Call([[1, 2]] * len(prompts), 1.0, 0.25, 1, 1)


def measured(repeats=1, warm_up=0, seed=0):
    log = []
    batches = [[BenchPrompt("a", "", "", [1]), BenchPrompt("b", "", "", [2])], [BenchPrompt("c", "", "", [3])]]
    methods = [Noting(name, log) for name in "xyz"]
    rounds = interleave(methods, batches, Decoding(64), seed, repeats, warm_up, progress=False)
    return rounds, log


def test_order_of_methods_rotates_from_round_to_round():
    _, log = measured(repeats=2)
    assert [name for name, *_ in log] == [*"xyz", *"yzx", *"zxy", *"xyz"]


def test_warm_up_is_short_and_not_counted():
    rounds, log = measured(warm_up=2)
    assert len(rounds) == 2 and len(log) == 12
    assert [tokens for _, _, tokens, _ in log] == [WARM_UP_TOKENS] * 6 + [64] * 6


def test_methods_of_a_round_get_the_same_prompts_and_seeds():
    _, log = measured(repeats=2)
    for i in range(0, len(log), 3):
        assert len({(str(prompts), str(seeds)) for _, prompts, _, seeds in log[i : i + 3]}) == 1


def test_no_two_rows_of_a_run_share_a_seed():
    _, log = measured(repeats=2)
    seeds = defaultdict(list)
    for name, _, _, row in log:
        seeds[name] += row
    assert all(len(set(found)) == len(found) == 6 for found in seeds.values())
    assert not set(row_seeds(0, 0, 0, 100)) & set(row_seeds(1, 0, 0, 100))


def test_single_calls_are_kept_for_others_to_recompute():
    rounds, _ = measured(repeats=2)
    calls = raw_calls(rounds)
    assert len(calls) == 12
    assert calls[0] == {
        "method": "x", "batch": 0, "repeat": 0, "seconds": 1.0, "prefill_seconds": 0.25, "new_tokens": 4,
        "steps": 1, "step_tokens": 1,
    }  # fmt: skip
