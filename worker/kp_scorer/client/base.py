"""The part that both clients share: it checks traces, records and sends them, and looks them up, with all I/O on one thread."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import Any, Final, Self

from celery import Celery

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import check_room, portions, send_traces
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.wire import as_bytes
from kp_scorer.client.io_thread import IoThread
from kp_scorer.client.waiting import Status
from kp_scorer.decoding import check_late_outcome, decode_for_sending, is_late_outcome
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, SettingsError, TraceConflict
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.records import Submission
from kp_scorer.trace import ReasoningTrace, namespaced, outcome_key

Trace = Mapping[str, Any] | ReasoningTrace
"""A trace as its producer has it: a ``ReasoningTrace``, or its parsed JSON."""
Submitted = str | InvalidTrace | TraceConflict
"""The result for one trace of many: its id, or the error that says why it was not submitted."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_BATCH_SIZE: Final = 100  # The number of traces that go to the ledger, and to the broker, in one round trip.
# A batch ends with the trace that brings it to this size, as it is in memory several times and has to arrive in time.
_BATCH_BYTES: Final = 4_194_304

SUBMIT_TOO_LATE: Final = "submit: no answer within {:g} s; submit again, which is always safe"
LOOK_UP_TOO_LATE: Final = "look up: no answer within {:g} s"


class BaseClient:
    """The part that both clients share. Only the I/O thread uses the connections; the other attributes never change."""

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
        queues = submission_queues(settings.broker, settings.queues)
        if (queue := queue or settings.queues.first) not in queues:
            raise SettingsError(f"queue: expected one of {', '.join(queues)}, as queues.traces says")
        self._queues = queues[queue]
        self._app: Celery = make_celery(settings)
        self._store = Store.open(settings)

    @classmethod
    def connect(cls, broker_url: str = "", redis_url: str = "", namespace: str = "", queue: str = "") -> Self:
        """Make a client. Other settings come from the environment, the configuration file, or a running ``kp-scorer up``.

        Args:
            broker_url: the queues, such as ``redis://queue:6379/0`` or ``amqp://user:secret@rabbit/``; empty for that of the
                settings.
            redis_url: the ledger; by default that of the settings, or the broker, if that is Redis.
            namespace: goes into the id of every submitted trace, as in the constructor.
            queue: the queue of traces to submit to, as in the constructor.

        Raises:
            SettingsError: a setting, the namespace or the queue is wrong, or no setting names a broker.
        """
        urls = {"broker.url": broker_url, "redis.url": redis_url}
        return cls(with_endpoints(load_settings({name: url for name, url in urls.items() if url})), namespace, queue)

    def _checked(self, trace: Trace) -> Submission:
        """Check a trace, and return it in the form that is recorded and sent, with the namespace in its id."""
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
                # Make the error anew: the traceback of the original would keep all these traces alive.
                checked.append(InvalidTrace(error.problems))
        return checked

    def _queued(
        self, traces: Iterable[Trace], prepare: Callable[[list[Trace]], Callable[[], list[Submitted]]]
    ) -> Generator[Future[list[Submitted]], None, None]:
        """Yield the future of a call for each batch of traces, queued one ahead; cancel a call that nobody waits for.

        ``prepare`` turns a batch into a call. The iterable is read no further than that batch.
        """
        iterator = iter(traces)
        ahead: Future[list[Submitted]] | None = None
        try:
            while batch := list(islice(iterator, _BATCH_SIZE)):
                running, ahead = ahead, self._io.submit(prepare(batch))
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

    def _look_up(self, trace_ids: Sequence[str]) -> list[Status | None]:
        records = self._store.ledger.look_up(trace_ids)
        return [
            Status(trace_id, record.state, record.decision, record.reason, record.detail) if record else None
            for trace_id, record in zip(trace_ids, records, strict=True)
        ]

    def _close(self) -> None:
        self._app.close()
        self._store.close()


def id_or_raise(answers: Sequence[Submitted]) -> str:
    """Return the only answer if it is an id; raise it if it is an error."""
    (answer,) = answers
    if isinstance(answer, str):
        return answer
    raise answer
