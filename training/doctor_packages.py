"""Which packages are installed, and whether their versions are supported: read from the metadata, nothing imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from .findings import NOTE, OK, WRONG, Finding

GROUP = "packages"
EXTRAS = {"deepspeed": "training with DeepSpeed", "lora": "joint training with an adapter", "demo": "pictures"}
"""Extras that people use, and what for."""


def check_packages() -> list[Finding]:
    """Compare Python and every package with what this version of Headstart supports."""
    try:
        supported, needed = metadata("headstart")["Requires-Python"], requires("headstart") or []
    except PackageNotFoundError:
        return [Finding(GROUP, "headstart", NOTE, "runs from a folder and is not installed", "pip install -e .")]
    fits = SpecifierSet(supported or "").contains(platform.python_version(), prereleases=True)
    python = f"{platform.python_version()} (supported: {supported})"
    findings = [Finding(GROUP, "python", OK if fits else WRONG, python, "" if fits else "make a new environment")]
    return [*findings, *(one for line in needed for one in _checked(Requirement(line)))]


def _checked(requirement: Requirement) -> Iterator[Finding]:
    """Yield what is to be said of one requirement: of one that only tests need, nothing."""
    marker = requirement.marker
    extra = next((name for name in EXTRAS if marker is not None and marker.evaluate({"extra": name})), None)
    required = marker is None or marker.evaluate({"extra": ""})
    if not required and extra is None:
        return
    supported = str(requirement.specifier)
    install = f"pip install '{requirement.name}{supported}'" if required else f"pip install 'headstart[{extra}]'"
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        what = "is not installed" if required else f"is not installed; for {EXTRAS[str(extra)]}"
        yield Finding(GROUP, requirement.name, WRONG if required else NOTE, what, install)
        return
    fits = requirement.specifier.contains(found, prereleases=True)
    told = f"{found} (supported: {supported or 'any'})"
    yield Finding(GROUP, requirement.name, OK if fits else WRONG, told, "" if fits else install)
