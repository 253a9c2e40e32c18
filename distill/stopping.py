"""Stop signals that wait for a good moment."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

EXIT_STOPPED = 75
"""Exit status after SIGTERM when everything finished is saved: EX_TEMPFAIL, "try again later", as in training."""


class StopSignals:
    """Notes Ctrl-C and SIGTERM while it is open, so that neither a pass nor a write is cut; a second one ends at once.

    asked: the signal, None as long as there was none. Signals that are ignored stay ignored (a command that a script
    runs in the background), and so do all of them outside the main thread, where Python hears none.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def end(self) -> None:
        """Act on the signal that was noted: KeyboardInterrupt for Ctrl-C, an exit with `EXIT_STOPPED` for SIGTERM."""
        if self.asked == signal.SIGINT:
            raise KeyboardInterrupt
        if self.asked is not None:
            raise SystemExit(EXIT_STOPPED)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked is not None:
            self._restore()
            signal.raise_signal(number)
            return
        self.asked = number
        os.write(
            2, b"\nstopping after this pass; once more to stop at once\n"
        )  # a print may be cut by this very signal

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
