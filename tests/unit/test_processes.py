"""Signals set an event in place of ending a command."""

import signal
from collections.abc import Iterator
from typing import Final

import pytest
from kp_scorer.local.processes import stopped_by_signals

STOPPING: Final = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def own_handlers() -> Iterator[None]:
    """Begin with the handlers of a program in the foreground, and restore those of the tests."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in STOPPING}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_sets_the_event_and_a_second_one_interrupts(number: signal.Signals) -> None:
    stopping = stopped_by_signals()
    assert not stopping.is_set()
    signal.raise_signal(number)
    assert stopping.is_set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_stays_ignored_where_a_shell_has_it_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping = stopped_by_signals()
    signal.raise_signal(signal.SIGINT)
    assert not stopping.is_set()
    signal.raise_signal(signal.SIGTERM)
    assert stopping.is_set()
