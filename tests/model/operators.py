"""The work of clients, the resender and people at the command line on the ledger and the dead letters, step by step."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from kp_scorer.decoding import parse_json
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.process import submission_resender
from kp_scorer.process.metrics import Metrics
from kp_scorer.store.dead_letters import DeadLetter
from kp_scorer.store.records import Submission

from tests.model.baton import Stretch, stop_before
from tests.model.contents import LIMITS, Payload, by_bytes
from tests.model.records import LEDGER
from tests.model.watched import Books, WatchedLedger, WatchedLetters, WatchedLog

Send = Callable[[Payload], None]


Chosen = Callable[[int], int]
"""A function that chooses a number below its argument."""


class Operator(Stretch):
    """Somebody at work, whom the test may interrupt or let die between any two steps."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(work)
        self.name = name

    def go_on(self) -> str:
        note = f"{self.name}: {self.next_call}"
        if not self.is_done:
            self.run_on()
        if self.error is not None:
            raise AssertionError(f"{self.name} failed") from self.error
        return note


def submit(books: Books, payload: Payload, send: Send) -> None:
    with suppress(InvalidTrace, TraceConflict):
        _submit(WatchedLedger(books), payload, send)


def replay(books: Books, chosen: Chosen, send: Send) -> None:
    letters = WatchedLetters(books)
    for letter, serial in _one_of(letters, chosen):
        # A dead letter that is refused again stays.
        with suppress(InvalidTrace, TraceConflict):
            payload = letters.payload(letter.letter_id)
            parse_json(payload, LIMITS)
            _submit(WatchedLedger(books), by_bytes(payload), send)
            letters.drop(letter, serial)


def drop(books: Books, chosen: Chosen) -> None:
    letters = WatchedLetters(books)
    for letter, serial in _one_of(letters, chosen):
        letters.drop(letter, serial)


def forget(books: Books, trace_id: str) -> None:
    WatchedLog(books).erase(trace_id)
    letters = WatchedLetters(books)
    for letter, serial in letters.read():
        if letter.trace_id == trace_id:
            letters.drop(letter, serial)
    WatchedLedger(books).erase(trace_id)


def resend_lost(books: Books, is_empty: Callable[[], bool], send: Send) -> None:
    store: Any = SimpleNamespace(ledger=WatchedLedger(books), dead_letters=WatchedLetters(books))
    broker: Any = SimpleNamespace(traces=SimpleNamespace(name="traces"), is_empty=is_empty, send=send)
    submission_resender.resend_lost(broker, [broker], store, LEDGER, Metrics(()), {})


@contextmanager
def patched_broker() -> Iterator[None]:
    """Let the resender send to the queue of the world in which it runs."""

    def waiting(app: Any, _queue: object) -> int:
        return 0 if app.is_empty() else 1

    def send_traces(app: Any, _queues: object, submissions: Sequence[tuple[str, bytes]]) -> None:
        for _, submission in submissions:
            stop_before("send")
            app.send(by_bytes(submission))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(submission_resender, "waiting", waiting)
        patch.setattr(submission_resender, "send_traces", send_traces)
        yield


def _one_of(letters: WatchedLetters, chosen: Chosen) -> list[tuple[DeadLetter, int]]:
    stored = letters.read()
    return [stored[chosen(len(stored))]] if stored else []


def _submit(ledger: WatchedLedger, payload: Payload, send: Send) -> None:
    if payload.trace is None and payload.late is None:
        raise InvalidTrace(())
    state = ledger.submit(Submission(payload.header_id, payload.digest, payload.raw))
    if isinstance(state, TraceConflict):
        raise state
    if state == "pending":
        stop_before("send")
        send(payload)
