"""Print how fast drafters train, against the floor: the target's forward pass and the drafter's matrix products alone.

    python scripts/throughput.py --families medusa,eagle
    python scripts/throughput.py --families medusa --features features      # from a store: without the target's pass
    python scripts/throughput.py --device cuda --dtype bfloat16 -- --per_device_train_batch_size 8

A family is a file of configs/ without its ending. What stands behind `--` are training flags, which win over the file.

Each family trains in a fresh process, by the trainer's own loop, on the same rows in every epoch. The first epoch warms
up and gives the peak of memory. Then come the rounds, an epoch each: after every optimizer step the floor of its
batches is run and timed. It has two parts: transformers' own forward pass of the target below its head (not with
--features); and the matrix products and attention kernels of the drafter's forward and backward pass, heads and the
target's head over the trained positions included, nothing twice that the loss recomputes. They are noted from a real
pass of each batch, and called again one after the other on tensors of the same shapes, strides and types. The share is
that of a round's sums, its spread that over the rounds. A last epoch, with clocks around the trainer's calls, says
where the time goes. Steps and floor take turns, so a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headstart.distill.dataset import TokenRow
from headstart.inference.bench.machine import machine_facts
from headstart.inference.bench.table import report_console
from headstart.inference.clock import synchronise
from headstart.inference.loading import DTYPES
from headstart.training.command_line import Settings, parse
from headstart.training.floor import Call, again, products_of
from headstart.training.run import build, load, make_trainer, read_rows
from headstart.training.several import method_of
from headstart.training.start_report import gigabytes, peak_memory
from headstart.training.stored import stored
from headstart.training.trainer import DrafterTrainer
from headstart.training.vocabulary import choose_vocabulary

ROOT = Path(__file__).resolve().parent.parent
REST = "the rest"
PARTS = ("target", "drafter forward", "loss", "backward", "optimizer", REST)
"""What a step's time goes into. The loss holds the heads over the vocabulary; the rest is data, clipping, the log."""


class Clock:
    """Splits the time of steps into parts, each moment counted once; while it is off, nothing waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on = device, False
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._at_work = [REST]
        self._since = 0.0

    def start(self) -> None:
        """Leave out what was before."""
        synchronise(self.device)
        self._since = time.perf_counter()

    def mark(self) -> None:
        """Give the time since the last mark to the part at work."""
        before = self._since
        self.start()
        self.seconds[self._at_work[-1]] += self._since - before

    def begin(self, part: str) -> None:
        """Have a part be at work from now on."""
        self.mark()
        self._at_work.append(part)

    def end(self) -> None:
        """Have the part before it be at work again."""
        self.mark()
        self._at_work.pop()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            self.begin(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.end()

        return call


class Rounds(TrainerCallback):
    """Times the steps of a run and, in turns with them, their floor. rounds: epochs between the first and the last."""

    def __init__(self, trainer: DrafterTrainer, rounds: int) -> None:
        self.trainer, self.device = trainer, trainer.args.device
        self.clock = Clock(self.device)
        self.steps, self.target, self.products, self.tokens = ([0.0] * rounds for _ in range(4))
        self.plans: list[list[list[Call]]] = []
        self.peak, self._epoch, self._step, self._since = 0, -1, 0, 0.0
        self._batches: list[dict[str, Tensor]] = []
        step, timed = trainer.training_step, self.clock.timed

        def training_step(model: Any, inputs: dict[str, Tensor], *args: Any) -> Tensor:
            self._batches.append(inputs)
            return step(model, inputs, *args)

        trainer.training_step = training_step  # type: ignore[method-assign]
        trainer.compute_loss = timed("drafter forward", trainer.compute_loss)  # type: ignore[method-assign]
        trainer.make_batch = timed("target", trainer.make_batch)  # type: ignore[method-assign]
        trainer.accelerator.backward = timed("backward", trainer.accelerator.backward)  # type: ignore[method-assign]
        module: Any = sys.modules[type(trainer.drafter).__module__]
        if not trainer.args.torch_compile:  # which would look into the clock
            module.depth_losses = timed("loss", module.depth_losses)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note where the run is."""
        self._epoch, self._step = self._epoch + 1, 0
        self.clock.on = self._epoch > len(self.steps)
        if self._epoch == 0 and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self._go_on()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Time the step, then its floor."""
        synchronise(self.device)
        took, batches, number = time.perf_counter() - self._since, self._batches, self._epoch - 1
        if self.clock.on:
            self.clock.mark()
        elif number >= 0:
            self.steps[number] += took
            self.tokens[number] += float(sum(int(batch["token_mask"].sum()) for batch in batches))
            if self._step == len(self.plans):
                self.plans.append([products_of(self.trainer, batch) for batch in batches])
                self._floor(batches)  # for the kernels that are made on first use
            target, products = self._floor(batches)
            self.target[number] += target
            self.products[number] += products
        self._step += 1
        self._go_on()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Note the most memory that training alone took."""
        if self._epoch == 0:
            self.peak = peak_memory(self.device)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Clock the optimizer."""
        if self.clock.on:
            self.clock.begin("optimizer")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Clock the optimizer."""
        if self.clock.on:
            self.clock.end()

    def _go_on(self) -> None:
        self._batches = []
        self.clock.start()
        self._since = time.perf_counter()

    @torch.no_grad()
    def _floor(self, batches: Sequence[dict[str, Tensor]]) -> tuple[float, float]:
        """Return the seconds of the target's pass and of the drafter's products, over the batches of a step."""
        trainer, target, products = self.trainer, 0.0, 0.0
        for batch, calls in zip(batches, self.plans[self._step], strict=True):
            inputs: Any = trainer._prepare_inputs(batch)  # type: ignore[arg-type]
            if trainer.features.kept is None:
                told = {"input_ids": inputs["tokens"], "attention_mask": inputs["token_mask"].long()}
                target += self._seconds(lambda told=told: trainer.target.model.base_model(**told, use_cache=False))
            products += self._seconds(again(calls))
        return target, products

    def _seconds(self, work: Callable[[], Any]) -> float:
        synchronise(self.device)
        start = time.perf_counter()
        work()
        synchronise(self.device)
        return time.perf_counter() - start


