"""What a generation did: per step and in sum, in the project's terms (tokens per step, acceptance by depth)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PHASES: tuple[str, ...] = ("draft", "target", "verify", "commit")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One decoding step of a batch; lists have one entry per row that was active in it.

    emitted: tokens emitted after cutting. accepted: draft tokens the target agreed with, before cutting at a stop.
    depth: depth of the row's tree; it and accepted are at most what the row had room for, so that neither depends on
    the room of others in the batch. nodes: N. columns: cache columns L after the step; retained: those that hold a
    committed token, on average over rows. seconds: wall-clock by phase.
    """

    emitted: Sequence[int]
    accepted: Sequence[int]
    depth: Sequence[int]
    nodes: int
    columns: int
    retained: float
    seconds: dict[str, float]


@dataclass
class GenerationStats:
    """Sum of all steps of one call.

    tokens: emitted by decoding steps, after cutting; the prefill's own token of each row is not in it.
    row_steps: decoding steps counted once for each row that was active. target_passes: forward passes after prefill.
    lossless: whether the text follows the target's law; False under typical acceptance.
    """

    tokens: int = 0
    row_steps: int = 0
    target_passes: int = 0
    nodes: int = 0
    prefill_seconds: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    cache_columns: int = 0
    retained_columns: float = 0.0
    lossless: bool = True

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self.target_passes += 1
        self.nodes += step.nodes
        self.cache_columns, self.retained_columns = step.columns, step.retained
        for phase, seconds in step.seconds.items():
            self.seconds[phase] += seconds
        for emitted, accepted, depth in zip(step.emitted, step.accepted, step.depth, strict=True):
            self.row_steps += 1
            self.tokens += emitted
            while len(self.reached) < depth:
                self.reached.append(0)
                self.accepted.append(0)
            for k in range(depth):
                self.reached[k] += accepted >= k
                self.accepted[k] += accepted > k

    def merge(self, other: GenerationStats) -> None:
        """Add another call's sums, for figures over many prompts."""
        self.tokens += other.tokens
        self.row_steps += other.row_steps
        self.target_passes += other.target_passes
        self.nodes += other.nodes
        self.prefill_seconds += other.prefill_seconds
        for phase, seconds in other.seconds.items():
            self.seconds[phase] += seconds
        for k, (reached, accepted) in enumerate(zip(other.reached, other.accepted, strict=True)):
            if k == len(self.reached):
                self.reached.append(0)
                self.accepted.append(0)
            self.reached[k] += reached
            self.accepted[k] += accepted
        self.cache_columns, self.retained_columns = other.cache_columns, other.retained_columns
        self.lossless = self.lossless and other.lossless

    @property
    def tokens_per_step(self) -> float:
        """Tokens emitted by decoding steps / steps (the prefill's own token is in neither); 0.0 without steps."""
        return self.tokens / self.row_steps if self.row_steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Accepted at depth k / steps that reached depth k - 1 and whose tree had depth k; entry 0 is depth 1."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    @property
    def wasted_columns(self) -> float:
        """Cache columns without a committed token at the end of the last call, on average over rows."""
        return self.cache_columns - self.retained_columns

    def to_dict(self) -> dict[str, Any]:
        """Return every figure, ready for JSON."""
        return {
            **asdict(self),
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_depth": self.acceptance_by_depth,
            "wasted_columns": self.wasted_columns,
        }
