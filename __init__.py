"""Headstart: learned drafters for large language models, trained, verified losslessly, and published."""

from .drafters.base import Drafter, DrafterConfig
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
