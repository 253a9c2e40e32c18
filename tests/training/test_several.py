"""Features from a store or shared between drafters give the weights that features made for one drafter alone give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from headstart.cli import main as headstart
from headstart.inference.loading import eos_ids, load_target
from headstart.inference.target import Target, TargetOutput
from headstart.training.command_line import UsageError
from headstart.training.run import Loaded, main, run
from headstart.training.several import method_of, train_several

CACHE = ["--feature_cache_gb", "0.01"]
SHORT = ["--max_steps", "6", "--save_strategy", "no"]


class ReadingTarget(Target):
    """Counts how often it reads whole rows."""

    rows_read = 0

    def encode(self, tokens: torch.Tensor, *args, **kwargs) -> TargetOutput:
        self.rows_read += len(tokens)
        return super().encode(tokens, *args, **kwargs)


@pytest.fixture
def store(target_folder: Path, answers_file: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    words = ["distill", "capture", "--target", str(target_folder), "--data", str(answers_file), "--out", str(folder)]
    assert headstart([*words, "--layers", "final,1,0"]) == 0
    return folder


@pytest.fixture
def loaded(target_folder: Path) -> Loaded:
    model, tokenizer = load_target(str(target_folder))
    return Loaded(ReadingTarget(model), tokenizer, eos_ids(model))


@pytest.fixture
def files(command: Callable[..., list[str]], tmp_path: Path) -> Callable[..., str]:
    """Write a YAML file per drafter from the flags of a short run; return what --drafters takes."""

    def write(**more: list[str]) -> str:
        paths = []
        for name, flags in more.items():
            words = command(*SHORT, *flags, output=tmp_path / "several" / name)
            if not name.startswith(("medusa", "hydra")):
                words = [word for i, word in enumerate(words) if "--num_heads" not in (word, words[i - 1])]
            settings = {key[2:]: value for key, value in zip(words[::2], words[1::2], strict=True)}
            settings["train_data"] = [settings["train_data"]]  # type: ignore[assignment]
            paths.append(tmp_path / f"{name}.yaml")
            paths[-1].write_text(yaml.safe_dump(settings), encoding="utf-8")
        return ",".join(map(str, paths))

    return write


def same_weights(one: Path, other: Path) -> bool:
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_from_a_store_equals_training_online_with_the_cache(command, store: Path, tmp_path, capsys) -> None:
    online = run("medusa", command(*SHORT, *CACHE, output=tmp_path / "online"))
    capsys.readouterr()
    stored = run("medusa", command(*SHORT, "--features", str(store), output=tmp_path / "stored"))
    assert f"features      20 rows read from {store}\n" in capsys.readouterr().out
    assert same_weights(online, stored)


def test_target_does_not_read_rows_that_are_stored(command, loaded: Loaded, store: Path) -> None:
    run("medusa", command(*SHORT, "--features", str(store)), loaded)
    from_store = loaded.target.rows_read  # type: ignore[attr-defined]
    assert from_store <= 1  # building a drafter reads one row of arbitrary tokens, to measure scales
    run("medusa", command(*SHORT, *CACHE, output=store.parent / "online"), loaded)
    assert loaded.target.rows_read >= 20  # type: ignore[attr-defined]


def test_store_of_other_rows_or_another_type_is_refused(command, store: Path, tmp_path, capsys) -> None:
    given = ["--features", str(store)]
    assert main("medusa", command(*SHORT, *given, "--max_length", "5")) == 1
    assert "must hold rows of the data, but not one is there" in capsys.readouterr().err
    assert main("medusa", command(*SHORT, *given, "--target_dtype", "bfloat16")) == 1
    assert "dtype: 'float32' there, 'bfloat16' now" in capsys.readouterr().err
    assert main("medusa", command(*SHORT, "--features", str(tmp_path / "nowhere"))) == 1
    assert "must hold stored features" in capsys.readouterr().err


def test_drafters_trained_together_equal_those_trained_alone_and_share_one_pass(
    command, files, loaded: Loaded, tmp_path: Path, capsys
) -> None:
    together = files(medusa=CACHE, hydra_pp=CACHE)
    folders = train_several(["--drafters", together], loaded)
    assert folders == [tmp_path / "several" / "medusa", tmp_path / "several" / "hydra_pp"]
    assert "one pass of the target for 2 drafters: layers final" in capsys.readouterr().out
    for method, folder in zip(("medusa", "hydra"), folders, strict=True):
        alone = run(method, command(*SHORT, *CACHE, output=tmp_path / f"alone-{method}"))
        assert same_weights(folder, alone)
    train_several(["--drafters", together], loaded)
    assert capsys.readouterr().out.count("already finished") == 2


def test_second_drafter_finds_the_rows_that_the_first_has_read(files, loaded: Loaded) -> None:
    target = loaded.target
    assert isinstance(target, ReadingTarget)
    train_several(["--drafters", files(medusa=CACHE)], loaded)
    one = target.rows_read
    target.rows_read = 0
    train_several(["--drafters", files(medusa_a=CACHE, medusa_b=CACHE)], loaded)
    beyond = target.rows_read - one
    assert 0 < beyond < 20  # what is measured before the first step, and nothing of the 20 rows


def test_one_store_serves_several_drafters(files, store: Path, loaded: Loaded, tmp_path: Path) -> None:
    given = ["--features", str(store)]
    out = tmp_path / "out"
    words = ["--drafters", files(medusa=[], hydra=[]), *given, "--output_dir", str(out)]
    assert train_several(words, loaded) == [out / "medusa", out / "hydra"]
    assert same_weights(out / "medusa", run("medusa", ["--config", str(tmp_path / "medusa.yaml"), *CACHE]))


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        (["--target_dtype", "float64", *CACHE], "must have the same target_dtype, but the first has 'auto'"),
        (["--features", "elsewhere"], "must have the same features, but the first has None"),
    ],
)
def test_drafters_that_cannot_share_a_pass_are_refused(files, second: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        train_several(["--drafters", files(medusa=CACHE, hydra=second)])


def test_nothing_to_share_features_in_and_one_folder_for_two_are_refused(files, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is neither: set feature_cache_gb"):
        train_several(["--drafters", files(medusa=[], hydra=[])])
    same = ["--output_dir", str(tmp_path / "one")]
    with pytest.raises(ValueError, match="output_dir of its own"):
        train_several(["--drafters", files(medusa=[*CACHE, *same], hydra=[*CACHE, *same])])


def test_method_is_the_longest_that_a_file_is_named_after() -> None:
    assert method_of("configs/medusa_full.yaml") == "medusa" and method_of("hydra_pp.yaml") == "hydra"
    with pytest.raises(UsageError, match="must be named after its method"):
        method_of("mine.yaml")


def test_command_without_files_explains_itself(capsys) -> None:
    assert headstart(["train", "--drafters"]) == 2
    assert "usage: headstart train --drafters" in capsys.readouterr().err
