"""Settings of what a run watches for, what it draws, and whether it is only tried out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from .arguments import told


@dataclass
class WatchArguments:
    """How a run guards itself, and what it shows."""

    _argument_group_name: ClassVar[str] = "watching and trying out"

    dry_run: bool = field(
        default=False,
        metadata=told(
            "Try everything out and write nothing: one step on the longest rows, one evaluation batch, a few generated "
            "tokens; prints what the run would take."
        ),
    )
    non_finite: str = field(
        default="stop",
        metadata=told(
            "What a loss or gradient that is not finite does: stop ends the run, skip leaves that step out, weights "
            "and optimizer untouched.",
            choices=["stop", "skip"],
        ),
    )
    non_finite_limit: int = field(
        default=5, metadata=told("With non_finite skip: so many skipped steps in a row stop the run.")
    )
    grad_norm_alarm: float = field(
        default=10.0,
        metadata=told(
            "A step whose gradient norm is more than this times the median of the last 100 is told, with its rows. 0: "
            "none is."
        ),
    )
    plot: bool = field(
        default=True, metadata=told("Draw curves.png in output_dir at the end, if matplotlib is installed.")
    )

    def __post_init__(self) -> None:
        if self.non_finite_limit < 1:
            raise ValueError(f"non_finite_limit must be at least 1, but is {self.non_finite_limit}")
        if self.grad_norm_alarm != 0 and not self.grad_norm_alarm > 1:
            raise ValueError(f"grad_norm_alarm must be above 1, or 0 for no alarm, but is {self.grad_norm_alarm:g}")
