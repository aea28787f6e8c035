"""Publishing to queues and streams: submissions, and decisions within the limits of where they go.

What publishes raises the errors of :mod:`~kp_scorer.broker.calls`, and ServiceUnavailable if Redis fails.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import amqp
import structlog
from celery import Celery
from kombu import Producer, Queue
from kombu.transport import virtual

from kp_scorer.broker.calls import waiting, with_producer
from kp_scorer.broker.queues import SubmissionQueues, destination_of, results_queues, results_streams
from kp_scorer.broker.rabbitmq import anew, confirming_channel
from kp_scorer.broker.wire import PACKED_BY, SENT_MS, TASK_NAME, as_bytes, parse_submission, raw_body, submission_in, task_body
from kp_scorer.decision import Decision, Outcome
from kp_scorer.decoding import Limits, decode_trace, parse_strict_json
from kp_scorer.errors import InvalidTrace, QueueFull, ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings
from kp_scorer.spans import current_context
from kp_scorer.spans.context import NO_CONTEXT, Context, Destination
from kp_scorer.store import Store
from kp_scorer.store.decision_stream import DecisionStream, Publication, Published, Room

_TAKES_NO_MORE: Final = "RabbitMQ's queue {!r} takes no more for now, as when a policy limits its length"

_MARK: Final = "decided_at"  # The header that holds a decision's mark.

_PORTION_BYTES: Final = 2_097_152  # Bytes of traces published at once: they are in memory several times over.
_REFUSED_WITHIN_S: Final = 10.0
"""A decision that waits for room is published again every second. Without a refusal for so long, none waits in this worker."""

log = structlog.get_logger("kp_scorer.broker.publishing")

T = TypeVar("T")


def portions(items: Sequence[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[Sequence[T]]:
    """Divide items into those that are sent together: as many as have ``most_bytes`` with the last one."""
    start = size_bytes = 0
    for end, item in enumerate(items, 1):
        size_bytes += size_of(item)
        if size_bytes >= most_bytes:
            yield items[start:end]
            start, size_bytes = end, 0
    if start < len(items):
        yield items[start:]


class Outgoing(NamedTuple):
    """A message to be published: UTF-8 JSON and what goes with it."""

    body: bytes
    message_id: str
    headers: Mapping[str, Any] = MappingProxyType({})


def publish_all(
    app: Celery, purpose: str, queue: Queue, messages: Sequence[Outgoing], if_missing: Sequence[Queue] = ()
) -> list[bool]:
    """Put persistent messages on a queue, in order, and return once the broker has them, all in one round trip.

    It returns for each whether the queue accepted it: RabbitMQ refuses messages over the limit of a queue, Redis none. For
    ``purpose`` and ``if_missing`` see :func:`with_producer`. After an error some may be on the queue; publish all again.
    """
    if app.conf.broker_url.startswith("redis"):
        with_producer(app, purpose, lambda producer: producer.channel.publish_all(queue.name, messages))
        return [True] * len(messages)

    def publish_to_rabbitmq(producer: Producer) -> list[bool]:
        properties = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
        outgoing = [
            amqp.Message(body, message_id=message_id, application_headers=dict(headers), **properties)
            for body, message_id, headers in messages
        ]
        return publish_confirmed(producer, outgoing, queue)

    return with_producer(app, purpose, publish_to_rabbitmq, if_missing)


def publish_confirmed(producer: Producer, messages: Sequence[amqp.Message], queue: Queue) -> list[bool]:
    """Publish to a queue on RabbitMQ and wait for all confirms together; return for each whether the queue accepted it.

    It raises errors of py-amqp, which :func:`with_producer` handles.
    """
    channel = confirming_channel(producer.channel.connection)
    # Its own timeout is broker.timeout_s.
    return channel.publish_all(messages, queue.exchange.name, queue.routing_key, producer.connection.connect_timeout)


def send_traces(app: Celery, queues: SubmissionQueues, submissions: Sequence[tuple[str, bytes]]) -> None:
    """Put submissions, each an id and JSON, on the queue of traces; if RabbitMQ has none, declare the queues of submissions.

    After an error some may have been sent.
    """
    headers = {**current_context(), "task": TASK_NAME, SENT_MS: int(time.time() * 1_000)}
    messages = [Outgoing(task_body(trace), trace_id, {**headers, "id": trace_id}) for trace_id, trace in submissions]
    if not all(publish_all(app, "submit", queues.traces, messages, if_missing=queues.in_order)):
        raise QueueFull(f"submit: {_TAKES_NO_MORE.format(queues.traces.name)}")


def send_again(app: Celery, queue: Queue, message: Any) -> None:
    """Put a message that came from RabbitMQ at the end of ``queue``, as one that was never delivered; to be acknowledged then.

    After an error it stays as it is; after SettingsError, RabbitMQ refuses it as it is.
    """
    # Not by the default exchange, by which a message also goes to every queue that its producer named in a header CC.
    if not all(with_producer(app, "traces", lambda producer: publish_confirmed(producer, [anew(message)], queue))):
        raise ServiceUnavailable(f"traces: {_TAKES_NO_MORE.format(queue.name)}")


def acknowledge_all(messages: Sequence[Any]) -> None:
    """Acknowledge kombu messages that came by one channel; on Redis in one round trip."""
    if messages and isinstance(channel := messages[0].channel, virtual.Channel):
        channel.qos.ack_all([message.delivery_tag for message in messages])
    else:
        for message in messages:
            message.ack()


class Publisher:
    """Publishes decisions. Safe to share between threads."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        store: Store,
        count_dropped: Callable[[str, int], None] = lambda name, count: None,
    ) -> None:
        """Publish through the app's connection pool, and to streams in ``store``.

        ``count_dropped`` gets the number of decisions that a ring dropped, by the ring's name, and first 0 for each ring.
        """
        self._settings = settings
        self._count_dropped = count_dropped
        # Review comes first: a sampled decision waits for room there before anybody reads it elsewhere. It is here also where
        # settings send nothing to review any more, as a decision that was made before may not have been published.
        outcomes = sorted(settings.results.publish, key=lambda outcome: outcome != "review")
        queues, streams = results_queues(settings, outcomes), results_streams(settings, outcomes)
        # By name, because several outcomes may go to the same one.
        self._outboxes: dict[str, _Outbox] = {
            **{name: _QueueOutbox(app, queue, settings) for name, queue in queues.items()},
            **{name: _StreamOutbox(store.decision_stream(name), settings) for name in streams},
        }
        for name, outbox in self._outboxes.items():
            if outbox.is_ring:
                count_dropped(name, 0)

    def destination(self, decision: Decision) -> Destination | None:
        """Return the queue or stream of a decision's outcome, as spans name it; None if the outcome is not published."""
        names = self._names(decision)
        return self._outboxes[names[-1]].destination if names else None

    def full(self) -> set[str]:
        """Return the names of the queues and streams that have just refused decisions, so that this worker waits for them."""
        refused_since = time.monotonic() - _REFUSED_WITHIN_S
        return {name for name, outbox in self._outboxes.items() if outbox.refused_at >= refused_since}

    def publication(self, decision: Decision, context: Context, message: Any, published_to: set[str]) -> Publication:
        """Build what is published for a decision; with ``results.with_trace`` also the trace that its kombu message submitted.

        ``published_to`` are the queues and streams that have it already; :meth:`publish_all` adds to them.
        """
        if message is None or not self._settings.results.with_trace:
            return Publication(decision, context, published_to=published_to)
        limits = self._settings.limits
        size_bytes = limits.message_bytes if PACKED_BY in message.headers else len(raw_body(message))
        return Publication(decision, context, partial(_trace_in, message, decision, limits), size_bytes, published_to)

    def publish(self, decision: Decision, context: Context = NO_CONTEXT, message: Any = None) -> None:
        """Publish a decision, or raise the error that :meth:`publish_all` would return."""
        (error,) = self.publish_all([self.publication(decision, context, message, set())])
        if error is not None:
            raise error

    def publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        """Publish decisions by their outcomes, all of a queue or a stream in one round trip; with traces in several.

        A sampled decision goes to review first, and once it is there, also where its outcome goes. Decisions of an outcome that
        is not published succeed at once. On a ring that is full, each drops the oldest one.

        On a queue each is a persistent JSON message, or one that calls a task of another app; its id is the trace's, and its
        header ``decided_at`` is the decision's mark. On a stream each is an entry with fields for both, and for its context.

        Return for each decision None once the broker, or Redis, has it, or the error that kept it from there, as that its queue
        is full of unread decisions. Publish those again, which is safe: consumers recognise a copy by its trace id and mark.
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

    def _names(self, decision: Decision) -> list[str]:
        """Return the queues or streams that a decision goes to, that of its outcome last."""
        outcomes: list[Outcome] = [decision.outcome] if decision.sampled is None else ["review", decision.outcome]
        return [self._settings.queues.name(each) for each in outcomes if each in self._settings.results.publish]


def _trace_in(message: Any, decision: Decision, limits: Limits) -> bytes:
    """Return the trace that a kombu message submitted, as JSON with the decision's score; empty if it is over the limits here.

    A checked trace goes without the fields that the schema does not have, as no check has seen them.
    """
    submission = submission_in(message, limits)
    document: Any = None
    if not decision.checks:
        # Fields that no worker reads may hold what other programs do not read, such as NaN.
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
    """Puts decisions on one queue or stream. Safe to share between threads."""

    def __init__(self, kind: str, destination: Destination, settings: Settings) -> None:
        self.name = f"{kind} {destination.name}"
        self.destination = destination
        self.is_ring = settings.is_ring(destination.name)
        self.refused_at = -math.inf  # When it last refused a decision, by the monotonic clock; never, if it accepts all by now.
        self._room = Room(settings.queues.results_limit, settings.results_bytes, self.is_ring)

    def put_all(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        """Publish decisions, in order; return for each whether it is published, and how many old ones were dropped for them.

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
        # A queue that the last decision has just filled does not count as full, as nothing waits for room on it yet.
        is_full, was_full = not all(accepted), self.refused_at > -math.inf
        self.refused_at = time.monotonic() if is_full else -math.inf
        if is_full and not was_full:
            log.warning("results_full", queue=self.destination.name, unread=unread)
        elif was_full and not is_full:
            log.info("results_drained", queue=self.destination.name, unread=unread)
        return accepted, dropped

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], Published]:
        """Publish; return for each decision whether it is, without the last ones that had no room."""
        raise NotImplementedError


