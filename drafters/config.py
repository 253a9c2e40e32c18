"""What every drafter's config.json holds, and the checks that methods make of their own fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from .divergences import LAW_LOSSES

if TYPE_CHECKING:
    from .base import TargetView

LOSSES = (*LAW_LOSSES, "ce")
"""What a drafter learns from: the target's law, by one of several divergences, or ("ce") the data's next token."""


class DrafterConfig(PreTrainedConfig):
    """What every drafter's config.json holds; a method adds its own fields.

    target_name, target_revision: where the target came from. target_width, target_vocab_size: what must fit.
    tokenizer_fingerprint, chat_template_fingerprint: of the text it was trained on.
    feature_layers: what the drafter reads of the target, in the convention of `base.py`; a record, set when it is made.
    draft_vocab_size: Vd, or None for the whole vocabulary.
    topology: rank paths of the draft tree, see `TreeTopology.from_paths`; None means the method's own.
    dynamic_tree: fields of `DynamicTree`, to let the tree follow the drafter's confidence instead.
    adapted_target: fingerprints of a target that was trained together with the drafter, see `inference/adapters.py`.
    training_data, measured: provenance and figures, written by the trainer and the benchmark.
    """

    model_type = "headstart-drafter"

    def __init__(
        self,
        target_name: str | None = None,
        target_revision: str | None = None,
        target_width: int = 0,
        target_vocab_size: int = 0,
        tokenizer_fingerprint: str | None = None,
        chat_template_fingerprint: str | None = None,
        feature_layers: Sequence[int | str] | None = None,
        draft_vocab_size: int | None = None,
        topology: Sequence[Sequence[int]] | None = None,
        dynamic_tree: dict[str, Any] | None = None,
        adapted_target: dict[str, Any] | None = None,
        training_data: dict[str, Any] | None = None,
        measured: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.target_name = target_name
        self.target_revision = target_revision
        self.target_width = target_width
        self.target_vocab_size = target_vocab_size
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.chat_template_fingerprint = chat_template_fingerprint
        self.feature_layers = None if feature_layers is None else list(feature_layers)
        self.draft_vocab_size = draft_vocab_size
        self.topology = None if topology is None else [list(path) for path in topology]
        self.dynamic_tree = dynamic_tree
        self.adapted_target = adapted_target
        self.training_data = training_data or {}
        self.measured = measured or {}
        super().__init__(**kwargs)

    @classmethod
    def settings_for(cls, target: TargetView) -> dict[str, Any]:
        """Return the fields that follow from the target where the user sets none, such as the sizes of a layer."""
        return {}


def check_counts(**counts: int | None) -> None:
    """Raise ValueError for a setting below 1; None is one that is left to the target."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, but is {count}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ValueError for a setting that is none of its choices."""
    if value not in choices:
        raise ValueError(f"{name} must be {' or '.join(map(repr, choices))}, but is {value!r}")
