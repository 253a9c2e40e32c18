"""Print what a Medusa step's loss adds to memory on a real target's head, and that chunks change no gradient.

    python scripts/loss_memory.py --target .cache/smollm2-135m-instruct
    python scripts/loss_memory.py --target .cache/smollm2-135m-instruct --loss kl jsd --rows 1 --length 257

Two fresh processes for each loss, one after the other. The first computes the gradients of a small batch twice, in
chunks and over all positions at once from the equations, and compares them. The second takes one step at full size: it
loads the target, makes features, drafter and optimizer, marks what is in use then, and reports the peak of the step
(loss, backward, update) above that mark. On a CPU the peak is that of the process's resident memory (VmHWM, reset at
the mark), on a GPU torch's. Then it times loss and backward pass some more and reports the shortest: on a CPU the
process's own seconds, which others on the machine lengthen least.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from headstart.drafters.base import DraftBatch, Drafter
from headstart.drafters.config import LOSSES
from headstart.drafters.registry import new_drafter
from headstart.inference.loading import load_target
from headstart.inference.target import Target

HEADS = 4
TIMES = 3


def make_batch(target: Target, rows: int, length: int) -> DraftBatch:
    """Make a batch of random tokens, all trained but the first of each row, with the target's features."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, target.vocab_size, (rows, length), generator=draw).to(target.device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    positions = torch.arange(length, device=target.device).expand(rows, -1)
    with torch.no_grad():
        final = torch.cat([target.encode(tokens[i : i + 1], mask[:1], ()).final for i in range(rows)])
    return DraftBatch(tokens, mask, positions > 0, positions, torch.zeros_like(tokens), final[:, :, None], final)


def plain_loss(drafter: Drafter, target: Target, batch: DraftBatch) -> Tensor:
    """Compute Medusa's loss from its equations, over all positions at once.

    Head k at position t learns the target's law of tokens[t + 1 + k], which is made from final[t + k].
    """
    total = torch.zeros((), device=target.device)
    with torch.no_grad():
        law = target.logits(batch.final).float().softmax(-1)
    x = batch.features[:, :, 0].float()
    x = x * x.pow(2).mean(-1, keepdim=True).clamp(min=1e-12).rsqrt()
    weight, scales = drafter.config.depth_weight, drafter.get_submodule("logit_scale")()
    for k in range(1, HEADS + 1):
        state = drafter.get_submodule(f"blocks.{k - 1}")(x[:, : -1 - k])
        logits = drafter.get_submodule(f"projections.{k - 1}")(state) * scales[k - 1]
        labels = batch.tokens[:, k + 1 :, None]
        total = total + weight**k * plain_sum(drafter.config.loss, logits.log_softmax(-1), law[:, k:-1], labels)
    return total / batch.loss_mask.sum()


def plain_sum(loss: str, log_q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    """Compute the sum of a loss over all positions from its definition; laws [..., V], labels [..., 1]."""
    q = log_q.exp()
    if loss == "ce":
        return -log_q.gather(-1, labels).sum()
    if loss == "kl":
        return -(p * log_q).sum()
    if loss == "reverse_kl":
        return (q * (log_q - p.log())).sum()
    if loss == "jsd":
        log_m = ((p + q) / 2).log()
        return (p * (p.log() - log_m) + q * (log_q - log_m)).sum() / 2
    variation = (p - q).abs().sum() / 2
    if loss == "tv":
        return variation
    share = torch.exp(-3 * (1 - variation.detach() / labels.numel()))
    return share * -(p * log_q).sum() + (1 - share) * variation


def compare_gradients(name: str, length: int, kind: str) -> dict[str, float]:
    """Return the largest difference between the gradients of both losses, as a share of the largest gradient."""
    target = Target(load_target(name, "float32")[0])
    batch = make_batch(target, 2, length)
    drafter = new_drafter("medusa", target, num_heads=HEADS, loss=kind)
    found = []
    for loss in (lambda: drafter(batch, target).loss, lambda: plain_loss(drafter, target, batch)):
        drafter.zero_grad()
        value = loss()
        value.backward()
        grads = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
        found.append((float(value.detach()), grads))
    (chunked, grads), (plain, wanted) = found
    worst = max(float((grads[n] - g).abs().max() / g.abs().max()) for n, g in wanted.items())
    return {"positions": float(batch.loss_mask.sum()), "chunked": chunked, "plain": plain, "difference": worst}


def full_step(name: str, rows: int, length: int, kind: str) -> dict[str, float]:
    """Take one step at full size; return bytes: what was in use before it, and how much more at its peak.

    And the seconds of a loss and its backward pass.
    """
    model, _ = load_target(name)
    target = Target(model)
    batch = make_batch(target, rows, length)
    drafter = new_drafter("medusa", target, num_heads=HEADS, loss=kind).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-6, foreach=False)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates both moments
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    gradients = sum(p.numel() * p.element_size() for p in drafter.parameters())
    optimizer.zero_grad(set_to_none=True)  # gradients belong to the step
    before = mark(target.device)
    loss = drafter(batch, target).loss
    loss.backward()
    optimizer.step()
    peak = peak_since(target.device)
    if target.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = min(seconds_of_loss(drafter, target, batch) for _ in range(TIMES))
    return {"before": before, "added": peak - before, "gradients": gradients, "optimizer": state,
            "loss": loss.item(), "seconds": seconds}  # fmt: skip


