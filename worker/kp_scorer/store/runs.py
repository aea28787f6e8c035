"""Stores runs that arrive as spans. Redis collects them until they are complete; then one process claims and submits each."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, Literal, NamedTuple

import redis

from kp_scorer.decoding import parse_json
from kp_scorer.errors import InvalidTrace, QueueFull
from kp_scorer.limits import Limits
from kp_scorer.settings.sections import ServeSettings
from kp_scorer.store.connection import in_one_trip, reports_outages
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.records import number_in, text_in
from kp_scorer.store.scripts import row, script
from kp_scorer.trace import TRACE_ID_PREFIX

_LEASE_MS: Final = 60_000  # A claim ends after this time. No conversion takes as long, so its process died or cannot submit.
_FULL_MS: Final = 2_000  # If their queue is full, due runs wait this long before they are due again.
_EMPTY: Final = 6  # A run without an agent's span waits at most this many times ``quiet_s``, as health checks take room, too.
_REMEMBERED_MS: Final = 3_600_000  # Instrumentations that record a run twice do so within this time.
_LONGEST_MS: Final = 86_400_000  # A run is complete this long after its first span, even if more spans arrive.

NO_WAIT: Final = "1"  # Stands for the outcome of a run that need not wait for one.
MOST_VALUES: Final = 300_000  # The most values in a run; converted, each takes up to a kilobyte.
RUN_PREFIX: Final = f"{TRACE_ID_PREFIX}otel:"  # The prefix of the ids of traces that runs become.
_INCOMPLETE: Final = b'"isIncomplete":true,'

Outcome = Literal["stored", "closed", "dead", "too_large", "full"]
Ended = Literal["submitted", "left_out", "dead", "forgotten", "forwarded"]


class ReceivedSpan(NamedTuple):
    """A span in the form in which it is stored."""

    span_id: str
    content: bytes  # The span in OTLP's JSON; empty if it is too large.


class ClaimedRun(NamedTuple):
    """A run that is quiet, claimed by this process."""

    run_id: str
    is_too_large: bool  # True if some of its spans were rejected.
    spans: Sequence[bytes]  # Each claim returns them in the same order.
    attempts: int  # The number of claims that may have ended a process, this one included.
    has_waited: bool = False  # True if it has waited for spans that it lacks.
    closed: str = ""  # The ``outcome`` that :meth:`Runs.close` got, or how the run has ended since; empty if it is open.
    queue: str = ""  # The queue of the sender of its first spans; empty for the first queue.
    sender: str = ""  # The sender of its first spans, if there are several senders.

    @property
    def trace_id(self) -> str:
        """The id of the trace that the run becomes."""
        return f"{RUN_PREFIX}{self.run_id}"

    @property
    def export(self) -> bytes:
        """The spans in OTLP's JSON, in the form that the run's dead letter keeps."""
        # Without the id, all runs without a stored span would be the same dead letter.
        spans = b",".join(self.spans) or b'{"traceId":"%s"}' % self.run_id.encode()
        mark = _INCOMPLETE if self.is_too_large else b""
        queue = b',"queue":%s' % json.dumps(self.queue).encode() if self.queue else b""
        return b'{%s"resourceSpans":[{"scopeSpans":[{"spans":[%s]}]}]%s}' % (mark, spans, queue)


def run_in(trace_id: str, payload: bytes) -> tuple[str, list[ReceivedSpan], str] | None:
    """Return the run in a dead letter, its spans and its queue; None if it holds no run.

    Raises InvalidTrace if the run is not complete.
    """
    if not (trace_id.startswith(RUN_PREFIX) and payload.startswith((b'{"resourceSpans":', b"{" + _INCOMPLETE))):
        return None
    if payload.startswith(b"{" + _INCOMPLETE):
        raise InvalidTrace.whole("expected a whole run; spans of this one were rejected")
    export: Any = parse_json(payload, Limits(message_bytes=len(payload), values=MOST_VALUES))
    try:
        spans = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
        received = [ReceivedSpan(each["spanId"], json.dumps(each).encode()) for each in spans]
    except (LookupError, TypeError, AttributeError):
        raise InvalidTrace.whole("expected the spans of a run") from None
    return trace_id.removeprefix(RUN_PREFIX), received, str(export.get("queue", ""))


class _Bounds(NamedTuple):
    most_runs: int
    most_total_bytes: int
    most_spans: int
    most_bytes: int
    quiet_ms: int
    longest_ms: int
    kept_ms: int


def _claimed(run_id: bytes, fields: Sequence[bytes]) -> ClaimedRun | None:
    by_id = dict(zip(fields[::2], fields[1::2], strict=True))
    spans = [content for span_id, content in sorted(by_id.items()) if content and not span_id.startswith(b":")]
    closed, queue, sender = (text_in(by_id.get(name)) for name in (b":closed", b":queue", b":sender"))
    is_too_large, has_waited, attempts = b":too_large" in by_id, b":has_waited" in by_id, number_in(by_id.get(b":attempts"))
    return ClaimedRun(text_in(run_id), is_too_large, spans, attempts, has_waited, closed, queue, sender) if run_id else None


class Recording(NamedTuple):
    """A run as one instrumentation recorded it. Others may record it again, under a trace id of their own."""

    digest: str  # The digest of its service, and of all that was said and called.
    scope: str  # The names of the instrumentations.
    began_ns: int
    ended_ns: int


@script(tuple[bytes, int])
def _store_spans(
    *, keys: Keys, run_id: str, queue: str, sender: str, bounds: _Bounds, spans: Sequence[ReceivedSpan]
) -> None: ...


@script(row(_claimed))
def _claim_run(
    *,
    keys: Keys,
    lease_ms: int,
    quiet_ms: int,
    open_ms: int,
    outcome_wait_ms: int,
    full_ms: int,
    preferred: str,
    full: Sequence[str],
) -> None: ...


@script(bool)
def _settle_run(
    *, keys: Keys, run_id: str, size_bytes: int, wait_ms: int, agent_span: str, outcome: str, outcome_wait_ms: int
) -> None: ...


@script(bool)
def _finish_run(*, keys: Keys, run_id: str, ended: Ended, kept_ms: int) -> None: ...


@reports_outages("runs")
class Runs:
    """The runs under one prefix, by the ids of OpenTelemetry's traces. Methods raise ServiceUnavailable without Redis."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: ServeSettings) -> None:
        self._client = client
        self._keys = keys
        sizes = settings.runs, settings.total_bytes, settings.run_spans, settings.run_bytes
        self._quiet_ms, self._open_ms = int(settings.quiet_s * 1_000), int(settings.open_s * 1_000)
        self._outcome_wait_ms = int(settings.outcome_wait_s * 1_000)
        self._kept_ms = int(settings.keep_spans_s * 1_000)
        self._bounds = _Bounds(*sizes, self._quiet_ms, _LONGEST_MS, KEPT_S * 1_000)

    def store(self, run_id: str, spans: Sequence[ReceivedSpan], queue: str = "", sender: str = "") -> tuple[Outcome, int]:
        """Store spans of a run, all or none, and each id once; return the outcome and the number of rejected spans.

        The run goes to the ``queue`` of its first spans, and counts towards the share of their ``sender`` if there are several.
        A dead run rejects all spans, even those that its dead letter has.
        """
        return self.store_all([(run_id, spans)], queue, sender)[0]

    def store_all(
        self, runs: Iterable[tuple[str, Sequence[ReceivedSpan]]], queue: str, sender: str
    ) -> list[tuple[Outcome, int]]:
        """Store spans of several runs in one round trip, each as :meth:`store` does, and return what it would for each."""
        options: dict[str, Any] = {"keys": self._keys, "queue": queue, "sender": sender, "bounds": self._bounds}
        commands = [_store_spans.command(run_id=run_id, spans=spans, **options) for run_id, spans in runs]
        replies = in_one_trip(self._client, commands, raise_on_error=False)
        # Repeat what failed by itself: that loads the script if Redis lacks it, and raises other errors.
        results = [
            _store_spans.run(self._client, command) if isinstance(reply, Exception) else _store_spans.parse(reply)
            for command, reply in zip(commands, replies, strict=True)
        ]
        return [(outcome.decode(), rejected) for outcome, rejected in results]  # type: ignore[misc]  # by store_spans.lua

    def held(self) -> tuple[int, int]:
        """Return the number of runs that are being collected, and the bytes of all their spans."""
        held_bytes: Any = self._client.get(self._keys.runs_bytes)
        return int(self._client.zcard(self._keys.runs)), number_in(held_bytes)

    def collected(self) -> Iterator[ClaimedRun]:
        """Yield the runs that are being collected or kept, with their spans."""
        for index in (self._keys.runs, self._keys.runs_kept):
            run_ids: Any = self._client.zrange(index, 0, -1)
            yield from filter(None, map(self._run, map(text_in, run_ids)))

    def ended(self, trace_id: str) -> ClaimedRun | None:
        """Return the run that became this trace, without spans once they are removed; None if the run is open or unknown."""
        run = self._run(trace_id.removeprefix(RUN_PREFIX))
        return run if run and run.closed else None

    def _run(self, run_id: str) -> ClaimedRun | None:
        fields: Any = self._client.hgetall(self._keys.run(run_id))
        return _claimed(run_id.encode(), list(chain(*fields.items())))

    def due_by_sender(self) -> dict[tuple[str, str], list[str]]:
        """Return the ids of the runs that are quiet, by their senders and queues; none if senders are not told apart."""
        if not self._client.hgetall(self._keys.runs_by_sender):
            return {}
        # Redis' clock, by which runs become due.
        seconds, microseconds = self._client.time()
        run_ids: Any = self._client.zrangebyscore(self._keys.runs, "-inf", 1_000 * seconds + microseconds // 1_000)
        senders = in_one_trip(self._client, (("HMGET", self._keys.run(text_in(each)), ":sender", ":queue") for each in run_ids))
        by_sender = defaultdict[tuple[str, str], list[str]](list)
        for run_id, (sender, queue) in zip(run_ids, senders, strict=True):
            by_sender[text_in(sender), text_in(queue)].append(text_in(run_id))
        return by_sender

    def claim(self, full: Sequence[str] = (), preferred: str = "") -> ClaimedRun | None:
        """Claim a run that is quiet, if possible the ``preferred`` one; return None if none is. The claim ends after a minute.

        Quiet runs of the queues that are ``full`` wait for two seconds more.
        """
        return _claim_run(
            self._client,
            keys=self._keys,
            lease_ms=_LEASE_MS,
            quiet_ms=self._quiet_ms,
            open_ms=self._open_ms,
            outcome_wait_ms=self._outcome_wait_ms,
            full_ms=_FULL_MS,
            preferred=preferred,
            full=full,
        )

    def close(self, run: ClaimedRun, agent_span: str, outcome: str = NO_WAIT) -> bool:
        """Close a claimed run, so that it takes no more spans; return False if spans have come since the claim.

        Also return False if another process has claimed the run since and ended it, or somebody has forgotten it.
        ``outcome`` is its late outcome as JSON, or ``NO_WAIT``. If it is empty, the run is not closed until ``outcome_wait_s``
        have passed or a late outcome comes; the first call begins the wait.
        """
        return self._settle(run, 0, agent_span, outcome)

    def agent_span(self, trace_id: str) -> str:
        """Return the id of the agent's span in the run that became this trace; empty if unknown, as it is after an hour."""
        run_id = trace_id.removeprefix(RUN_PREFIX)
        span: Any = self._client.hget(self._keys.run(run_id), ":agent") if run_id != trace_id else b""
        return text_in(span)

    def wait(self, run: ClaimedRun, *, is_empty: bool) -> None:
        """Let a claimed run wait for the spans that it lacks, for ``open_s``, or less if no span is an agent's yet."""
        self._settle(run, min(self._open_ms, _EMPTY * self._quiet_ms) if is_empty else self._open_ms)

    def _settle(self, run: ClaimedRun, wait_ms: int, agent_span: str = "", outcome: str = NO_WAIT) -> bool:
        return _settle_run(
            self._client,
            keys=self._keys,
            run_id=run.run_id,
            size_bytes=sum(map(len, run.spans)),
            wait_ms=wait_ms,
            agent_span=agent_span,
            outcome=outcome,
            outcome_wait_ms=self._outcome_wait_ms,
        )

    def recorded_before(self, run: ClaimedRun, recording: Recording) -> str:
        """Return the id of the run that another instrumentation recorded at the same time; empty if there is none."""
        # Only runs of the same sender count: otherwise a sender could keep another's run from being decided.
        key, own = self._keys.recording(run.sender + recording.digest), json.dumps([run.run_id, *recording[1:]])
        self._client.set(key, own, nx=True, px=_REMEMBERED_MS)
        other_id, scope, began_ns, ended_ns = json.loads(self._client.get(key) or own)
        is_at_once = began_ns <= recording.ended_ns and recording.began_ns <= ended_ns
        return other_id if other_id != run.run_id and scope != recording.scope and is_at_once else ""

    def release(self, run_id: str) -> None:
        """Take back the attempts of a run whose process is alive and waits for a service. The claim lasts until it expires."""
        self._client.hdel(self._keys.run(run_id), ":attempts")

    def finish(self, run_id: str, ended: Ended) -> bool:
        """Remove the spans of a run, after ``keep_spans_s`` if it was submitted; return whether there were any."""
        return _finish_run(self._client, keys=self._keys, run_id=run_id, ended=ended, kept_ms=self._kept_ms)

    def forget(self, trace_id: str, ended: Ended = "forgotten") -> bool:
        """Remove the spans of the run that became a trace; a ``forwarded`` one must be closed. Return whether it had any."""
        return trace_id.startswith(RUN_PREFIX) and self.finish(trace_id.removeprefix(RUN_PREFIX), ended)

    def reopen(self, run_id: str, spans: Sequence[ReceivedSpan], queue: str) -> None:
        """Store the spans of a dead run, so that it is submitted again; raise QueueFull if there is no room for them."""
        if self._client.zscore(self._keys.runs, run_id) is None:
            # Redis remembers the span ids of a finished run and would refuse them.
            self._client.delete(self._keys.run(run_id))
        if self.store(run_id, spans, queue)[0] != "stored":
            raise QueueFull("runs: no room until some are submitted, or this one is being submitted")
