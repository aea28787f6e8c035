"""The clients for threads, which wait for each answer, and for coroutines; and what both have in common."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing, closing, suppress
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, Self

from celery import Celery

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import check_room, portions, send_traces
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.wire import as_bytes
from kp_scorer.client.io_thread import IoThread, Result
from kp_scorer.decision import Decision
from kp_scorer.decoding import check_late_outcome, decode_for_sending, is_late_outcome
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import DecisionTimeout, InvalidTrace, Reason, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.records import Record, Submission, TraceState
from kp_scorer.trace import ReasoningTrace, namespaced, outcome_key

_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25
LEAST_S: Final = 1.0  # The least time for a look-up, however little is left of a wait: a healthy server needs a fraction of it.


class Status(NamedTuple):
    """The status of a submitted trace."""

    trace_id: str
    state: TraceState
    """``pending``, ``decided`` or ``dead``."""
    decision: Decision | None = None
    """None until the trace is decided."""
    reason: Reason | None = None
    """None unless the trace is dead."""
    detail: str = ""
    """Names the fields or the cause if the trace is dead."""


def status_of(trace_id: str, record: Record) -> Status:
    """Return the status that a trace's record holds."""
    return Status(trace_id, record.state, record.decision, record.reason, record.detail)


def decision_of(trace_id: str, status: Status | None, timeout_s: float) -> Decision:
    """Return the decision in a status, or raise the error that stands for its absence."""
    if status and status.reason is not None:
        raise TraceDead(trace_id, status.reason, status.detail)
    if status and status.decision is not None:
        return status.decision
    raise DecisionTimeout(trace_id, timeout_s, is_known=status is not None)


class _Polling:
    """The traces that a caller waits for, the deadline, and the pause between look-ups. It does no I/O and never sleeps."""

    def __init__(self, trace_ids: Iterable[str], timeout_s: float, answer_s: float) -> None:
        """Wait for ``timeout_s`` from now on; a look-up may take ``answer_s`` of it."""
        self.pending = list(dict.fromkeys(trace_ids))  # The traces that are neither decided nor dead.
        self.pause_s = _POLL_FASTEST_S
        self._deadline = time.monotonic() + timeout_s
        self._answer_s = answer_s

    def look_up_s(self) -> float:
        return min(max(self._deadline - time.monotonic(), LEAST_S), self._answer_s)

    def update(self, statuses: Sequence[Status | None]) -> list[Status]:
        """Remove the traces that a look-up shows as decided or dead from the pending ones, and return them; set the pause."""
        completed = [status for status in statuses if status and status.state != "pending"]
        completed_ids = {status.trace_id for status in completed}
        self.pending = [trace_id for trace_id in self.pending if trace_id not in completed_ids]
        slower_s = _POLL_FASTEST_S if completed else min(self.pause_s * 1.5, _POLL_SLOWEST_S)
        self.pause_s = min(slower_s, max(self._deadline - time.monotonic(), 0.0))
        return completed

    def is_over(self) -> bool:
        return not self.pending or time.monotonic() >= self._deadline


