"""Headstart: learned drafters for large language models, trained, verified losslessly, and published."""

__version__ = "0.1.0"
