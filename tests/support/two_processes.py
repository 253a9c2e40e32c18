"""Starts real training processes under `accelerate launch`: on the CPU, or on as many GPUs as HEADSTART_GPUS says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GPUS = int(os.environ.get("HEADSTART_GPUS", "0"))
PROCESSES = GPUS or 2
MACHINE = "8gpu" if GPUS else "cpu_2proc"
KINDS = {"ddp": "", "zero2": "_zero2", "zero3": "_zero3", "fsdp2": "_fsdp2"}
"""Way of training -> end of the name of a file of configs/accelerate/."""
TINY = {"zero3": ["--deepspeed_config_file", str(Path(__file__).with_name("zero3_tiny.json"))]}
"""What a launcher is told besides: by default ZeRO-3 leaves weights whole that are as small as those of a test."""
TOLERANCE = 1e-5 if GPUS else 1e-6
"""What the order of additions may change in a weight of float32."""


def launch_command(kind: str, script: Path, *flags: str) -> list[str]:
    """Return the command that starts a script in `PROCESSES` processes."""
    config = ROOT / "configs" / "accelerate" / f"{MACHINE}{KINDS[kind]}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config), *TINY.get(kind, [])]
    return [*launcher, "--num_processes", str(PROCESSES), "--main_process_port", "0", str(script), *flags]


def launched(kind: str, script: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run a script in `PROCESSES` processes to its end."""
    return subprocess.run(launch_command(kind, script, *flags), capture_output=True, text=True, check=False, cwd=ROOT)