Trace = Mapping[str, Any] | ReasoningTrace
"""A trace as its producer has it: a ``ReasoningTrace``, or its parsed JSON."""
Submitted = str | InvalidTrace | TraceConflict
"""The result for one trace of many: its id, or the error that says why it was not submitted."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_BATCH_SIZE: Final = 100  # The number of traces that go to the ledger, and to the broker, in one round trip.
# The size of a batch without its last trace: all of it is in memory several times, and has to arrive in time.
_BATCH_BYTES: Final = 4_194_304

_SUBMIT_TOO_LATE: Final = "submit: no answer within {:g} s; submit again, which is always safe"
_LOOK_UP_TOO_LATE: Final = "look up: no answer within {:g} s"


class _Deadline:
    """The time that a call still waits: until its timeout or, without one, for each answer anew."""

    def __init__(self, timeout_s: float | None, answer_s: float, too_late: str) -> None:
        """Wait for ``timeout_s`` in all, or for ``answer_s`` each time.

        ``too_late`` is the error's text with a place for the limit.
        """
        self._limit_s = answer_s if timeout_s is None else timeout_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self.error = ServiceUnavailable(too_late.format(self._limit_s))

    def left_s(self) -> float:
        return self._limit_s if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)


class _Client:
    """The part that both clients share. Only the I/O thread uses the connections; the rest never changes."""

    def __init__(self, settings: Settings, namespace: str = "", queue: str = "") -> None:
        """Use the broker and the Redis of ``settings``, whose URLs must be set. It connects on first use.

        Args:
            settings: the servers, queues and limits.
            namespace: goes into the id of every submitted trace, after ``kp:trace:``, so that producers who share a queue use
                different ids. It is no access control.
            queue: the queue of traces to submit to, of those that ``queues.traces`` names; by default the first.

        Raises:
            SettingsError: the namespace has characters other than A-Z, a-z, 0-9 and ``_.-``, or more than 64; or the settings
                name no such queue.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise SettingsError("namespace: expected up to 64 of A-Z, a-z, 0-9, underscores, dots and hyphens")
        self._namespace = namespace
        self._limits = settings.limits
        self._timeout_s = settings.broker.timeout_s
        self._io = IoThread()
        queues = submission_queues(settings)
        if (queue := queue or settings.queues.first) not in queues:
            raise SettingsError(f"queue: expected one of {', '.join(queues)}, as queues.traces says")
        self._queues = queues[queue]
        self._app: Celery = make_celery(settings)
        self._store = Store.open(settings)

    @classmethod
    def connect(cls, broker_url: str = "", redis_url: str = "", namespace: str = "", queue: str = "") -> Self:
        """Make a client. What is not given comes from the environment, the configuration file, or a running ``kp-scorer up``.

        Args:
            broker_url: the queues, such as ``redis://queue:6379/0`` or ``amqp://user:secret@rabbit/``.
            redis_url: the ledger; by default the broker, if that is Redis.
            namespace: goes into the id of every submitted trace, as in the constructor.
            queue: the queue of traces to submit to, as in the constructor.

        Raises:
            SettingsError: a setting, the namespace or the queue is wrong, or no setting names a broker.
        """
        urls = {"broker.url": broker_url, "redis.url": redis_url}
        return cls(with_endpoints(load_settings({name: url for name, url in urls.items() if url})), namespace, queue)

    def _checked(self, trace: Trace) -> Submission:
        """Check a trace; return it in the form that is recorded and sent, with the namespace in its id."""
        if is_late_outcome(trace):
            late = check_late_outcome(trace, self._limits)
            return Submission(late.id, late.digest(), as_bytes(trace))
        if isinstance(trace, ReasoningTrace):
            payload: Any = trace.model_dump(mode="json", exclude_none=True)
        else:
            payload = dict(trace) if isinstance(trace, Mapping) else trace
        if self._namespace and isinstance(payload, dict) and isinstance(payload.get("id"), str):
            payload["id"] = namespaced(payload["id"], self._namespace)
        checked, raw = decode_for_sending(payload, self._limits)
        return Submission(checked.id, checked.digest(), raw)

    def _checked_each(self, traces: Iterable[Trace]) -> list[Submission | InvalidTrace]:
        checked: list[Submission | InvalidTrace] = []
        for trace in traces:
            try:
                checked.append(self._checked(trace))
            except InvalidTrace as error:
                # The traceback of the original would keep all these traces alive.
                checked.append(InvalidTrace(error.problems))
        return checked

    def _queued(self, calls: Iterable[Callable[[], list[Submitted]]]) -> Generator["Future[list[Submitted]]", None, None]:
        """Queue each call while the one before runs; cancel a call that nobody waits for."""
        ahead: Future[list[Submitted]] | None = None
        try:
            for call in calls:
                running, ahead = ahead, self._io.submit(call)
                if running:
                    yield running
            if ahead:
                yield ahead
        finally:
            if ahead:
                ahead.cancel()

    # The following methods run on the client's I/O thread only.

    def _late_outcome(self, trace_id: str, **fields: Any) -> dict[str, Any]:
        key = outcome_key(self._store.ledger.outcome_secret(), trace_id)
        message = {"@type": "LateOutcome", "trace_id": trace_id, "key": key}
        return message | {name: value for name, value in fields.items() if value is not None}

    def _send(self, checked: Sequence[Submission | InvalidTrace]) -> list[Submitted]:
        """Record traces in the ledger and publish them to the queue; return the result for each, in order."""
        answers: list[str | TraceConflict] = []
        valid = [each for each in checked if isinstance(each, Submission)]
        for portion in portions(valid, lambda each: len(each.payload), _BATCH_BYTES):
            check_room(self._app, self._queues)
            # Record traces before sending them: if the message is lost, the trace is pending, and the resender sends it again.
            opened = list(zip(portion, self._store.ledger.submit(portion), strict=True))
            if pending := [(each.trace_id, each.payload) for each, state in opened if state == "pending"]:
                send_traces(self._app, self._queues, pending)
            answers += [state if isinstance(state, TraceConflict) else each.trace_id for each, state in opened]
        answer = iter(answers)
        return [each if isinstance(each, InvalidTrace) else next(answer) for each in checked]

    def _check_and_send(self, traces: Iterable[Trace]) -> list[Submitted]:
        return self._send(self._checked_each(traces))

    def _look_up(self, trace_ids: Sequence[str]) -> list[Status | None]:
        records = self._store.ledger.look_up(trace_ids)
        return [status_of(trace_id, record) if record else None for trace_id, record in zip(trace_ids, records, strict=True)]

    def _close(self) -> None:
        self._app.close()
        self._store.close()


