"""Joint training as a run: two stages, what is saved, going on to the bit, evaluation with the adapted target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headstart import AutoDrafter, attach
from headstart.cli import main as command_line
from headstart.drafters.medusa import MedusaDrafter
from headstart.drafters.modules import LogitScale
from headstart.inference.loading import load_target
from headstart.training.command_line import parse
from headstart.training.run import build as build_drafter
from headstart.training.run import load, main, make_trainer, read_rows, run
from headstart.training.several import train_several
from headstart.training.trainer import DrafterTrainer

Flags = Callable[..., list[str]]
LORA = ["--train_target", "lora", "--lora_r", "4", "--target_learning_rate", "1e-2", "--drafter_only_steps", "2"]
EOS = [2]


def trainer_of(flags: list[str], method: str = "medusa") -> DrafterTrainer:
    """Return the trainer that a command makes."""
    settings = parse(method, flags)
    loaded = load(settings)
    rows = read_rows(settings, loaded.tokenizer)
    torch.manual_seed(0)
    drafter = build_drafter(settings, loaded.target, loaded.tokenizer, rows, None)
    return make_trainer(settings, drafter, loaded.target, rows, loaded.tokenizer, EOS)


def text(model: Any) -> list[int]:
    inputs = torch.tensor([[1, 7, 8, 9]])
    return model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=16, do_sample=False).tolist()


def test_run_leaves_drafter_adapter_and_a_report_of_the_target(
    command: Flags, target_folder: Path, answers_file: Path, capsys
) -> None:
    folder = run("medusa", command(*LORA, "--num_train_epochs", "2", "--drafter_loss_weight", "0.5"))
    said = capsys.readouterr().out
    assert "target (lora): 2,112 at learning rate 0.01, from step 3 on; held to its law before training" in said
    assert "the target has changed: on " in said and "made at every step, since the target changes" in said
    assert sorted(path.name for path in (folder / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = AutoDrafter.from_pretrained(folder).config
    report = json.loads((folder / "target_change.json").read_text(encoding="utf-8"))
    assert report.items() >= {**config.adapted_target, **config.measured["target_change"]}.items()
    assert report["kl"] > 0 and 0 <= report["agreement"] <= 1 and report["perplexity_before"] > 1
    log = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    assert [line.get("drafter_loss_weight") for line in log if "loss" in line] == [None] * 2 + [0.5] * 6
    assert "eval_target_kl" in {name for line in log for name in line}

    model, _ = load_target(str(target_folder))
    original = text(model)
    fast = attach(model, folder, apply_adapter=True)
    assert text(fast) == text(model) != original
    assert text(fast.detach()) == original


def test_checkpoints_hold_what_is_trained_and_nothing_frozen(command: Flags) -> None:
    folder = run("medusa", command(*LORA, "--max_steps", "4", "--save_strategy", "steps", "--save_steps", "4"))
    names = set(load_file(folder / "checkpoint-4" / "adapter" / "adapter_model.safetensors"))
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    drafter = load_file(folder / "checkpoint-4" / "model.safetensors")
    assert set(drafter) == set(AutoDrafter.from_pretrained(folder).state_dict())
    optimizer = torch.load(folder / "checkpoint-4" / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(names) + len([t for t in drafter.values() if t.is_floating_point()])
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".md")]


@pytest.mark.parametrize("how", [["lora"], ["lora", "--gradient_checkpointing", "true"], ["full"]])
@pytest.mark.parametrize("stop", [2, 4], ids=["before the target joins", "after"])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_run_that_goes_on_equals_the_uninterrupted_one_to_the_bit(
    command: Flags, tmp_path: Path, how: list[str], stop: int
) -> None:
    more = ["--drafter_only_steps", "3", "--lora_dropout", "0.2", "--lora_r", "4", "--save_total_limit", "9"]
    flags = ["--train_target", *how, *more, "--save_steps", str(stop), "--save_strategy", "steps"]
    flags += ["--max_steps", "6", "--eval_strategy", "no"]
    whole = run("medusa", command(*flags))
    killed = tmp_path / "killed"
    killed.mkdir()
    shutil.copytree(whole / f"checkpoint-{stop}", killed / f"checkpoint-{stop}")
    record = json.loads((whole / "run.json").read_text(encoding="utf-8"))
    (killed / "run.json").write_text(json.dumps({**record, "finished": False}), encoding="utf-8")
    resumed = run("medusa", command(*flags, output=killed))
    place = "target/model.safetensors" if how == ["full"] else "adapter/adapter_model.safetensors"
    for file in ("model.safetensors", place):
        wanted, found = load_file(whole / file), load_file(resumed / file)
        assert all(torch.equal(found[name], value) for name, value in wanted.items()), file


def changed(trainer: DrafterTrainer) -> dict[str, Tensor]:
    assert trainer.joint is not None
    return {name: p.detach().clone() for name, p in trainer.joint.changes.trained.items()}


def test_target_is_frozen_until_it_joins_and_learns_at_a_rate_of_its_own(command: Flags) -> None:
    flags = command(*LORA, "--max_steps", "2", "--eval_strategy", "no", "--save_strategy", "no")
    trainer = trainer_of(flags)
    before = changed(trainer)
    with pytest.warns(UserWarning, match="the target never learns: drafter_only_steps leaves it no step"):
        trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in changed(trainer).items())
    trainer = trainer_of([*flags, "--max_steps", "6", "--warmup_steps", "2", "--lr_scheduler_type", "constant"])
    trainer.train()
    assert all(not torch.equal(value, before[name]) for name, value in changed(trainer).items())
    assert trainer.optimizer is not None
    rates = {(group["part"], group["lr"]) for group in trainer.optimizer.param_groups}
    assert rates == {("drafter", 1e-3), ("drafter", 1e-3 * LogitScale.RATE), ("target", 1e-2)}
    assert trainer.optimizer.param_groups[0]["part"] == "drafter", "the log shows the first group's rate"


def test_gradients_of_drafter_and_target_are_clipped_together(command: Flags) -> None:
    flags = ["--max_steps", "1", "--drafter_only_steps", "0", "--drafter_loss_weight", "1", "--warmup_steps", "0"]
    flags += ["--optim", "sgd", "--learning_rate", "0.5", "--target_learning_rate", "0.25", "--max_grad_norm", "1e-3"]
    trainer = trainer_of(command(*LORA, *flags, "--eval_strategy", "no", "--save_strategy", "no"))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    squares = {"drafter": 0.0, "language_model": 0.0}
    for name, parameter in trainer.model.named_parameters():
        part = name.partition(".")[0]
        rate = 0.5 * LogitScale.RATE if "logit_scale" in name else 0.5 if part == "drafter" else 0.25
        step = (parameter.detach() - before[name]).double() / rate
        squares[part] += float(step.square().sum())
    assert all(squares.values()) and sum(squares.values()) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_evaluation_is_that_of_the_adapted_target_as_it_is_served(
    command: Flags, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, propose = set(), MedusaDrafter.propose

    def noted(self: MedusaDrafter, *args: Any) -> Any:
        seen.add(next(p.dtype for name, p in trainer.target.model.named_parameters() if ".lora_" in name))
        return propose(self, *args)

    trainer = trainer_of(command(*LORA, "--target_dtype", "bfloat16", "--eval_prompts", "4"))
    assert trainer.joint is not None
    monkeypatch.setattr(MedusaDrafter, "propose", noted)
    with torch.no_grad():
        for name, parameter in trainer.joint.changes.trained.items():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    metrics = trainer.evaluate()
    assert seen == {torch.bfloat16}
    assert {p.dtype for p in trainer.joint.changes.trained.values()} == {torch.float32}
    assert trainer.change is not None and trainer.change.kl > 0.01 and metrics["eval_target_kl"] > 0.01
    trainer.save_model()
    model, _ = load_target(str(target_folder), "bfloat16")
    fast = attach(model, str(trainer.args.output_dir), apply_adapter=True)
    prompts = trainer.prompts_of(trainer.held_out)
    with trainer.joint.changes.served():
        served = trainer.target.model.get_parameter("model.layers.0.mlp.up_proj.lora_A.default.weight").clone()
    assert torch.equal(fast.model.get_parameter("model.layers.0.mlp.up_proj.lora_A.default.weight"), served)
    assert trainer.generation is not None and len(prompts) == 4


def test_report_is_the_change_by_hand(command: Flags, target_folder: Path) -> None:
    trainer = trainer_of(command(*LORA, "--target_dtype", "float64"))
    assert trainer.joint is not None
    with torch.no_grad():
        for parameter in trainer.joint.changes.trained.values():
            parameter.add_(0.2)
    trainer.evaluate()
    laws, labels = [], []
    for model in (load_target(str(target_folder), "float64")[0], trainer.target.model):
        rows = [torch.from_numpy(row.input_ids.astype("int64")) for row in trainer.held_out]
        marks = [torch.from_numpy(row.loss_mask)[1:] for row in trainer.held_out]
        with torch.no_grad():
            laws.append(torch.cat([model(r[None]).logits[0, :-1][m] for r, m in zip(rows, marks, strict=True)]))
        labels = torch.cat([row[1:][mark] for row, mark in zip(rows, marks, strict=True)])
    before, now = (law.log_softmax(-1) for law in laws)
    change = trainer.change
    assert change is not None and change.tokens == len(labels)
    assert change.kl == pytest.approx(float((before.exp() * (before - now)).sum(-1).mean()))
    assert change.agreement == pytest.approx(float((before.argmax(-1) == now.argmax(-1)).double().mean()))
    for found, law in ((change.perplexity_before, before), (change.perplexity_after, now)):
        assert found == pytest.approx(float(law.gather(1, labels[:, None]).mean().neg().exp()))


def test_merged_target_lies_beside_its_drafter(command: Flags) -> None:
    folder = run("medusa", command(*LORA, "--max_steps", "4", "--merge_adapter", "true"))
    model, _ = load_target(str(folder / "target"))  # with its tokenizer
    fast = attach(model, folder)
    assert fast.adapter is None and text(fast) == text(model)


def test_target_trained_whole_lies_beside_its_drafter_in_the_type_it_is_served_in(command: Flags) -> None:
    flags = ["--train_target", "full", "--target_dtype", "bfloat16", "--max_steps", "4", "--save_strategy", "steps"]
    flags += ["--save_steps", "4", "--bf16", "true", "--target_learning_rate", "1e-2"]
    folder = run("medusa", command(*flags))
    model, _ = load_target(str(folder / "target"))
    assert model.dtype == torch.bfloat16 and attach(model, folder).adapter is None
    kept = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4" / "target")
    assert kept.dtype == torch.float32


def test_best_checkpoint_brings_its_adapter_back(command: Flags) -> None:
    flags = ["--max_steps", "4", "--load_best_model_at_end", "true", "--eval_strategy", "steps", "--eval_steps", "1"]
    flags += ["--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "9", "--greater_is_better", "true"]
    folder = run("medusa", command(*LORA, *flags, "--metric_for_best_model", "target_perplexity"))
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    best = Path(state["best_model_checkpoint"])
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        wanted, found = load_file(best / file), load_file(folder / file)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("flags, told", [
    (["--feature_cache_gb", "1"], "so its features cannot be kept, but feature_cache_gb is 1.0; set it to 0"),
    (["--features", "store"], "so its features cannot come from a store, but features is store; drop it"),
    (["--train_target", "full", "--load_in_8bit", "true"], "a target in 8 bits cannot be trained whole"),
    (["--merge_adapter", "true", "--load_in_4bit", "true"], "cannot be merged into weights of 4 bits"),
    (["--lora_target_modules", "query"], "lora_target_modules must be of down_proj, .* but one is 'query'"),
    (["--lr_scheduler_type", "reduce_lr_on_plateau"], "lr_scheduler_type gives a ReduceLROnPlateau"),
])  # fmt: skip
def test_settings_that_do_not_go_with_a_changing_target_are_refused_by_name(
    command: Flags, flags: list[str], told: str, capsys
) -> None:
    with pytest.raises(ValueError, match=told):
        run("medusa", command(*LORA, *flags))


def test_drafters_that_share_a_target_cannot_change_it(command: Flags, tmp_path: Path) -> None:
    file = tmp_path / "medusa.yaml"
    file.write_text("num_heads: 2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="medusa has train_target lora"):
        train_several(["--drafters", f"{file},medusa={file}", *command(*LORA, "--feature_cache_gb", "1")])


def test_frozen_and_trained_target_do_not_share_a_folder(command: Flags) -> None:
    run("medusa", command("--max_steps", "1"))
    with pytest.raises(ValueError, match="train_target: 'none' there, 'lora' now"):
        run("medusa", command(*LORA, "--max_steps", "2"))


def test_quantised_target_without_a_gpu_is_told(command: Flags, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main("medusa", command(*LORA, "--load_in_4bit", "true")) == 1
    assert "loading in 4 or 8 bit needs bitsandbytes and a GPU" in capsys.readouterr().err
    monkeypatch.setattr("headstart.inference.loading.find_spec", lambda name: name)
    assert main("medusa", command(*LORA, "--load_in_4bit", "true")) == 1
    assert "loading in 4 or 8 bit needs a GPU, but there is none here" in capsys.readouterr().err


def test_commands_put_the_adapter_on_when_asked_to(
    command: Flags, target_folder: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run("medusa", command(*LORA, "--max_steps", "4", "--drafter_loss_weight", "0.5"))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"w{i} w{i + 3}"}]} for i in range(4)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    few = ["--prompts", str(prompts), "--num_prompts", "2", "--max_new_tokens", "6"]
    calls = {
        "generate": ["--drafter", str(folder), "--prompt", "w1 w2", "--max_new_tokens", "8", "--json"],
        "bench": ["--drafters", str(folder), *few, "--json"],
        "tune": ["--drafter", str(folder), *few, "--proof_prompts", "1", "--rounds", "1", "--contexts", "8"],
    }
    calls["tune"] += ["--dry_run", "--json"]
    answers = ["--prompts", str(prompts), "--max_new_tokens", "6", "--dtype", "float32", "--json", "--out"]
    calls["distill"] = ["--drafter", str(folder), *answers, str(tmp_path / "adapted")]
    for name, flags in calls.items():
        words = [name, "--target", str(target_folder), *flags]
        assert command_line(words) == 1
        assert "pass apply_adapter=True (--apply_adapter)" in capsys.readouterr().err
        assert command_line([*words, "--apply_adapter"]) == 0
        assert json.loads(capsys.readouterr().out)
    plain = ["distill", "--target", str(target_folder), *answers]  # other answers than the adapted target's
    assert command_line([*plain, str(tmp_path / "adapted")]) == 1
    assert "adapter: 'sha256:" in capsys.readouterr().err
    assert command_line([*plain, str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert command_line([*plain, str(tmp_path / "none"), "--apply_adapter"]) == 2
    assert "there is no --drafter" in capsys.readouterr().err


def test_missing_peft_is_told_with_what_to_install(command: Flags, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("headstart.inference.adapters.find_spec", lambda name: None)
    assert main("medusa", command(*LORA)) == 1
    assert "pip install 'headstart[lora]'" in capsys.readouterr().err
