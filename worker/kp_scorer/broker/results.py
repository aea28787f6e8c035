"""Publishes decisions to queues and streams within their limits; raises the errors of :mod:`~kp_scorer.broker.calls`."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import structlog
from celery import Celery
from kombu import Queue

from kp_scorer.broker.calls import waiting, with_producer
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.publishing import Outgoing, portions, publish_all
from kp_scorer.broker.queues import results_queues, results_streams, system_of
from kp_scorer.broker.wire import as_bytes, parse_submission, raw_body, submission_in, task_body
from kp_scorer.decision import Decision, DecisionKind
from kp_scorer.decoding import decode_trace, parse_strict_json
from kp_scorer.errors import InvalidTrace, ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.spans.context import Context, Destination
from kp_scorer.store import Store
from kp_scorer.store.decision_stream import DecisionStream, Publication, Published, Room

_MARK: Final = "decided_at"  # The header that holds a decision's mark.

_PORTION_BYTES: Final = 2_097_152  # Bytes of traces that are published at once: they are in memory several times over.
_REFUSED_WITHIN_S: Final = 10.0
"""A waiting decision is published again every second. After this long without a refusal, no decision of this worker waits."""

log = structlog.get_logger("kp_scorer.broker.results")

_Put = Callable[[Sequence[Publication]], tuple[list[bool], Published]]


class Publisher:
    """Publishes decisions. Threads may share it."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        store: Store,
        count_dropped: Callable[[str, int], None] = lambda name, count: None,
    ) -> None:
        """Publish through the app's connection pool, and to streams in ``store``.

        ``count_dropped`` is called with the name of a ring and the number of decisions that it dropped; at first with 0 for
        each ring.
        """
        self._app = app
        self._settings = settings
        self._count_dropped = count_dropped
        # Review comes first: a sampled decision waits for room there before anybody reads it elsewhere. The review queue is
        # here even if the settings send nothing to it any more, because an earlier decision may still have to be published
        # there.
        published = (each for each in settings.results.publish if each != "revised" or settings.results.via != "task")
        kinds = sorted(published, key=lambda kind: kind != "review")
        queues, streams = results_queues(settings, kinds), results_streams(settings, kinds)
        self._outboxes: dict[str, _Outbox] = {}
        for name, queue in queues.items():
            destination = Destination(system_of(settings.broker), name)
            self._outboxes[name] = _Outbox(f"queue {name}", destination, partial(self._put_on_queue, queue))
        for name in streams:
            put = partial(self._put_on_stream, store.decision_stream(name))
            self._outboxes[name] = _Outbox(f"stream {name}", Destination("redis", name), put)
        for name in filter(settings.is_ring, self._outboxes):
            count_dropped(name, 0)

    def destination(self, decision: Decision) -> Destination | None:
        """Return the queue or stream of a decision's outcome, as spans name it; None if the outcome is not published."""
        names = self._names(decision)
        return self._outboxes[names[-1]].destination if names else None

    def full(self) -> set[str]:
        """Return the names of the queues and streams that have lately refused decisions, so that this worker waits for room."""
        refused_since = time.monotonic() - _REFUSED_WITHIN_S
        return {name for name, outbox in self._outboxes.items() if outbox.refused_at >= refused_since}

    def publication(self, decision: Decision, context: Context, message: Any, published_to: set[str]) -> Publication:
        """Build the message of a decision; with ``results.with_trace`` it includes the trace from the kombu message.

        ``published_to`` names the queues and streams that have it already; :meth:`publish_all` adds to them.
        """
        if not self._settings.results.with_trace:
            return Publication(decision, context, published_to=published_to)
        limits = self._settings.limits
        size_bytes = limits.message_bytes if PACKED_BY in message.headers else len(raw_body(message))
        return Publication(decision, context, partial(_trace_in, message, decision, limits), size_bytes, published_to)

    def publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        """Publish decisions, in one round trip to each queue and stream, or in several if they carry traces.

        A sampled decision goes to review first, and then to the queue of its outcome. Decisions of an outcome that is not
        published succeed at once. On a full ring, each decision drops the oldest.

        On a queue, each is a persistent JSON message, or one that calls a task of another app; its id is the trace's, and its
        header ``decided_at`` is the decision's mark. On a stream, each is an entry with fields for both, and for its context.

        Return for each decision None once the broker, or Redis, has it; otherwise the error, for example because the queue is
        full of unread decisions. Publish those again, which is safe: consumers recognise a copy by its trace id and mark.
        """
        errors: list[ScorerError | None] = [None] * len(publications)
        for name, outbox in self._outboxes.items():
            places = [
                place
                for place, each in enumerate(publications)
                if errors[place] is None and name in self._names(each.decision) and name not in each.published_to
            ]
            if not places:
                continue
            failure: ScorerError = ServiceUnavailable(f"results: the {outbox.name} is full of unread decisions")
            try:
                accepted, dropped = outbox.put_all([publications[place] for place in places])
                self._count_dropped(name, dropped)
            except (ServiceUnavailable, SettingsError) as error:
                failure, accepted = error, [False] * len(places)
            for place, is_accepted in zip(places, accepted, strict=True):
                if is_accepted:
                    publications[place].published_to.add(name)
                else:
                    errors[place] = failure
        return errors

    def _room(self, name: str) -> Room:
        return Room(self._settings.queues.results_limit, self._settings.results_bytes, self._settings.is_ring(name))

    def _put_on_stream(self, stream: DecisionStream, publications: Sequence[Publication]) -> tuple[list[bool], Published]:
        result = stream.publish(publications, self._room(stream.name))
        return [True] * result.published, result

    def _put_on_queue(self, queue: Queue, publications: Sequence[Publication]) -> tuple[list[bool], Published]:
        messages, room = [self._message(publication) for publication in publications], self._room(queue.name)
        if self._settings.broker.is_redis:
            args = queue.name, messages, room
            result = with_producer(self._app, "results", lambda producer: producer.channel.publish_within(*args))
            return [True] * result.published, result
        # RabbitMQ notices late that a queue is full, does not limit another app's queue, and does not report the decisions that
        # it drops. So count them here.
        unread = waiting(self._app, queue)
        count = len(messages) if room.is_ring else max(0, min(len(messages), room.most - unread))
        accepted = publish_all(self._app, "results", queue, messages[:count], [queue]) if count else []
        published = sum(accepted)
        dropped = max(0, unread + published - room.most) if room.is_ring else 0
        return accepted, Published(published, unread + published - dropped, dropped)

    def _message(self, publication: Publication) -> Outgoing:
        """Build the message of a decision, which may call a task. Copies of it have the same id and mark."""
        body, trace_id = publication.body(), publication.decision.trace_id
        headers = {**publication.context, _MARK: publication.decision.mark}
        results = self._settings.results
        if results.via != "task":
            return Outgoing(body, trace_id, headers)
        # Without a value for ignore_result, the task's own declaration says whether its result is stored.
        call = self._app.amqp.as_task_v2(trace_id, results.task, argsrepr="(decision,)", origin="kp-scorer", ignore_result=None)
        return Outgoing(task_body(body), trace_id, {**call.headers, **headers})

    def _names(self, decision: Decision) -> list[str]:
        """Return the queues or streams to which a decision goes; the last is that of its outcome, or of revisions."""
        kinds: list[DecisionKind] = [decision.outcome] if decision.sampled is None else ["review", decision.outcome]
        if decision.revised_by:
            kinds = [decision.outcome] if self._settings.results.via == "task" else ["revised"]
        return [self._settings.queues.name(each) for each in kinds if each in self._settings.results.publish]


