"""The client for threads, each of which waits for its answer.

client = Client.connect()
trace_id = client.submit(trace)
decision = client.wait(trace_id, timeout_s=30)
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Self, TypeVar

from kp_scorer.client.base import (
    LOOKED_UP_TOO_LATE,
    MANY_TOO_LATE,
    TOO_LATE,
    ClientBase,
    Patience,
    Submitted,
    Trace,
    hundreds,
    submitted,
)
from kp_scorer.client.settling import LEAST_S, Status, Unsettled, decision_of
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable

Found = TypeVar("Found")


class Client(ClientBase):
    """Submits traces and reads what became of them. Any thread may use it, and any number of threads at once.

    Their calls take turns on one connection. No call waits longer than it says. After one that ran out of time the next ones do
    too until the servers answer again.
    """

    def submit(self, trace: Trace, timeout_s: float | None = None) -> str:
        """Put a trace on the queue and return its id, with the namespace if there is one, at once.

        A trace submitted before keeps its place and decision.

        Args:
            trace: the ReasoningTrace, or what its JSON says.
            timeout_s: how long to wait for Redis and the broker together; by default ``broker.submit_timeout_s``.

        Raises:
            InvalidTrace: it is not a ReasoningTrace, or over a limit; nothing was sent.
            TraceConflict: its id was submitted before with other content; nothing was sent.
            SettingsError: the queues have to be declared, and RabbitMQ has one of this name with other arguments.
            ServiceUnavailable: the broker or Redis cannot be reached, is full, or did not answer in time; or RabbitMQ has no
                queue yet, and this user may not make it. Submit it again, which is always safe.
        """
        noted = self._noted(trace)
        (answer,) = self._do(lambda: self._send([noted]), timeout_s, TOO_LATE)
        return submitted(answer)

    def submit_many(self, traces: Iterable[Trace], timeout_s: float | None = None) -> list[Submitted]:
        """Put traces on the queue, a hundred in one step; what is wrong with one of them does not keep the others back.

        It is as if each were submitted by itself, one after the other, only faster. Of the traces no more than 200 are held at
        once, and so they may come from a generator; it is read while those before are on their way.

        Args:
            traces: ReasoningTraces, or what their JSON says.
            timeout_s: how long to wait for Redis and the broker in all, and for the traces, if they take their time; by default
                as long as it takes, if every hundred is answered within ``broker.submit_timeout_s``.

        Returns:
            For each trace, in order, its id or, if it was not submitted, the InvalidTrace or the TraceConflict that
            :meth:`submit` would have raised.

        Raises:
            SettingsError: as :meth:`submit`.
            ServiceUnavailable: as :meth:`submit`. Some may be submitted; submit all of them again, which is always safe.
        """
        patience = Patience(timeout_s, self._timeout_s)
        answers: list[list[Submitted]] = []
        begun: Future[list[Submitted]] | None = None
        try:
            # The next hundred is checked while the one before is on its way.
            for noted in map(self._noted_each, hundreds(traces)):
                if begun:
                    answers.append(_result(begun, patience, MANY_TOO_LATE))
                begun = self._errands.begin(partial(self._send, noted))
            if begun:
                answers.append(_result(begun, patience, MANY_TOO_LATE))
        finally:
            # The traces may come to an error of their own.
            if begun:
                begun.cancel()
        return list(chain.from_iterable(answers))

    def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Args:
            trace_ids: the traces.
            timeout_s: how long to wait for Redis; by default ``broker.submit_timeout_s``.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or did not answer in time.
        """
        return self._do(lambda: self._look_up(trace_ids), timeout_s, LOOKED_UP_TOO_LATE)

    def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision.

        Raises:
            DecisionTimeout: none came in time; it says whether the trace is known at all.
            TraceDead: none will come.
            ServiceUnavailable: Redis cannot be reached.
        """
        # It may have ended after the last look, or have never been submitted.
        status = next(self.as_settled([trace_id], timeout_s), None) or self.look_up([trace_id], LEAST_S)[0]
        return decision_of(trace_id, status, timeout_s)

    def as_settled(self, trace_ids: Iterable[str], timeout_s: float) -> Iterator[Status]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        unsettled = Unsettled(trace_ids, timeout_s, self._timeout_s)
        while unsettled.trace_ids:
            yield from unsettled.settle(self.look_up(unsettled.trace_ids, unsettled.look_up_s()))
            if unsettled.is_over():
                return
            time.sleep(unsettled.pause_s)

    def close(self) -> None:
        """Close the connections; those of a silent server are left behind after ``broker.submit_timeout_s``."""
        with suppress(ServiceUnavailable):
            self._do(self._close)
        self._errands.end()

    def _do(self, errand: Callable[[], Found], timeout_s: float | None = None, too_late: str = "") -> Found:
        patience = Patience(timeout_s, self._timeout_s)
        return _result(self._errands.begin(errand), patience, too_late)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(errand: "Future[Found]", patience: Patience, too_late: str) -> Found:
    """Give what an errand returns, or raise what it raises, or ServiceUnavailable if it has not ended in time."""
    try:
        return errand.result(patience.left_s())
    except FutureTimeoutError:
        raise ServiceUnavailable(too_late.format(patience.limit_s)) from None
    finally:
        errand.cancel()
