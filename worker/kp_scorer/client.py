"""The Python client: submit traces, wait for or look up their decisions.

client = Client.connect()
trace_id = client.submit(trace)
decision = client.wait(trace_id, timeout_s=30)
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from celery import Celery

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import send_trace
from kp_scorer.broker.queues import submission_queues
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import DecisionTimeout, Reason, TraceConflict, TraceDead
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Record, State, Store, Submission
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.trace import ReasoningTrace

_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25


class Status(NamedTuple):
    """What is known of a submitted trace: its state, its decision if decided, reason and detail if dead."""

    trace_id: str
    state: State
    decision: Decision | None = None
    reason: Reason | None = None
    detail: str = ""


class Client:
    """Submits traces and reads what became of them. One thread owns it."""

    def __init__(self, settings: Settings) -> None:
        """Use the broker and the Redis of ``settings``, whose URLs must be filled in. Connects on first use."""
        self._limits = settings.limits
        self._queues = submission_queues(settings)
        self._app: Celery = make_celery(settings)
        self._store = Store.open(settings)

    @classmethod
    def connect(cls, broker_url: str = "", redis_url: str = "") -> Self:
        """Make a client from URLs, the environment and the configuration file, or for the running embedded Redis.

        Raises:
            SettingsError: a setting is wrong, or nothing says where the broker is.
        """
        given = {"broker.url": broker_url, "redis.url": redis_url}
        return cls(with_endpoints(load_settings({name: url for name, url in given.items() if url})))

    def submit(self, trace: Mapping[str, Any] | ReasoningTrace) -> str:
        """Put a trace on the queue and return its id at once; a trace submitted before keeps its place and decision.

        Raises:
            InvalidTrace: it is not a ReasoningTrace, or over a limit; nothing was sent.
            TraceConflict: its id was submitted before with other content; nothing was sent.
            SettingsError: RabbitMQ has the queue with other arguments.
            ServiceUnavailable: the broker or Redis cannot be reached, or is full; submit it again, which is always safe.
        """
        if isinstance(trace, ReasoningTrace):
            payload, checked = trace.model_dump(mode="json", exclude_none=True), trace
        else:
            payload = dict(trace) if isinstance(trace, Mapping) else trace
            checked = decode_trace(payload, self._limits)
        # Recorded before it is sent, so that a trace whose message is lost on the way is visibly pending.
        noted = Submission(checked.id, checked.digest(), json.dumps(payload, ensure_ascii=False).encode())
        state = self._store.ledger.open([noted])[0]
        if isinstance(state, TraceConflict):
            raise state
        if state == "pending":
            send_trace(self._app, self._queues, checked.id, payload)
        return checked.id

    def look_up(self, trace_ids: Sequence[str]) -> list[Status | None]:
        """Return the status of each trace, in order, in one round trip; None if it is unknown or its record has expired.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        return [
            _status(trace_id, record) if record else None
            for trace_id, record in zip(trace_ids, self._store.ledger.look_up(trace_ids), strict=True)
        ]

    def wait(self, trace_id: str, timeout_s: float) -> Decision:
        """Wait for a trace's decision.

        Raises:
            DecisionTimeout: none came in time.
            TraceDead: none will come.
            ServiceUnavailable: Redis cannot be reached.
        """
        for status in self.as_settled([trace_id], timeout_s):
            if status.reason is not None:
                raise TraceDead(trace_id, status.reason, status.detail)
            if status.decision is not None:
                return status.decision
        raise DecisionTimeout(trace_id, timeout_s)

    def as_settled(self, trace_ids: Iterable[str], timeout_s: float) -> Iterator[Status]:
        """Yield each trace's status as soon as it is decided or dead; end when all are, or when the time is up.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        pending = list(dict.fromkeys(trace_ids))
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_FASTEST_S
        while pending:
            settled = [status for status in self.look_up(pending) if status and status.state != "pending"]
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
        """Close the connections."""
        self._app.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(trace_id: str, record: Record) -> Status:
    decision = Decision.model_validate_json(record.decision) if record.decision else None
    return Status(trace_id, record.state, decision, record.reason, record.detail)
