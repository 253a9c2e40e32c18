"""Stop signals: noted, acted on later, and at once the second time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from headstart.distill.stopping import EXIT_STOPPED, StopSignals


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    """Python's own handlers, even where the tests run in the background of a shell, which ignores Ctrl-C."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_first_signal_is_noted_and_the_second_ends_at_once() -> None:
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_what_was_noted_becomes_the_exit_code() -> None:
    with StopSignals() as stop:
        stop.end()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            stop.end()
    assert ended.value.code == EXIT_STOPPED == 75


def test_handlers_are_as_before_afterwards() -> None:
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_signals_that_are_ignored_stay_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_hear_no_signals_and_do_not_fail() -> None:
    asked: list[int | None] = []

    def work() -> None:
        with StopSignals() as stop:
            asked.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [None]