def flags_of(options: argparse.Namespace, family: str, folder: str) -> list[str]:
    """Return the flags of a training run that evaluates and saves nothing and meets its rows in the same order."""
    given: dict[str, Any] = {
        "config": ROOT / "configs" / f"{family}.yaml", "output_dir": folder, "num_train_epochs": options.rounds + 2,
        "held_out_fraction": 0, "feature_cache_gb": 0, "eval_strategy": "no", "save_strategy": "no", "plot": False,
        "train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True,
        "target_dtype": options.dtype, "bf16": options.dtype == "bfloat16", "fp16": options.dtype == "float16",
    }  # fmt: skip
    if options.target is not None:
        given["target"] = options.target
    if options.features is not None:
        given["features"] = options.features
    if options.device == "cpu":
        given["use_cpu"] = True
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + options.flags


def some_rows(rows: Sequence[TokenRow], settings: Settings, steps: int) -> list[TokenRow]:
    """Draw the rows of some optimizer steps, each sorted by length into its batches as training does."""
    args = settings.training
    size = args.train_batch_size * args.gradient_accumulation_steps
    if len(rows) < size * steps:
        raise ValueError(
            f"there must be {size * steps} rows for {steps} steps of {size}, but are {len(rows)}; lower --steps"
        )
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(args.seed)).tolist()
    chosen = [[rows[i] for i in drawn[size * step : size * (step + 1)]] for step in range(steps)]
    return [row for step in chosen for row in sorted(step, key=lambda row: -len(row.input_ids))]


