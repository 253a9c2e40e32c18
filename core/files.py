"""What all files that are written have in common, whoever writes them."""

from __future__ import annotations

import os
from pathlib import Path


def give_usual_mode(path: Path) -> None:
    """Let everyone read a file whom the umask lets: safetensors makes its files for their owner alone."""
    umask = os.umask(0o077)  # there is no way to ask without setting it
    os.umask(umask)
    path.chmod(0o666 & ~umask)