def seconds_of_loss(drafter: Drafter, target: Target, batch: DraftBatch) -> float:
    """Return the seconds of a loss and its backward pass; on a CPU those of all threads of this process."""
    on_gpu = target.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.process_time
    begin = clock()
    loss = drafter(batch, target).loss
    assert loss is not None
    loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - begin


def mark(device: torch.device) -> int:
    """Forget the peak so far and return the bytes in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but not given back would hide a part of the peak
    Path("/proc/self/clear_refs").write_text("5")
    used = status("VmRSS")
    assert status("VmHWM") <= used + 2**22, "this kernel does not reset VmHWM, so the peak of the step is unknown"
    return used


def peak_since(device: torch.device) -> int:
    """Return the most bytes in use since the mark."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else status("VmHWM")


def status(field: str) -> int:
    """Return a field of the process's memory in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def in_fresh_process(*words: str) -> dict[str, float]:
    """Run this script for one figure; every large tensor gets pages of its own, given back when it is freed."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "TQDM_DISABLE": "1"}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the figures of every loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--small_length", type=int, default=400, help="tokens of each of the two rows compared")
    parser.add_argument("--loss", nargs="+", choices=LOSSES, default=["kl"])
    parser.add_argument("--part", choices=("gradients", "step"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "gradients":
        print(json.dumps(compare_gradients(options.target, options.small_length, options.loss[0])))
        return
    if options.part == "step":
        print(json.dumps(full_step(options.target, options.rows, options.length, options.loss[0])))
        return
    words = [word for name in ("target", "rows", "length", "small_length") for word in
             (f"--{name}", str(getattr(options, name)))]  # fmt: skip
    added = [tell(loss, options.rows, options.length, words) for loss in options.loss]
    if max(added) >= 1e9:
        sys.exit("the step must add less than 1 GB over weights and optimizer, but adds more (see CHUNK_BYTES)")


def tell(kind: str, rows: int, length: int, words: list[str]) -> float:
    """Print both figures of one loss; return the bytes that a step adds."""
    small = in_fresh_process(*words, "--loss", kind, "--part", "gradients")
    print(
        f"{kind}: gradients of {small['positions']:.0f} labels: loss {small['chunked']:.6f} in chunks, "
        f"{small['plain']:.6f} at once; largest difference {small['difference']:.1e} of a tensor's largest gradient "
        "(float32)",
        flush=True,
    )
    step = in_fresh_process(*words, "--loss", kind, "--part", "step")
    loss = step["added"] - step["gradients"]
    gigabytes = {name: f"{value / 1e9:.2f} GB" for name, value in (step | {"loss": loss}).items()}
    print(f"one step of {HEADS} heads at {rows} x {length:,} tokens, loss {step['loss']:.3f}:")
    print(f"  in use before: {gigabytes['before']}: target, drafter, features, optimizer {gigabytes['optimizer']}")
    print(
        f"  added at the peak: {gigabytes['added']}: gradients {gigabytes['gradients']}, the loss {gigabytes['loss']}"
    )
    print(f"  loss and backward pass: {step['seconds']:.2f} s (the shortest of {TIMES})", flush=True)
    return step["added"]


if __name__ == "__main__":
    main()
