"""Starts real training processes under `accelerate launch`: on the CPU, or on as many GPUs as HEADSTART_GPUS says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GPUS = int(os.environ.get("HEADSTART_GPUS", "0"))
PROCESSES = GPUS or 2
KINDS = {"ddp": "8gpu.yaml", "zero2": "8gpu_zero2.yaml"} if GPUS else {
    "ddp": "cpu_2proc.yaml",
    "zero2": "cpu_2proc_zero2.yaml",
}  # fmt: skip
"""Way of training -> file of configs/accelerate/."""
TOLERANCE = 1e-5 if GPUS else 1e-6
"""What the order of additions may change in a weight of float32."""


def launch_command(kind: str, script: Path, *flags: str) -> list[str]:
    """Return the command that starts a script in `PROCESSES` processes."""
    config = ROOT / "configs" / "accelerate" / KINDS[kind]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launcher, "--num_processes", str(PROCESSES), "--main_process_port", "0", str(script), *flags]


def launched(kind: str, script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `PROCESSES` processes to its end."""
    return subprocess.run(launch_command(kind, script, *flags), capture_output=True, text=True, check=False, cwd=ROOT)
