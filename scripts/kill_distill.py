"""Kill `headstart distill` again and again at random moments, and show that no answer is lost, repeated or changed.

    python scripts/kill_distill.py --kills 50

A tiny random target in float64 answers prompts, a few to a shard. Each life of the run is a process of its own (forked
from one that has imported the libraries, or started anew with --fresh) that gets SIGKILL at a random moment: while it
starts, or some shards later, in the middle of a pass or of a write. After each kill every shard must be whole, hold
what it held before, and no id twice. When all prompts are answered, the answers must equal, token for token, those of a
run that nobody killed; if kills are left, another folder is begun. Exit status 1 if anything differs.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from headstart.distill.select import read_answers

VOCAB, SLOTS, NEW_TOKENS = 64, 4, 24
MOST_SHARDS = 4
"""Most shards that a life may write before its time comes."""
POLL = 0.0005


def make_target(folder: Path) -> None:
    """Save a random target of two layers with a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes["num_attention_heads"] = 4
    # large initial weights make logits that differ by much more than rounding
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=2, pad_token_id=2, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", eos_token="w2", pad_token="w2")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def make_prompts(path: Path, count: int) -> None:
    """Write prompts of unlike lengths."""
    draw = random.Random(1)
    lines = []
    for i in range(count):
        words = " ".join(f"w{draw.randrange(3, VOCAB)}" for _ in range(draw.randrange(2, 30)))
        lines.append(json.dumps({"id": f"p{i}", "prompt": words}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def distill(flags: list[str], log: str) -> None:
    """Be one life of the run: what `headstart distill` does, in a forked process."""
    from headstart.cli import main

    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os._exit(main(["distill", *flags]))


class Life:
    """One process of the run. code() is None while it lives."""

    def __init__(self, flags: list[str], log: Path, fresh: bool) -> None:
        self.popen: subprocess.Popen[bytes] | None = None
        if fresh:
            with log.open("a") as file:
                words = [sys.executable, "-m", "headstart.cli", "distill", *flags]
                self.popen = subprocess.Popen(words, stdout=file, stderr=file)
        else:
            self.child = multiprocessing.get_context("forkserver").Process(target=distill, args=(flags, str(log)))
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


def shards_in(folder: Path) -> int:
    """Return how many shards have their name."""
    return sum(1 for _ in folder.glob("answers-*.jsonl"))


def answers_in(folder: Path) -> dict[str, dict]:
    """Return the answers by id; every shard must be whole and no id there twice."""
    found: dict[str, dict] = {}
    for row in read_answers([folder])[1] if shards_in(folder) else ():
        if row["id"] in found:
            raise AssertionError(f"{row['id']} is there twice")
        found[row["id"]] = row
    return found


@dataclass(frozen=True)
class Paces:
    """Seconds to the first shard of a life, and from shard to shard."""

    start: float
    shard: float


def run_to_the_end(flags: list[str], folder: Path, log: Path, fresh: bool) -> Paces:
    """Run without being killed, and measure the paces."""
    begin, before = time.perf_counter(), shards_in(folder)
    life = Life([*flags, "--out", str(folder)], log, fresh)
    life.wait(lambda: shards_in(folder) > before)
    started = time.perf_counter()
    life.wait(lambda: False)
    if life.code() != 0:
        raise AssertionError(f"the run failed with {life.code()}; see {log}")
    return Paces(started - begin, (time.perf_counter() - started) / max(1, shards_in(folder) - before))


def kill_once(flags: list[str], folder: Path, log: Path, draw: random.Random, paces: Paces, fresh: bool) -> str:
    """Live once and be killed; return the moment in words, empty if the run ended first."""
    kept, before = answers_in(folder), shards_in(folder)
    life = Life([*flags, "--out", str(folder)], log, fresh)
    kind, more = draw.choice(("start", "pass", "write")), draw.randrange(1, MOST_SHARDS + 1)
    if kind != "start":
        life.wait(lambda: shards_in(folder) >= before + more)
    if kind == "write":
        life.wait(lambda: any(folder.glob("*.partial")))
    else:
        pause = time.perf_counter() + draw.uniform(0, paces.start if kind == "start" else 2 * paces.shard)
        life.wait(lambda: time.perf_counter() > pause)
    if life.code() is not None:
        if life.code() != 0:
            raise AssertionError(f"the run failed with {life.code()}; see {log}")
        return ""
    life.kill()
    after = answers_in(folder)
    if any(after.get(name) != row for name, row in kept.items()):
        raise AssertionError("an answer that was there before the kill is lost or changed")
    if any(folder.glob("*.partial")):
        return "in the middle of a write"
    return "before the first shard of its life" if len(after) == len(kept) else "between two shards"


def compare(wanted: dict[str, dict], found: dict[str, dict], folder: Path) -> None:
    """Raise AssertionError unless two runs have the same ids, with equal token ids and all else."""
    if found.keys() != wanted.keys():
        raise AssertionError(f"ids that only one run has: {sorted(found.keys() ^ wanted.keys())}; see {folder}")
    unlike = [name for name, row in wanted.items() if found[name] != row]
    if unlike:
        raise AssertionError(f"answers that differ: {unlike}; see {folder}")


def main() -> int:
    """Kill as often as asked and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="default %(default)s")
    parser.add_argument("--prompts", type=int, default=240, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: drawn and printed")
    parser.add_argument("--fresh", action="store_true", help="start each life as a new Python process")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    draw = random.Random(seed)
    print(f"seed {seed}: --seed {seed} draws the same moments", flush=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["headstart.cli", "headstart.distill.command"])

    work = Path(tempfile.mkdtemp(prefix="headstart-kills-"))
    make_target(work / "target")
    make_prompts(work / "prompts.jsonl", options.prompts)
    flags = ["--target", str(work / "target"), "--prompts", str(work / "prompts.jsonl"), "--dtype", "float64"]
    flags += ["--max_new_tokens", str(NEW_TOKENS), "--batch_size", str(SLOTS)]
    log, begin = work / "log", time.perf_counter()
    paces = run_to_the_end(flags, work / "whole", log, options.fresh)
    wanted = answers_in(work / "whole")
    told = f"{len(wanted)} answers in {shards_in(work / 'whole')} shards, {time.perf_counter() - begin:.0f} s"
    print(f"uninterrupted: {told}", flush=True)

    killed, moments, compared = work / "killed", Counter(), 0
    with tqdm(total=options.kills, desc="kills") as bar:
        while sum(moments.values()) < options.kills:
            moment = kill_once(flags, killed, log, draw, paces, options.fresh)
            if moment:
                moments[moment] += 1
                bar.update()
                continue
            compare(wanted, answers_in(killed), killed)
            compared += 1
            shutil.rmtree(killed)
    run_to_the_end(flags, killed, log, options.fresh)
    compare(wanted, answers_in(killed), killed)

    counts = ", ".join(f"{count} {moment}" for moment, count in moments.most_common())
    print(f"{options.kills} kills ({counts}) over {compared + 1} folders")
    print(f"in each {len(wanted)} ids, each once; token ids and all other fields equal the uninterrupted run's")
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AssertionError as error:
        sys.exit(f"kill_distill.py: {error}")
