"""How to read a clock where work is queued: a GPU must have finished before its time counts."""

from __future__ import annotations

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has nothing in its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
