"""torch.compile gives the losses of the plain pass; what would do nothing or something wrong is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_batches import batch_of, scrambled
from tiny_targets import tiny_target

from headstart.drafters import losses
from headstart.drafters.registry import METHODS, new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target
from headstart.training import speedups
from headstart.training.command_line import parse
from headstart.training.curves import HISTORY
from headstart.training.run import run
from headstart.training.speedups import check_speedups

Flags = Callable[..., list[str]]


def check(command: Flags, *flags: str) -> None:
    settings = parse("medusa", command(*flags))
    check_speedups(settings.joint, settings.training)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--use_liger_kernel", "true"], "would leave a drafter as it is; leave it out, and set torch_compile true"),
        (["--torch_compile", "true", "--train_target", "lora"], "but train_target is lora"),
        (["--torch_compile_mode", "reduce-overhead"], "torch_compile_mode must be one without CUDA graphs"),
        (["--torch_compile_backend", "cudagraphs"], "torch_compile_backend must be one without CUDA graphs"),
    ],
)
def test_setting_that_does_not_go_with_a_drafter_is_refused(command: Flags, flags: list[str], told: str) -> None:
    check(command)
    with pytest.raises(ValueError, match=told):
        check(command, *flags)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
def test_recomputing_is_for_a_target_that_is_trained(command: Flags) -> None:
    with pytest.raises(ValueError, match="but train_target is none: a frozen target keeps none"):
        check(command, "--gradient_checkpointing", "true")
    together = ["--gradient_checkpointing", "true", "--train_target", "lora"]
    check(command, *together)
    with pytest.raises(ValueError, match=r"takes no settings here, but they are \{'use_reentrant': True\}"):
        check(command, *together, "--gradient_checkpointing_kwargs", '{"use_reentrant": true}')


def test_training_in_a_type_that_is_slow_here_warns(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedups, "bfloat16_is_slow", lambda: True)
    run("medusa", command("--max_steps", "1"))
    with pytest.warns(UserWarning, match="no instructions for bfloat16 .* set target_dtype float32 and bf16 false"):
        run("medusa", command("--max_steps", "2", "--bf16", "true"))


def test_run_refuses_before_anything_is_loaded(command: Flags) -> None:
    with pytest.raises(ValueError, match="use_liger_kernel is for models that Liger knows"):
        run("medusa", command("--use_liger_kernel", "true", "--target", "owner/never-loaded"))


def test_compiling_with_weights_cut_up_is_refused(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(ValueError, match="but FSDP was asked for; leave torch_compile out"):
        check(command, "--torch_compile", "true")


def test_compiling_on_a_cpu_needs_a_compiler(command: Flags, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    check(command, "--torch_compile", "true", "--torch_compile_backend", "aot_eager")
    if torch.accelerator.is_available():
        pytest.skip("a GPU needs none")
    with pytest.raises(ValueError, match=r"needs a C\+\+ compiler on a CPU, but there is no no-such-compiler"):
        check(command, "--torch_compile", "true")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("chunk_bytes", [losses.CHUNK_BYTES, 20_000], ids=["whole", "in chunks"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_compiled_pass_gives_losses_and_gradients_of_the_plain_one(
    method: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(losses, "CHUNK_BYTES", chunk_bytes)
    target = tiny_target("llama")
    drafter = scrambled(new_drafter(method, target)).train()
    compiled: Any = torch.compile(drafter, backend="aot_eager")
    for rows, length in ((2, 9), (3, 20), (4, 33), (2, 14), (3, 41)):
        batch, found = batch_of(target, drafter, rows, length), []
        for forward in (compiled, drafter):
            torch.manual_seed(length)  # some methods draw noise
            # Past its limit of shapes the compiler would go back to the plain pass, and say nothing.
            with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):  # type: ignore[attr-defined]
                loss = forward(batch, target).loss
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in drafter.parameters())])
            drafter.zero_grad(set_to_none=True)
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # losses are added up in fp32
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_run_with_compiled_pass_logs_the_losses_of_the_plain_one(command: Flags, tmp_path: Path) -> None:
    torch._dynamo.reset()
    found = []
    for flags in ([], ["--torch_compile", "true"]):
        folder = run("medusa", command("--max_steps", "4", *flags, output=tmp_path / f"run{len(flags)}"))
        history = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
        found.append([line["loss"] for line in history["training"]])
    assert found[1] == pytest.approx(found[0], rel=1e-4) and found[0][0] != found[0][-1]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_steps_too_small_for_bfloat16_are_kept_in_the_weights(command: Flags, target_folder: Path) -> None:
    flags = ["--target_dtype", "bfloat16", "--bf16", "true", "--learning_rate", "1e-5", "--warmup_steps", "0"]
    folder = run("medusa", command(*flags, "--max_steps", "3", "--save_strategy", "steps", "--save_steps", "3"))
    rows = Target(load_target(str(target_folder), "bfloat16")[0]).head_rows(None)  # what each head starts as
    rows = rows.float()
    for place in (folder, folder / "checkpoint-3"):
        weights = load_file(place / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {torch.float32}
        moved = weights["projections.0.weight"] - rows
        rounded = weights["projections.0.weight"].bfloat16().float() - rows
        assert float((moved != 0).float().mean()) > 0.9, "the head learns"
        assert float((rounded != 0).float().mean()) < 0.1, "steps so small are none in bfloat16"
    states = torch.load(folder / "checkpoint-3" / "optimizer.pt", weights_only=True)["state"].values()
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}
