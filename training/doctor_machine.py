"""What the machine offers: PyTorch's devices, what optional packages do when imported, compiler, memory and disk."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import psutil  # comes with accelerate
import torch
from huggingface_hub import constants

from ..inference.loading import bfloat16_is_slow
from ..inference.options import check_writable
from .findings import NOTE, OK, WRONG, Finding
from .start_report import gigabytes

OPTIONAL = ("peft", "deepspeed", "bitsandbytes", "matplotlib")
LITTLE = 5e9
"""Bytes of free disk below which it is worth a note."""


def check_machine() -> Iterator[Finding]:
    """Look at PyTorch's build and its devices."""
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    on_cpu = torch.version.cuda is None and torch.version.hip is None
    yield Finding("machine", "torch", OK, f"{torch.__version__}, {'for CPUs' if on_cpu else build}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _gpu(index)
    elif torch.accelerator.is_available():
        yield Finding("machine", "accelerator", NOTE, f"{torch.accelerator.current_accelerator()}, not tested", "")
    elif Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi"):
        remedy = (
            "install PyTorch for CUDA (pytorch.org)"
            if on_cpu
            else "is the driver new enough, CUDA_VISIBLE_DEVICES empty?"
        )
        yield Finding("machine", "gpu", NOTE, "a driver is installed, but PyTorch sees no GPU", remedy)
    else:
        yield Finding("machine", "gpu", OK, "none; everything runs on the CPU")
    memory = psutil.virtual_memory()
    threads = f"{torch.get_num_threads()} threads, {gigabytes(memory.available)} of {gigabytes(memory.total)} free"
    if bfloat16_is_slow():
        remedy = "take float32: --dtype float32, and for training target_dtype float32 with bf16 false"
        yield Finding("machine", "cpu", NOTE, f"{threads}; bfloat16 is slow: no AVX-512", remedy)
    else:
        yield Finding("machine", "cpu", OK, threads)
    if find_spec("deepspeed") is not None and not torch.accelerator.is_available():
        yield _compiler()


def _gpu(index: int) -> Finding:
    """Look at one GPU, and have it do something: an old build has no kernels for a new one."""
    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        float((torch.ones(8, 8, device=name) @ torch.ones(8, 8, device=name)).sum())
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    except RuntimeError as error:
        return Finding("machine", name, WRONG, str(error).splitlines()[0], "install a PyTorch built for this GPU")
    told = f"{torch.cuda.get_device_name(index)}, {gigabytes(free)} of {gigabytes(total)} free, "
    remedy = "" if bf16 else "set bf16 false; take fp16 or float32"
    return Finding("machine", name, OK if bf16 else NOTE, f"{told}{'bf16' if bf16 else 'no bf16'}", remedy)


def _compiler() -> Finding:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found:
        return Finding("machine", "g++", OK, found)
    what = "none; DeepSpeed compiles an operator at its first start on a CPU"
    return Finding("machine", "g++", NOTE, what, "apt install g++, or train without DeepSpeed")


def check_optional() -> Iterator[Finding]:
    """Import the optional packages that are installed: they may be, and yet not work here."""
    for name in OPTIONAL:
        if find_spec(name) is None:
            if name == "bitsandbytes":  # the only one that no extra of ours brings
                yield Finding(
                    "machine", name, NOTE, "is not installed; for targets in 4 or 8 bit", f"pip install {name}"
                )
            continue
        problem = import_problem(name)
        remedy = f"install {name} anew, or take it away" if problem else ""
        yield Finding("machine", name, WRONG if problem else OK, problem or "can be imported", remedy)


def import_problem(name: str) -> str | None:
    """Say why a package cannot be imported, None if it can; what it prints is dropped."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import_module(name)
        except Exception as error:  # a package that does not fit the machine may raise anything
            return f"cannot be imported: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def check_disk(output: Path) -> Iterator[Finding]:
    """Look at the folder of the results and at the cache of the Hub: can they be written, and is there room?"""
    yield _place("output folder", output, WRONG)
    # One that is read-only does as long as everything is in it.
    yield _place("cache", Path(constants.HF_HUB_CACHE), NOTE)


def _place(name: str, folder: Path, otherwise: str) -> Finding:
    try:
        check_writable(folder, folder=True)
    except ValueError as error:
        return Finding("disk", name, otherwise, str(error), "make it writable, or name another (--output_dir, HF_HOME)")
    above = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(above).free
    told = f"{folder}: can be written, {gigabytes(free)} free"
    return Finding("disk", name, OK if free > LITTLE else NOTE, told, "" if free > LITTLE else "make room")
