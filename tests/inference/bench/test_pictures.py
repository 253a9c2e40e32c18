import io
from dataclasses import replace

import pytest
from rich.console import Console

from headstart.inference.bench import plots
from headstart.inference.bench.bench import BenchSettings, run_bench
from headstart.inference.bench.methods import Decoding
from headstart.inference.bench.table import print_report

SETTINGS = BenchSettings(Decoding(8, pad_token_id=0), warm_up=0, cost_contexts=(8, 16), cost_rounds=2)


@pytest.fixture
def report(target, drafter, prompt_set):
    return run_bench(target.model, {"pairs": drafter}, prompt_set, SETTINGS, progress=False)


def printed(report):
    console = Console(file=io.StringIO(), width=140)
    print_report(report, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_tables_show_methods_categories_and_costs(report):
    text = printed(report)
    for wanted in ("pairs", "autoregressive", "0 of 4", "reference", "maths", "n=16", "T_v", "threads", "made up"):
        assert wanted in text


def test_tables_show_each_difference_with_its_verdict(report):
    one = {"prompt": "p1", "position": 3, "token": 4, "reference": 5, "gap": 1e-5, "best": [4, 5], "at_edge": False}
    report["methods"]["pairs"] |= {
        "num_different": 2, "num_ties": 1, "differences": [one | {"tie": True}, one | {"tie": False}]
    }  # fmt: skip
    report["methods"]["pairs"]["loops"]["prompts"] = ["p2"]
    text = printed(report)
    assert "2 of 4 (1 ties)" in text and "(a tie)" in text and "NOT a tie" in text and "repeat themselves" in text


def test_pictures_are_written(report, tmp_path):
    written = plots.write_plots(report, tmp_path / "new")
    assert [path.name for path in written] == ["speed.png", "acceptance.png", "costs.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_many_methods_are_numbers_in_a_table_and_look_different_elsewhere(report):
    one = report["methods"]["pairs"]
    report["methods"] |= {f"twin {i}": one for i in range(11)}
    left, right = plots.speed_figure(report).axes
    columns, rows = 12, 1 + len(one["by_category"])
    assert len(left.get_xticklabels()) == columns and len(left.get_yticklabels()) == rows
    assert [text.get_text() for text in left.texts][:columns] == [f"{one['tokens_per_step']:.2f}"] * columns
    assert [text.get_text() for text in right.texts][:columns] == [f"{one['speed_ratio']:.2f}"] * columns
    lines = plots.acceptance_figure(report).axes[0].get_lines()
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == columns


def test_only_what_was_measured_is_drawn(target, prompt_set, tmp_path):
    settings = replace(SETTINGS, cost_contexts=())
    assert plots.write_plots(run_bench(target.model, {}, prompt_set, settings, progress=False), tmp_path) == []


def test_depths_never_reached_are_not_drawn_as_zero(report):
    report["methods"]["pairs"]["acceptance_by_depth"] = [0.5, 0.0]
    report["methods"]["pairs"]["steps"]["reached_by_depth"] = [4, 0]
    figure = plots.acceptance_figure(report)
    assert [list(line.get_ydata()) for line in figure.axes[0].get_lines()] == [[0.5]]


def test_missing_matplotlib_names_the_extra(monkeypatch, report, tmp_path):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"headstart\[demo\]"):
        plots.write_plots(report, tmp_path)
