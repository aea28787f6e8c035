"""The client for threads, which wait for each answer."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager, closing, suppress
from functools import partial

from kp_scorer.client.base import LOOK_UP_TOO_LATE, SUBMIT_TOO_LATE, BaseClient, Submitted, Trace, id_or_raise
from kp_scorer.client.io_thread import Result
from kp_scorer.client.waiting import LEAST_S, Deadline, Polling, Status, decision_of
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable


class Client(BaseClient, AbstractContextManager["Client"]):
    """Submits traces and reads their decisions. Any number of threads may share it.

    Calls take turns on one connection, and none waits longer than its timeout. After a call has timed out, later calls time out
    too until the servers answer again.

        with Client.connect("redis://queue:6379/0") as client:
            trace_id = client.submit(trace)
            decision = client.wait(trace_id, timeout_s=30)
    """

    def submit(self, trace: Trace, timeout_s: float | None = None) -> str:
        """Put a trace on the queue and return its id at once, with the namespace if there is one.

        A trace that was submitted before keeps its place and its decision.

        Args:
            trace: the ``ReasoningTrace``, or its parsed JSON.
            timeout_s: how long to wait for Redis and the broker together; by default ``broker.timeout_s``.

        Raises:
            InvalidTrace: it is no ``ReasoningTrace``, or exceeds a limit; nothing was sent.
            TraceConflict: its id was submitted before with other content; nothing was sent.
            SettingsError: RabbitMQ has a queue of this name with other arguments.
            ServiceUnavailable: the broker or Redis cannot be reached, is full, or did not answer in time; or RabbitMQ has no
                queue yet, and this user may not declare it. Submit the trace again, which is always safe. QueueFull, a
                subclass, says that the queue has as many traces as its limit allows, or that Redis is nearly full.
        """
        return id_or_raise(self.submit_many([trace], timeout_s))

    def submit_many(self, traces: Iterable[Trace], timeout_s: float | None = None) -> list[Submitted]:
        """Put traces on the queue, a hundred in one round trip. An invalid one does not stop the others.

        The result is the same as if each were submitted by itself, in order. At most 200 traces are in memory at once, so they
        may come from a generator, which is read while earlier ones are sent.

        Args:
            traces: each a ``ReasoningTrace``, or its parsed JSON.
            timeout_s: how long to wait in all, for the servers and for the iterable. By default each hundred may take
                ``broker.timeout_s``, and all of them as long as they need.

        Returns:
            For each trace, in order, its id or, if it was not submitted, the ``InvalidTrace`` or ``TraceConflict`` that
            ``submit`` would have raised.

        Raises:
            SettingsError: as for ``submit``.
            ServiceUnavailable: as for ``submit``. Some may be submitted; submit all of them again, which is always safe.
        """
        deadline = Deadline(timeout_s, self._timeout_s, SUBMIT_TOO_LATE)
        with closing(self._queued(traces, lambda batch: partial(self._send, self._checked_each(batch)))) as answers:
            return [answer for future in answers for answer in _wait_for(future, deadline)]

    def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Args:
            trace_ids: ids as ``submit`` returns them.
            timeout_s: how long to wait for Redis; by default ``broker.timeout_s``.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or did not answer in time.
        """
        return self._do(lambda: self._look_up(trace_ids), timeout_s, LOOK_UP_TOO_LATE)

    def submit_outcome(
        self,
        trace_id: str,
        *,
        success: bool,
        confidence: float | None = None,
        reason: str | None = None,
        outcome_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Submit a late outcome of a trace, which is then decided again, once for each outcome; return the outcome's id.

        The outcome waits for a trace that is not decided yet. ``look_up`` and ``wait`` take its id, too.

        Args:
            trace_id: the id as ``submit`` returns it.
            success: whether the task was solved.
            confidence: the confidence in ``success``, 0..1; by default the one that the trace states.
            reason: up to 200 characters, which the decision repeats.
            outcome_id: ``kp:outcome:`` and a text that nobody can guess. By default it follows from the arguments above, so
                that the same outcome counts once.
            timeout_s: how long to wait for Redis, and then for Redis and the broker; by default ``broker.timeout_s``.

        Raises:
            InvalidTrace: an argument is wrong; nothing was sent.
            TraceConflict: the outcome's id was submitted before with other content; nothing was sent.
            ServiceUnavailable: as for ``submit``, or no worker has run yet. Submit the outcome again, which is always safe.
        """
        make = partial(self._late_outcome, trace_id, success=success, confidence=confidence, reason=reason, id=outcome_id)
        return self.submit(self._do(make, timeout_s, SUBMIT_TOO_LATE), timeout_s)

    def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision.

        Raises:
            DecisionTimeout: no decision came in time; ``is_known`` tells a pending trace from an unknown one.
            TraceDead: the trace became a dead letter, so no decision will come.
            ServiceUnavailable: Redis cannot be reached.
        """
        # The trace may have completed after the last look-up, or never have been submitted.
        status = next(self.as_completed([trace_id], timeout_s), None) or self.look_up([trace_id], LEAST_S)[0]
        return decision_of(trace_id, status, timeout_s)

    def as_completed(self, trace_ids: Iterable[str], timeout_s: float) -> Iterator[Status]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        polling = Polling(trace_ids, timeout_s, self._timeout_s)
        while polling.pending:
            yield from polling.update(self.look_up(polling.pending, polling.look_up_s()))
            if polling.is_over():
                return
            time.sleep(polling.pause_s)

    def close(self) -> None:
        """Close the connections; those to a server that does not answer are abandoned after ``broker.timeout_s``."""
        with suppress(ServiceUnavailable):
            self._do(self._close)
        self._io.stop()

    def _do(self, call: Callable[[], Result], timeout_s: float | None = None, too_late: str = "") -> Result:
        return _wait_for(self._io.submit(call), Deadline(timeout_s, self._timeout_s, too_late))

    def __exit__(self, *_: object) -> None:
        self.close()


def _wait_for(future: "Future[Result]", deadline: Deadline) -> Result:
    """Return the result of a call, or raise its error, or ServiceUnavailable if it does not end in time."""
    try:
        return future.result(deadline.left_s())
    except FutureTimeoutError:
        raise deadline.error from None
    finally:
        future.cancel()
