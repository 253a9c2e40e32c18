"""What every test shares: no network, and the tiny targets of `tests/support`."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tiny_targets import FAMILIES, tiny_target

from headstart.inference.target import Target


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Run the test once for every family of the matrix."""
    return request.param


@pytest.fixture
def family_target(family: str) -> Target:
    """Return the tiny target of the family."""
    return tiny_target(family)


@pytest.fixture
def target() -> Target:
    """Return a tiny Llama, for tests in which the family does not matter."""
    return tiny_target("llama")
