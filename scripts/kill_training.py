"""Kill a training run again and again at random moments, and show that nothing is lost: no arguments needed.

    python scripts/kill_training.py --kills 50

A tiny random target is trained with a checkpoint after every step. Each life of the run is a process of its own (forked
from one that has imported the libraries, or started anew with --fresh) that gets SIGKILL at a random moment: between
the start and the first checkpoint, or up to `--most_steps` checkpoints later, in the middle of a step or of a save.
After each kill the newest whole checkpoint must load, and be no older than the one before the kill. At the end the
weights must equal those of a run that nobody killed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers.utils import logging

from headstart import AutoDrafter
from headstart.training.checkpoints import PARTIAL, find_newest

ROOT = Path(__file__).resolve().parent.parent
VOCAB, ROWS, BATCH = 64, 24, 4
POLL = 0.001


def make_target(folder: Path) -> None:
    """Save a random target of two layers with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", eos_token="w2", pad_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def make_answers(path: Path) -> None:
    """Write rows of unlike lengths."""
    draw = random.Random(1)
    for i in range(ROWS):
        prompt, answer = ([draw.randrange(3, VOCAB) for _ in range(draw.randrange(3, 12))] for _ in range(2))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"id": f"r{i}", "prompt_ids": prompt, "answer_ids": [*answer, 2]}) + "\n")


def train(flags: list[str], log: str) -> None:
    """Be one life of the run: what `training/train_medusa.py` does, in a forked process."""
    from headstart.training.run import main

    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os._exit(main("medusa", flags))


class Life:
    """One process of the run. alive(), kill() and code() as they say; code is None while it lives."""

    def __init__(self, flags: list[str], log: Path, fresh: bool) -> None:
        self.popen: subprocess.Popen[bytes] | None = None
        if fresh:
            script = str(ROOT / "training" / "train_medusa.py")
            with log.open("a") as file:
                self.popen = subprocess.Popen([sys.executable, script, *flags], stdout=file, stderr=file)
        else:
            self.child = multiprocessing.get_context("forkserver").Process(target=train, args=(flags, str(log)))
            self.child.start()

    def code(self) -> int | None:
        """Return the exit code."""
        return self.popen.poll() if self.popen is not None else self.child.exitcode

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()
        else:
            self.child.kill()
            self.child.join()

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for something, or for the end of the process."""
        while self.code() is None and not until():
            time.sleep(POLL)


def reached(folder: Path, step: int) -> bool:
    """Whether a checkpoint of this step or a later one has its name."""
    return any(int(path.name.partition("-")[2]) >= step for path in folder.glob("checkpoint-*"))


def newest_step(folder: Path) -> int:
    """Return the step of the last whole checkpoint, 0 without one; the checkpoint must load."""
    newest = find_newest(folder).newest
    if newest is None:
        return 0
    AutoDrafter.from_pretrained(newest)
    torch.load(newest / "optimizer.pt", weights_only=True)
    torch.load(newest / "scheduler.pt", weights_only=True)
    state = json.loads((newest / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == int(newest.name.partition("-")[2]), newest
    return state["global_step"]


def kill_once(flags: list[str], folder: Path, log: Path, draw: random.Random, options: argparse.Namespace) -> str:
    """Live once and be killed; return the moment in words, empty if the run ended first."""
    before = newest_step(folder)
    life = Life(flags, log, options.fresh)
    more = draw.randrange(options.most_steps + 1)
    if more:
        life.wait(lambda: reached(folder, before + more))
        pause = time.perf_counter() + draw.uniform(0, 2 * options.step_seconds)
        life.wait(lambda: time.perf_counter() > pause)
    else:
        pause = time.perf_counter() + draw.uniform(0, options.start_seconds)
        life.wait(lambda: time.perf_counter() > pause or reached(folder, before + 1))
    if life.code() is not None:
        assert life.code() == 0, f"the run failed; see {log}"
        return ""
    life.kill()
    after = newest_step(folder)
    assert after >= before, f"checkpoint-{before} was there before the kill, but now the newest is {after}"
    if list((folder / PARTIAL).glob("checkpoint-*")):
        return "in the middle of a save"
    return "before its first step was saved" if after == before else "between two saves"


def run_to_the_end(flags: list[str], log: Path, fresh: bool) -> tuple[float, float]:
    """Train without being killed; return the seconds to the first checkpoint, and those to the end."""
    begin = time.perf_counter()
    life = Life(flags, log, fresh)
    life.wait(lambda: reached(Path(flags[-1]), 1))
    started = time.perf_counter() - begin
    life.wait(lambda: False)
    assert life.code() == 0, f"the run failed with {life.code()}; see {log}"
    return started, time.perf_counter() - begin


def main() -> None:
    """Kill as often as asked and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--most_steps", type=int, default=4, help="most checkpoints that a life may write")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--fresh", action="store_true", help="start each life as a new Python process")
    options = parser.parse_args()
    logging.disable_progress_bar()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # killed processes give back no semaphores
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    draw = random.Random(seed)
    print(f"seed {seed}: --seed {seed} draws the same moments", flush=True)
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["headstart.training.run"])
    first = server.Process(target=int)  # the libraries are imported here, not in the time that a life takes to start
    first.start()
    first.join()

    work = Path(tempfile.mkdtemp(prefix="headstart-kills-"))
    make_target(work / "target")
    make_answers(work / "answers.jsonl")
    steps = options.kills * options.most_steps + 5
    flags = ["--target", str(work / "target"), "--train_data", str(work / "answers.jsonl"), "--num_heads", "2"]
    flags += ["--max_steps", str(steps), "--per_device_train_batch_size", str(BATCH), "--save_strategy", "steps"]
    flags += ["--save_steps", "1", "--eval_strategy", "no", "--eval_prompts", "0", "--feature_cache_gb", "0.001"]
    flags += ["--report_to", "none", "--disable_tqdm", "true", "--logging_steps", "50", "--output_dir"]
    whole, killed, log = work / "whole", work / "killed", work / "killed.log"
    options.start_seconds, seconds = run_to_the_end([*flags, str(whole)], work / "whole.log", options.fresh)
    options.step_seconds = (seconds - options.start_seconds) / steps
    print(f"uninterrupted: {steps} steps, {seconds:.0f} s", flush=True)

    moments: Counter[str] = Counter()
    while sum(moments.values()) < options.kills:
        moment = kill_once([*flags, str(killed)], killed, log, draw, options)
        assert moment, "the run ended before all kills; raise --most_steps"
        moments[moment] += 1
        print(f"kill {sum(moments.values()):3}: {moment}; newest checkpoint {newest_step(killed)}", flush=True)
    run_to_the_end([*flags, str(killed)], log, options.fresh)

    for name in ("model.safetensors", f"checkpoint-{steps}/model.safetensors"):
        wanted, found = load_file(whole / name), load_file(killed / name)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), f"{name} differs"
    counts = ", ".join(f"{count} {moment}" for moment, count in moments.most_common())
    passed = log.read_text(encoding="utf-8").count("passed over partial/")
    print(f"{options.kills} kills ({counts}); starts that passed over an unfinished checkpoint: {passed}")
    print("after each kill the newest checkpoint loaded; at the end all weights equal the uninterrupted run's bits")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