class _QueueOutbox(_Outbox):
    def __init__(self, app: Celery, queue: Queue, settings: Settings) -> None:
        super().__init__("queue", destination_of(settings, queue.name), settings)
        self._app = app
        self._queue = queue
        self._task = settings.results.task if settings.results.via == "task" else ""

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], Published]:
        messages = [self._message(publication) for publication in publications]
        if self.destination.system == "redis":
            args = self._queue.name, messages, self._room
            result = with_producer(self._app, "results", lambda producer: producer.channel.publish_within(*args))
            return [True] * result.published, result
        # RabbitMQ notices late that a queue is full, does not limit another app's queue, and does not report what it drops.
        limit, unread = self._room.most, waiting(self._app, self._queue)
        room = len(messages) if self.is_ring else max(0, min(len(messages), limit - unread))
        accepted = publish_all(self._app, "results", self._queue, messages[:room], [self._queue]) if room else []
        published = sum(accepted)
        dropped = max(0, unread + published - limit) if self.is_ring else 0
        return accepted, Published(published, unread + published - dropped, dropped)

    def _message(self, publication: Publication) -> Outgoing:
        """Build the message of a decision, which calls a task if there is one: copies of it have the same id and mark."""
        body, trace_id = publication.body(), publication.decision.trace_id
        headers = {**publication.context, _MARK: publication.decision.mark}
        if not self._task:
            return Outgoing(body, trace_id, headers)
        # The task itself says whether its result is kept.
        call = self._app.amqp.as_task_v2(trace_id, self._task, argsrepr="(decision,)", origin="kp-scorer", ignore_result=None)
        return Outgoing(task_body(body), trace_id, {**call.headers, **headers})


class _StreamOutbox(_Outbox):
    def __init__(self, stream: DecisionStream, settings: Settings) -> None:
        super().__init__("stream", Destination("redis", stream.name), settings)
        self._stream = stream

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], Published]:
        result = self._stream.publish(publications, self._room)
        return [True] * result.published, result
