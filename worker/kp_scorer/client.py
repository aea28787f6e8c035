"""The Python client: submit traces, wait for or look up their decisions.

client = Client.connect()
trace_id = client.submit(trace)
decision = client.wait(trace_id, timeout_s=30)
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, Self, TypeVar

from celery import Celery

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import send_traces
from kp_scorer.broker.queues import submission_queues
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import DecisionTimeout, Reason, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Record, State, Store, Submission
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.trace import ReasoningTrace, namespaced

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25
_LEAST_S: Final = 1.0
"""A look-up gets this much time, however little is left of a wait: an answer in good order takes a fraction of it."""

_SUBMITTED_TOO_LATE: Final = "submit: no answer within {:g} s; submit it again, which is always safe"

Found = TypeVar("Found")


class Status(NamedTuple):
    """What is known of a submitted trace: its state, its decision if decided, reason and detail if dead."""

    trace_id: str
    state: State
    decision: Decision | None = None
    reason: Reason | None = None
    detail: str = ""


class Client:
    """Submits traces and reads what became of them. One thread owns it.

    No call waits longer than it says. After one that ran out of time the next ones do too until the servers answer again.
    """

    def __init__(self, settings: Settings, namespace: str = "") -> None:
        """Use the broker and the Redis of ``settings``, whose URLs must be filled in. Connects on first use.

        Args:
            settings: where to submit.
            namespace: goes into the id of every trace that is submitted, after ``kp:trace:``, so that producers who share a
                queue do not take each other's ids. It keeps nobody out.

        Raises:
            SettingsError: the namespace has other characters than letters, digits and ``_.-``, or more than 64.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise SettingsError("namespace: expected up to 64 letters, digits, underscores, dots and hyphens")
        self._namespace = namespace
        self._limits = settings.limits
        self._timeout_s = settings.broker.submit_timeout_s
        self._errands = _Errands()
        self._queues = submission_queues(settings)
        self._app: Celery = make_celery(settings)
        self._store = Store.open(settings)

    @classmethod
    def connect(cls, broker_url: str = "", redis_url: str = "", namespace: str = "") -> Self:
        """Make a client from URLs, the environment and the configuration file, or for the running embedded Redis.

        Raises:
            SettingsError: a setting or the namespace is wrong, or nothing says where the broker is.
        """
        given = {"broker.url": broker_url, "redis.url": redis_url}
        return cls(with_endpoints(load_settings({name: url for name, url in given.items() if url})), namespace)

    def submit(self, trace: Mapping[str, Any] | ReasoningTrace, timeout_s: float | None = None) -> str:
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
        payload, checked = self._checked(trace)
        noted = Submission(checked.id, checked.digest(), json.dumps(payload, ensure_ascii=False).encode())
        self._do(lambda: self._submit(noted), timeout_s, _SUBMITTED_TOO_LATE)
        return checked.id

    def look_up(self, trace_ids: Sequence[str], timeout_s: float | None = None) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Args:
            trace_ids: the traces.
            timeout_s: how long to wait for Redis; by default ``broker.submit_timeout_s``.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or did not answer in time.
        """
        records = self._do(lambda: self._store.ledger.look_up(trace_ids), timeout_s, "look up: no answer within {:g} s")
        return [_status(trace_id, record) if record else None for trace_id, record in zip(trace_ids, records, strict=True)]

    def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision.

        Raises:
            DecisionTimeout: none came in time; it says whether the trace is known at all.
            TraceDead: none will come.
            ServiceUnavailable: Redis cannot be reached.
        """
        # It may have ended after the last look, or have never been submitted.
        status = next(self.as_settled([trace_id], timeout_s), None) or self.look_up([trace_id], _LEAST_S)[0]
        if status and status.reason is not None:
            raise TraceDead(trace_id, status.reason, status.detail)
        if status and status.decision is not None:
            return status.decision
        raise DecisionTimeout(trace_id, timeout_s, is_known=status is not None)

    def as_settled(self, trace_ids: Iterable[str], timeout_s: float) -> Iterator[Status]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        pending = list(dict.fromkeys(trace_ids))
        deadline = time.monotonic() + timeout_s
        left_s, pause_s = timeout_s, _POLL_FASTEST_S
        while pending:
            found = self.look_up(pending, min(max(left_s, _LEAST_S), self._timeout_s))
            settled = [status for status in found if status and status.state != "pending"]
            yield from settled
            done = {status.trace_id for status in settled}
            pending = [trace_id for trace_id in pending if trace_id not in done]
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            pause_s = _POLL_FASTEST_S if settled else min(pause_s * 1.5, _POLL_SLOWEST_S)
            if pending:
                time.sleep(min(pause_s, left_s))

    def close(self) -> None:
        """Close the connections; those of a silent server are left behind after ``broker.submit_timeout_s``."""
        with suppress(ServiceUnavailable):
            self._do(self._close)
        self._errands.end()

    def _checked(self, trace: Mapping[str, Any] | ReasoningTrace) -> tuple[dict[str, Any], ReasoningTrace]:
        if isinstance(trace, ReasoningTrace):
            payload = trace.model_dump(mode="json", exclude_none=True)
            if not self._namespace:
                return payload, trace
        else:
            payload = dict(trace) if isinstance(trace, Mapping) else trace
        if self._namespace and isinstance(payload, dict) and isinstance(payload.get("id"), str):
            payload["id"] = namespaced(payload["id"], self._namespace)
        return payload, decode_trace(payload, self._limits)

    def _do(self, errand: Callable[[], Found], timeout_s: float | None = None, too_late: str = "") -> Found:
        return self._errands.run(errand, self._timeout_s if timeout_s is None else timeout_s, too_late)

    def _submit(self, noted: Submission) -> None:
        # Noted before it is sent: a message lost on the way leaves a trace that is visibly pending.
        (state,) = self._store.ledger.open([noted])
        if isinstance(state, TraceConflict):
            raise state
        if state == "pending":
            send_traces(self._app, self._queues, [(noted.trace_id, noted.payload)])

    def _close(self) -> None:
        self._app.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(trace_id: str, record: Record) -> Status:
    decision = Decision.model_validate_json(record.decision) if record.decision else None
    return Status(trace_id, record.state, decision, record.reason, record.detail)


class _Errands:
    """Runs errands one after the other in a thread, for callers who wait only so long.

    What talks to a server waits for each of its steps, and tries again, for much longer together than for one of them. A daemon
    thread, as one that is stuck must not keep the interpreter from ending.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, errand: Callable[[], Found], timeout_s: float, too_late: str) -> Found:
        """Give what the errand returns, or raise what it raises, or ServiceUnavailable if it has not ended in time."""
        # A fork leaves the thread behind.
        if self._thread is None or not self._thread.is_alive():
            self._waiting = SimpleQueue()
            self._thread = threading.Thread(target=_run_errands, args=[self._waiting], name="kp-scorer-client", daemon=True)
            self._thread.start()
        future: Future[Found] = Future()
        self._waiting.put((errand, future))
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            raise ServiceUnavailable(too_late.format(timeout_s)) from None
        finally:
            # One that waits behind another that is stuck is not begun any more.
            future.cancel()

    def end(self) -> None:
        """End the thread, after the errand that it is on."""
        self._waiting.put(None)


def _run_errands(waiting: "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]") -> None:
    while (found := waiting.get()) is not None:
        errand, future = found
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(errand())
            except BaseException as error:
                future.set_exception(error)
        # Nothing of it is kept alive while there is nothing to do.
        del found, errand, future
