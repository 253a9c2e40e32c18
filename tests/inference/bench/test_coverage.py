import pytest
import torch

from headstart.drafters.registry import new_drafter
from headstart.inference.bench.bench import BenchSettings, run_bench
from headstart.inference.bench.coverage import coverage_report
from headstart.inference.bench.measure import Round
from headstart.inference.bench.methods import Call, Decoding
from headstart.inference.bench.prompts import BenchPrompt
from headstart.inference.bench.table import print_report, report_console


def test_share_is_of_tokens_not_of_texts():
    batches = [
        [BenchPrompt("a", "code", "en", [1]), BenchPrompt("b", "qa", "ko", [1])],
        [BenchPrompt("c", "", "", [1])],
    ]
    outputs = [[[5, 7, 7, 7], [6, 6]], [[7, 7]]]
    rounds = [Round(i, 0, {"d": Call(texts, 1.0, 0.5)}) for i, texts in enumerate(outputs)]
    found = coverage_report(torch.tensor([5, 6]), "d", rounds, batches)
    assert found == {
        "size": 2, "coverage": 3 / 8, "by_category": {"code": 0.25, "qa": 1.0}, "by_lang": {"en": 0.25, "ko": 1.0}
    }  # fmt: skip


def test_benchmark_tells_what_a_draft_vocabulary_covers(target, prompt_set, capsys):
    ids = torch.arange(0, 64, 2)
    drafters = {
        "some": new_drafter("medusa", target, ids, num_heads=2).double(),
        "same": new_drafter("medusa", target, ids, num_heads=1).double(),
        "all": new_drafter("medusa", target, num_heads=2).double(),
    }
    report = run_bench(target.model, drafters, prompt_set, BenchSettings(Decoding(8, pad_token_id=0)), progress=False)
    found = report["methods"]["some"]["draft_vocabulary"]
    assert found["size"] == 32 and set(found["by_category"]) == {"maths", "code"}
    assert found["coverage"] == pytest.approx(sum(found["by_category"].values()) / 2)
    assert 0 < found["coverage"] < 1, "an extreme share would prove little"
    assert report["methods"]["all"]["draft_vocabulary"] is None
    assert report["methods"]["some"]["topology"][0] == [0] and report["methods"]["autoregressive"]["topology"] is None
    print_report(report, report_console(stderr=False))
    told = capsys.readouterr().out
    assert told.count("draft vocabulary") == 1
    assert "some and 1 more: the draft vocabulary of 32 tokens covers" in told
