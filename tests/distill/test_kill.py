"""A real `headstart distill` process, killed with SIGKILL and started again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_distill.py"


@pytest.mark.slow
def test_killed_process_loses_repeats_and_changes_nothing() -> None:
    words = [sys.executable, str(SCRIPT), "--kills", "3", "--prompts", "60", "--seed", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "in each 60 ids, each once; token ids and all other fields equal" in done.stdout
