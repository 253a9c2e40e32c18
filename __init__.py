"""Headstart: learned drafters for large language models, trained, verified losslessly, and published.

Each name below is imported when it is first asked for, so that `headstart --help` need not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .drafters.base import Drafter
    from .drafters.config import DrafterConfig
    from .drafters.registry import AutoDrafter
    from .inference.attach import AttachedModel, attach, build_drafter
    from .inference.engine import SpeculativeEngine
    from .inference.stats import GenerationStats
    from .inference.target import Target

__version__ = "0.1.0"

__all__ = [
    "AttachedModel",
    "AutoDrafter",
    "Drafter",
    "DrafterConfig",
    "GenerationStats",
    "SpeculativeEngine",
    "Target",
    "attach",
    "build_drafter",
]

_MODULES = {
    "drafters.base": ("Drafter",),
    "drafters.config": ("DrafterConfig",),
    "drafters.registry": ("AutoDrafter",),
    "inference.attach": ("AttachedModel", "attach", "build_drafter"),
    "inference.engine": ("SpeculativeEngine",),
    "inference.stats": ("GenerationStats",),
    "inference.target": ("Target",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
