import pytest

from headstart.inference.bench.costs import CostCurve, cost_curve, explain, predicted_ratio
from headstart.inference.bench.measure import Round
from headstart.inference.bench.methods import BASELINE, Call, Decoding

CURVE = CostCurve(1, (100, 200), (1, 8, 16), [[4.0, 5.0, 7.0], [6.0, 7.0, 9.0]], [4.0, 6.0], [[0.0] * 3] * 2)


def test_costs_between_measured_points_are_interpolated_and_held_outside():
    assert CURVE.forward_at(8, 100) == 5.0
    assert CURVE.forward_at(12, 150) == 7.0
    assert CURVE.forward_at(64, 50) == 7.0
    assert CURVE.step_at(150) == 5.0


def test_prediction_is_the_worked_identity():
    assert predicted_ratio(2.4, 40, 50, 8, 2) == pytest.approx(1.6)


def test_prediction_meets_a_run_that_took_exactly_what_the_curve_says():
    # 10 tokens: the prefill's and 9 of three steps, each of 8 nodes, 5 s of forward, 0.6 s of drafting, 0.4 s besides
    base, ours = Call([[0] * 10], 2 + 9 * 4.0, 2.0, 9, 9), Call([[0] * 10], 2 + 3 * 6.0, 2.0, 3, 9)
    method = {
        "steps": {"target_passes": 3, "nodes_per_pass": 8.0},
        "seconds": {
            "prefill": 2.0, "draft": 1.5, "observe": 0.3, "target": 15.0, "verify": 0.6, "commit": 0.3, "other": 0.3
        },
        "mean_context": 100.0, "tokens_per_step": 3.0, "new_tokens": 10,
        "decode_speed_ratio": 36 / 18, "speed_ratio": 38 / 20,
    }  # fmt: skip
    found = explain("d", method, [Round(0, 0, {BASELINE: base, "d": ours})], CURVE)
    assert found is not None
    assert found["error"] == pytest.approx(0) and found["error_whole"] == pytest.approx(0)
    assert found["T_v_in_run"] == pytest.approx(found["T_v"]) and found["T_d"] == pytest.approx(0.6)


def test_methods_without_trees_are_not_explained():
    method = {"steps": {"row_steps": 3}, "seconds": {}, "decode_speed_ratio": 1.0}
    assert explain("prompt_lookup", method, [], CURVE) is None


def test_curve_has_a_time_for_every_point(target):
    curve = cost_curve(target, [16, 8, 8], [4, 1], batch_size=2, rounds=2, progress=False)
    assert curve.contexts == (8, 16) and curve.nodes == (1, 4) and curve.batch_size == 2
    assert all(seconds > 0 for row in curve.forward for seconds in row) and all(step > 0 for step in curve.step)
    assert set(curve.to_dict()) >= {"contexts", "nodes", "forward_seconds", "generate_step_seconds"}


@pytest.mark.parametrize("decoding", [None, Decoding(64, (3,), temperature=0.7, top_k=5)])
def test_steps_of_generate_take_their_tokens_as_the_run_does(target, monkeypatch, decoding):
    configs, generate = [], target.model.generate

    def spied(*args, generation_config, **kwargs):
        configs.append(generation_config)
        return generate(*args, generation_config=generation_config, **kwargs)

    monkeypatch.setattr(target.model, "generate", spied)
    curve = cost_curve(target, [8], [1], rounds=1, progress=False, decoding=decoding)
    asked = decoding or Decoding(1)
    assert {(one.do_sample, one.temperature, one.top_k) for one in configs} == {
        (True, 0.7, 5) if asked.do_sample else (False, None, None)
    }
    assert curve.step[0] > 0


def test_context_that_does_not_fit_the_window_is_refused(target):
    with pytest.raises(ValueError, match="contexts must be at least 1 and at most"):
        cost_curve(target, [60], rounds=1, progress=False)
    with pytest.raises(ValueError, match="contexts must be at least 1"):
        cost_curve(target, [0], rounds=1, progress=False)
