"""What a measurement was made on: processor, threads, dtype, attention, versions."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

from ...core import hf
from ..target import Target


def machine_facts(target: Target) -> dict[str, Any]:
    """Return the facts without which a time says nothing, ready for JSON."""
    from ... import __version__  # at the call: the root package may import this one

    device = target.device
    load = os.getloadavg() if hasattr(os, "getloadavg") else None  # not on Windows
    return {
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": None if load is None else round(load[0], 2),
        "device": str(device),
        "accelerator": accelerator_name(device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "attention": hf.attention_implementation(target.model),
        "system": f"{platform.system()} {platform.release()}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "headstart": __version__,
        },
    }


def accelerator_name(device: torch.device) -> str | None:
    """Return what the device is called, None for a CPU."""
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} on {cpu_name()}"


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