def _trace_in(message: Any, decision: Decision, limits: Limits) -> bytes:
    """Return the trace in a kombu message as JSON, with the decision's score; empty if it exceeds the limits of this worker.

    If checks ran on the trace, fields outside the schema are left out, as no check has seen them.
    """
    submission = submission_in(message, limits)
    document: Any = None
    if not decision.checks:
        # Unread fields may hold values that other programs cannot parse, such as NaN.
        with suppress(InvalidTrace):
            document = parse_strict_json(submission, limits)
    if document is None:
        try:
            trace = decode_trace(parse_submission(submission, limits), limits)
        except InvalidTrace:
            return b""
        document = trace.model_dump(mode="json", exclude_unset=True)
    return as_bytes({**document, "metadata": {**document["metadata"], "quality_score": decision.score}})


class _Outbox:
    """Publishes decisions to one queue or stream, and remembers whether that is full. Threads may share it."""

    def __init__(self, name: str, destination: Destination, put: _Put) -> None:
        """Publish by ``put``, which returns True for each decision that had room. Those without room are the last ones."""
        self.name = name
        self.destination = destination
        self._put = put
        self.refused_at = -math.inf  # The time of the last refusal, by the monotonic clock; -inf if it accepts all by now.

    def put_all(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        """Publish decisions, in order; return whether each is published, and the number of old ones that were dropped.

        After an error any of them may be published. Log when the queue or stream becomes full, and when it has room again.
        """
        accepted: list[bool] = []
        unread = dropped = 0
        for portion in portions(publications, lambda each: each.trace_bytes, _PORTION_BYTES):
            of_portion, (published, unread, dropped_now) = self._put(portion)
            accepted += of_portion
            dropped += dropped_now
            if published < len(portion):
                break
        accepted += [False] * (len(publications) - len(accepted))
        # A queue that the last decision has just filled does not count as full, as no decision waits for room yet.
        is_full, was_full = not all(accepted), self.refused_at > -math.inf
        self.refused_at = time.monotonic() if is_full else -math.inf
        if is_full and not was_full:
            log.warning("results_full", queue=self.destination.name, unread=unread)
        elif was_full and not is_full:
            log.info("results_drained", queue=self.destination.name, unread=unread)
        return accepted, dropped