def measure(options: argparse.Namespace, family: str) -> dict[str, Any]:
    """Train one family and return its figures, ready for JSON."""
    with TemporaryDirectory() as folder:
        settings = parse(method_of(f"{family}.yaml"), flags_of(options, family, folder))
        if settings.joint.train_target != "none":
            raise ValueError(f"a frozen target is measured, but {family} trains it too; leave that family out")
        loaded = load(settings)
        rows, vocabulary = read_rows(settings, loaded.tokenizer), None
        if settings.draft_vocab_size is not None:
            vocabulary = choose_vocabulary(
                settings.draft_vocab_size, rows.train, [], loaded.tokenizer, loaded.eos, loaded.target.vocab_size
            )
        rows = replace(rows, train=some_rows(rows.train, settings, options.steps))
        drafter = build(settings, loaded.target, loaded.tokenizer, rows, vocabulary)
        with stored(settings, drafter, loaded.target, loaded.tokenizer, rows.train, [], None) as kept:
            trainer = make_trainer(settings, drafter, loaded.target, rows, loaded.tokenizer, loaded.eos, kept)
            trainer.remove_callback(PrinterCallback)
            rounds = Rounds(trainer, options.rounds)
            trainer.add_callback(rounds)
            trainer.train()
    parts = rounds.clock.seconds
    each = list(zip(rounds.steps, rounds.target, rounds.products, rounds.tokens, strict=True))
    shares = sorted((target + products) / step for step, target, products, _ in each)
    return {
        "family": family,
        "tokens_per_second": median(tokens / step for step, _, _, tokens in each),
        "floor_tokens_per_second": median(tokens / (target + products) for _, target, products, tokens in each),
        "share": median(shares), "share_least": shares[0], "share_most": shares[-1],
        "floor_target": sum(rounds.target) / (sum(rounds.target) + sum(rounds.products)),
        "parts": {name: seconds / sum(parts.values()) for name, seconds in parts.items()},
        "peak_bytes": rounds.peak, "rounds": options.rounds, "steps": options.steps, "tokens": int(rounds.tokens[0]),
        "machine": machine_facts(loaded.target),
    }  # fmt: skip


def in_fresh_process(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a family in a process of its own, whose memory is nobody else's."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [word for word in sys.argv[1:] if word != "--json"]
        at = words.index("--") if "--" in words else len(words)
        command = [*words[:at], "--one", family, "--result", str(result), *words[at:]]
        done = subprocess.run([sys.executable, __file__, *command], stdout=subprocess.DEVNULL, check=False)
        if done.returncode or not result.is_file():
            raise ValueError(f"{family} could not be measured (status {done.returncode}, see above)")
        return json.loads(result.read_text(encoding="utf-8"))


def table_of(found: Sequence[dict[str, Any]]) -> Table:
    """Return the figures as a table."""
    machine, first = found[0]["machine"], found[0]
    title = (
        f"training against the floor: {first['rounds']} rounds of {first['steps']} steps; {machine['dtype']}, "
        f"{machine['accelerator'] or machine['cpu']}, {machine['threads']} threads, load {machine['load_average']}"
    )
    table = Table(title=title, title_justify="left")
    for name in ("family", "tokens/s", "floor", "share of it", "(rounds)", *PARTS, "peak"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for one in found:
        parts = [f"{one['parts'][name]:.0%}" for name in PARTS]
        spread = f"{one['share_least']:.0%}-{one['share_most']:.0%}"
        speeds = [f"{one['tokens_per_second']:,.0f}", f"{one['floor_tokens_per_second']:,.0f}"]
        table.add_row(one["family"], *speeds, f"{one['share']:.0%}", spread, *parts, gigabytes(one["peak_bytes"]))
    return table


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="medusa,eagle", help="files of configs/ (default %(default)s)")
    parser.add_argument("--target", help="default: the files' own")
    parser.add_argument("--features", help="folder of `headstart distill capture`; default: features on the fly")
    parser.add_argument("--dtype", default="bfloat16", choices=[name for name in DTYPES if name != "auto"],
                        help="of the target, and of the drafter's pass (default %(default)s)")  # fmt: skip
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--threads", type=int, help="CPU threads; default: PyTorch's choice")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of a round (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of the table")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="training flags, behind --")
    return parser.parse_args()


def main() -> int:
    """Measure each family and print the table."""
    options = parse_arguments()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that PyTorch sees, but there is none")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.one is not None:
        Path(options.result).write_text(json.dumps(measure(options, options.one)), encoding="utf-8")
        return 0
    found = [in_fresh_process(family, options) for family in options.families.split(",")]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        report_console(stderr=False).print(table_of(found))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError) as error:
        sys.exit(f"throughput.py: {error}")
