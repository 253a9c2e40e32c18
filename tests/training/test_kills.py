"""A run that is killed again and again ends with the weights of one that was not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_training.py"


@pytest.mark.slow
def test_killed_processes_lose_nothing() -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed " in done.stdout and "6 kills (" in done.stdout
    assert "all weights equal the uninterrupted run's bits" in done.stdout
