"""What both clients are: where they submit, what they check first, and what they have their thread do."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Self

from celery import Celery

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import send_traces
from kp_scorer.broker.queues import submission_queues
from kp_scorer.client.errands import Errands
from kp_scorer.client.settling import Status, status_of
from kp_scorer.decoding import decode_for_sending
from kp_scorer.errors import InvalidTrace, SettingsError, TraceConflict
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store, Submission
from kp_scorer.store.endpoints import with_endpoints
from kp_scorer.trace import ReasoningTrace, namespaced

Trace = Mapping[str, Any] | ReasoningTrace
"""A trace as its producer has it: the ReasoningTrace, or what its JSON says."""
Submitted = str | InvalidTrace | TraceConflict
"""What becomes of one trace of many: its id, or why it was not submitted."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]{0,64}")
_AT_ONCE: Final = 100
"""How many traces go to the ledger, and to the broker, in one round trip."""
_BYTES_AT_ONCE: Final = 4_194_304
"""How many bytes of them, before the last one: all of it is in memory several times over, and has to arrive in time."""

TOO_LATE: Final = "submit: no answer within {:g} s; submit it again, which is always safe"
MANY_TOO_LATE: Final = "submit: no answer within {:g} s; submit all of them again, which is always safe"
LOOKED_UP_TOO_LATE: Final = "look up: no answer within {:g} s"


class Patience:
    """How long a call still waits: until its time is up or, if it was given none, so long for each answer."""

    def __init__(self, timeout_s: float | None, answer_s: float) -> None:
        """Begin to wait, for ``timeout_s`` in all or for ``answer_s`` each time."""
        self.limit_s = answer_s if timeout_s is None else timeout_s
        """What it was at first, to be told."""
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float:
        """How long to wait for the next answer."""
        return self.limit_s if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)


class ClientBase:
    """Where a client submits. Its own thread alone uses what is connected; the rest never changes."""

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
        self._errands = Errands()
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

    def _noted(self, trace: Trace) -> Submission:
        """Check a trace; return it as it is noted and sent, with the namespace in its id."""
        if isinstance(trace, ReasoningTrace):
            payload: Any = trace.model_dump(mode="json", exclude_none=True)
            if not self._namespace:
                return Submission(trace.id, trace.digest(), json.dumps(payload, ensure_ascii=False).encode())
        else:
            payload = dict(trace) if isinstance(trace, Mapping) else trace
        if self._namespace and isinstance(payload, dict) and isinstance(payload.get("id"), str):
            payload["id"] = namespaced(payload["id"], self._namespace)
        checked, raw = decode_for_sending(payload, self._limits)
        return Submission(checked.id, checked.digest(), raw)

    def _noted_each(self, traces: Iterable[Trace]) -> list[Submission | InvalidTrace]:
        """Check traces; return each as it is noted and sent, or what is wrong with it."""
        noted: list[Submission | InvalidTrace] = []
        for trace in traces:
            try:
                noted.append(self._noted(trace))
            except InvalidTrace as error:
                # As it was raised, it would keep all these traces alive.
                noted.append(InvalidTrace(error.problems))
        return noted

    # What follows are errands: only the thread of the client's own may run them.

    def _send(self, noted: Sequence[Submission | InvalidTrace]) -> list[Submitted]:
        """Note traces in the ledger and put them on the queue; return what became of each, in order."""
        answers: list[str | TraceConflict] = []
        for portion in _portions([one for one in noted if isinstance(one, Submission)]):
            # Noted before they are sent: a message lost on the way leaves a trace that is visibly pending.
            states = self._store.ledger.open(portion)
            pending = [(one.trace_id, one.payload) for one, state in zip(portion, states, strict=True) if state == "pending"]
            if pending:
                send_traces(self._app, self._queues, pending)
            answers += [
                state if isinstance(state, TraceConflict) else one.trace_id for one, state in zip(portion, states, strict=True)
            ]
        answer = iter(answers)
        return [one if isinstance(one, InvalidTrace) else next(answer) for one in noted]

    def _look_up(self, trace_ids: Sequence[str]) -> list[Status | None]:
        records = self._store.ledger.look_up(trace_ids)
        return [status_of(trace_id, record) if record else None for trace_id, record in zip(trace_ids, records, strict=True)]

    def _close(self) -> None:
        self._app.close()
        self._store.close()


def hundreds(traces: Iterable[Trace]) -> Iterator[list[Trace]]:
    """Traces as many at once as go to the servers in one round trip, and no further read than these."""
    taken = iter(traces)
    while found := list(islice(taken, _AT_ONCE)):
        yield found


def submitted(answer: Submitted) -> str:
    """The id of a trace that was submitted; raises why it was not."""
    if isinstance(answer, str):
        return answer
    raise answer


def _portions(submissions: Sequence[Submission]) -> Iterator[list[Submission]]:
    """Cut where there are bytes enough."""
    portion: list[Submission] = []
    size_bytes = 0
    for one in submissions:
        portion.append(one)
        size_bytes += len(one.payload)
        if size_bytes >= _BYTES_AT_ONCE:
            yield portion
            portion, size_bytes = [], 0
    if portion:
        yield portion