class Client(_Client, AbstractContextManager["Client"]):
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
                queue yet, and this user may not declare it. Submit the trace again, which is always safe. QueueFull, which is
                one, if the queue has as many traces as its limit allows.
        """
        return _id_or_raise(self.submit_many([trace], timeout_s))

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
        deadline = _Deadline(timeout_s, self._timeout_s, _SUBMIT_TOO_LATE)
        calls = (partial(self._send, self._checked_each(batch)) for batch in _batched(traces))
        with closing(self._queued(calls)) as answers:
            return [answer for future in answers for answer in _wait_for(future, deadline)]

    def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Args:
            trace_ids: ids as ``submit`` returns them.
            timeout_s: how long to wait for Redis; by default ``broker.timeout_s``.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or did not answer in time.
        """
        return self._do(lambda: self._look_up(trace_ids), timeout_s, _LOOK_UP_TOO_LATE)

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
        """Submit what has become known of a trace's outcome, by which it is decided again, once. Return the outcome's id.

        The outcome waits for a trace that is not decided yet. ``look_up`` and ``wait`` take its id, too.

        Args:
            trace_id: the id as ``submit`` returns it.
            success: whether the task was solved.
            confidence: how sure that is, 0..1; by default as the trace says.
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
        return self.submit(self._do(make, timeout_s, _SUBMIT_TOO_LATE), timeout_s)

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
        polling = _Polling(trace_ids, timeout_s, self._timeout_s)
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
        return _wait_for(self._io.submit(call), _Deadline(timeout_s, self._timeout_s, too_late))

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Client, AbstractAsyncContextManager["AsyncClient"]):
    """Does what ``Client`` does, for coroutines. Its methods raise the same errors.

    Any number of tasks may share it, in any event loop: one thread talks to the servers for all of them. Their calls take
    turns, so submit a thousand traces by one ``submit_many``, not by a thousand tasks. Do not change a trace before its
    submission has been awaited. A cancelled call may have submitted the trace all the same.

        async with AsyncClient.connect("redis://queue:6379/0") as client:
            trace_id = await client.submit(trace)
            decision = await client.wait(trace_id, timeout_s=30)
    """

    async def submit(self, trace: Trace, timeout_s: float | None = None) -> str:
        """Put a trace on the queue and return its id, as ``Client.submit`` does."""
        return _id_or_raise(await self.submit_many([trace], timeout_s))

    async def submit_many(self, traces: Iterable[Trace], timeout_s: float | None = None) -> list[Submitted]:
        """Put traces on the queue, as ``Client.submit_many`` does. The traces are iterated in the event loop."""
        deadline = _Deadline(timeout_s, self._timeout_s, _SUBMIT_TOO_LATE)
        # The I/O thread also checks the traces: the largest one would block the loop for some 40 ms.
        calls = (partial(self._check_and_send, batch) for batch in _batched(traces))
        with closing(self._queued(calls)) as answers:
            return [answer for future in answers for answer in await _await(future, deadline)]

    async def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired."""
        return await self._do(lambda: self._look_up(trace_ids), timeout_s, _LOOK_UP_TOO_LATE)

    async def submit_outcome(
        self,
        trace_id: str,
        *,
        success: bool,
        confidence: float | None = None,
        reason: str | None = None,
        outcome_id: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Submit what has become known of a trace's outcome, and return the outcome's id, as ``Client.submit_outcome`` does."""
        make = partial(self._late_outcome, trace_id, success=success, confidence=confidence, reason=reason, id=outcome_id)
        return await self.submit(await self._do(make, timeout_s, _SUBMIT_TOO_LATE), timeout_s)

    async def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision."""
        async with aclosing(self.as_completed([trace_id], timeout_s)) as completed:
            status = await anext(completed, None)
        # The trace may have completed after the last look-up, or never have been submitted.
        return decision_of(trace_id, status or (await self.look_up([trace_id], LEAST_S))[0], timeout_s)

    async def as_completed(self, trace_ids: Iterable[str], timeout_s: float) -> AsyncGenerator[Status, None]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up."""
        polling = _Polling(trace_ids, timeout_s, self._timeout_s)
        while polling.pending:
            for status in polling.update(await self.look_up(polling.pending, polling.look_up_s())):
                yield status
            if polling.is_over():
                return
            await asyncio.sleep(polling.pause_s)

    async def close(self) -> None:
        """Close the connections; those to a server that does not answer are abandoned after ``broker.timeout_s``."""
        try:
            with suppress(ServiceUnavailable):
                await self._do(self._close)
        finally:
            self._io.stop()

    async def _do(self, call: Callable[[], Result], timeout_s: float | None = None, too_late: str = "") -> Result:
        return await _await(self._io.submit(call), _Deadline(timeout_s, self._timeout_s, too_late))

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _wait_for(future: "Future[Result]", deadline: _Deadline) -> Result:
    """Return what a call returns, or raise what it raises, or ServiceUnavailable if it does not end in time."""
    try:
        return future.result(deadline.left_s())
    except FutureTimeoutError:
        raise deadline.error from None
    finally:
        future.cancel()


async def _await(future: "Future[Result]", deadline: _Deadline) -> Result:
    try:
        async with asyncio.timeout(deadline.left_s()):
            # If the caller is cancelled, so is the future, and a call that has not started never does.
            return await asyncio.wrap_future(future)
    except TimeoutError:
        raise deadline.error from None


def _batched(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Yield batches of as many traces as go to the servers in one round trip; read the iterable no further than the batch."""
    iterator = iter(traces)
    while batch := list(islice(iterator, _BATCH_SIZE)):
        yield batch


def _id_or_raise(answers: Sequence[Submitted]) -> str:
    (answer,) = answers
    if isinstance(answer, str):
        return answer
    raise answer
