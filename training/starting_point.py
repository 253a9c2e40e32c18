"""A drafter to start from instead of a fresh one: for other data, another loss, or training jointly with the target."""

from __future__ import annotations

import torch

from ..drafters.base import Drafter
from ..drafters.registry import AutoDrafter, drafter_classes
from ..inference.target import Target


def load_start(place: str, method: str, target: Target, asked_vocabulary: int | None) -> Drafter:
    """Load the drafter that a run starts from.

    place: its folder or Hub id. asked_vocabulary: the draft vocabulary's size, if the run names one.

    Raises ValueError for another method's drafter, one for a target of other sizes, one that was trained jointly with a
    target (its adapter is not carried on), or another size of the draft vocabulary.
    """
    start = AutoDrafter.from_pretrained(place)
    if type(start) is not drafter_classes(method)[1]:
        raise ValueError(f"start_from must be a drafter of method {method}, but {place} is a {type(start).__name__}")
    start.check_fits(target)
    if start.config.adapted_target is not None:
        raise ValueError(
            f"start_from must be a drafter of the target as it is, but {place} was trained with a target that changed; "
            "start from the drafter it came from"
        )
    ids = start.draft_token_ids
    size = None if ids is None else len(ids)
    if asked_vocabulary not in (None, size):
        raise ValueError(
            f"draft_vocab_size must be that of start_from, {size if size else 'the whole vocabulary'}, but is "
            f"{asked_vocabulary}; give that size, or none"
        )
    return start


@torch.no_grad()
def take_weights(drafter: Drafter, start: Drafter, place: str) -> None:
    """Give a fresh drafter the weights of another. Raises ValueError where they are not made alike."""
    mine, theirs = drafter.state_dict(), start.state_dict()
    unlike = sorted(name for name in {*mine, *theirs} if name not in mine or name not in theirs
                    or mine[name].shape != theirs[name].shape)  # fmt: skip
    if unlike:
        raise ValueError(
            f"a drafter of these settings must have the weights of start_from, but {len(unlike)} of them differ in "
            f"{place}, such as {unlike[0]}; take the settings of its config.json"
        )
    drafter.load_state_dict(theirs)
