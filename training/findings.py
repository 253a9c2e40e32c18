"""What a check found: `headstart doctor` prints one line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

OK, NOTE, WRONG = "ok", "note", "wrong"
REMEDIES = {
    "target": "give the folder of a causal language model, or its Hub id",
    "data": "mend the file, or name another",
    "configuration": "change it in the file",
}
"""What to do where an error says only what must hold."""


@dataclass(frozen=True, slots=True)
class Finding:
    """status: ok; note, for what may be meant; or wrong. remedy: how to mend it, empty where there is nothing to."""

    group: str
    name: str
    status: str
    found: str
    remedy: str = ""


def tried(group: str, name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; one that fails is wrong, in the words of its error, which name the remedy."""
    try:
        return list(check())
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return [failed(group, name, error)]


def failed(group: str, name: str, error: Exception) -> Finding:
    """Return what an error tells: our own say what must hold, what was found; and what to do."""
    found, _, remedy = str(error).rpartition("; ")
    return Finding(group, name, WRONG, found or str(error), remedy if found else REMEDIES.get(group, "install it anew"))
