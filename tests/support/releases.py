"""What older releases of libraries cannot do; tests that need it are left out there, and say so."""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version

needs_counted_lookup = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="older prompt lookup fails without an end-of-sequence id and asks stopping criteria about its guesses too",
)
