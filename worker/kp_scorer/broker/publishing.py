"""Publishing to queues and streams: submissions, and decisions within the limits of where they go.

What publishes raises the errors of :mod:`~kp_scorer.broker.connection`, and ServiceUnavailable if Redis fails.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar, get_args

import amqp
import structlog
from celery import Celery
from kombu import Producer, Queue
from kombu.transport import virtual

from kp_scorer.broker.connection import waiting, with_producer
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
from kp_scorer.store.decision_stream import DecisionStream, Publication

_TAKES_NO_MORE: Final = "RabbitMQ's queue {!r} takes no more for now, as when a policy limits its length"

_MARK: Final = "decided_at"  # The header that holds a decision's mark.

_PORTION_BYTES: Final = 2_097_152  # Of traces that go along at once: they fill the memory several times over.
_ROOM_ASKED_WITHIN_S: Final = 10.0
"""What waits for room asks for it every second. After so long without, nothing waits here any more: it is another worker's."""
_TAKES_AGAIN_AT: Final = 0.8
"""A quorum queue of RabbitMQ that was full refuses until it has fewer messages than this share of its limit."""
_REFUSES_FOR_S: Final = 1.0
"""A queue of RabbitMQ that has room by the settings and refuses for so long is full by a policy, or by its own app's limit."""
_NO_REFUSALS: Final = (-math.inf, -math.inf)

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
        count_left_out: Callable[[str, int], None] = lambda name, count: None,
    ) -> None:
        """Publish through the app's connection pool, and to streams in ``store``.

        ``count_left_out`` gets how many decisions a full queue that nobody waits for was not sent; of each such queue first 0.
        """
        self._settings = settings
        self._count_left_out = count_left_out
        # By name, because several outcomes may go to the same one. One for review also where no trace goes there any more: a
        # decision may have been made before, and not been published.
        outboxes: dict[str, _Outbox] = {
            **{name: _QueueOutbox(app, queue, settings) for name, queue in results_queues(settings).items()},
            **{name: _StreamOutbox(store.decision_stream(name), settings) for name in results_streams(settings)},
        }
        # That for review comes first: what is sampled waits for room there before anybody reads it elsewhere.
        self._outboxes = dict(sorted(outboxes.items(), key=lambda outbox: outbox[0] != settings.queues.review))
        for name, outbox in self._outboxes.items():
            if not outbox.waits:
                count_left_out(name, 0)

    def destination(self, decision: Decision) -> Destination | None:
        """The queue or stream that a decision goes to by its outcome, as spans name it; None if it is not published."""
        names = self._names(decision)
        return self._outboxes[names[-1]].destination if names else None

    def full(self) -> set[str]:
        """The names of the queues and streams that workers wait for, as they had no room for a decision when one last came."""
        asked_since = time.monotonic() - _ROOM_ASKED_WITHIN_S
        return {name for name, outbox in self._outboxes.items() if outbox.waits and outbox.refused_at >= asked_since}

    def publication(self, decision: Decision, context: Context, message: Any, published_to: set[str]) -> Publication:
        """What is published of a decision; with ``results.with_trace`` also the trace that its kombu message submitted.

        ``published_to`` are the queues and streams that have it already; :meth:`publish_all` adds to them.
        """
        if message is None or not self._settings.results.with_trace:
            return Publication(decision, context, published_to=published_to)
        limits = self._settings.limits
        size_bytes = limits.message_bytes if PACKED_BY in message.headers else len(raw_body(message))
        return Publication(decision, context, partial(_trace_in, message, decision, limits), size_bytes, published_to)

    def publish(self, decision: Decision, context: Context = NO_CONTEXT, message: Any = None) -> None:
        """Publish a decision, as :meth:`publish_all` does, or raise the error that that returns."""
        (error,) = self.publish_all([self.publication(decision, context, message, set())])
        if error is not None:
            raise error

    def publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        """Put decisions where those of their outcome go, all of a queue or a stream in one round trip; with traces in several.

        What is sampled goes to review first, and once that has it, also where its outcome does. Decisions of an outcome that is
        not published succeed at once, and those without room on a queue that nobody waits for.

        On a queue each is a persistent JSON message, or one that calls a task of another app; its id is the trace's, and its
        header ``decided_at`` is the decision's mark. On a stream each is an entry with fields for both, and for its context.

        It returns for each None once the broker, or Redis, has it; or why it is not published, as that its queue is full of
        unread decisions. Publish those again, which is safe: consumers recognise a copy by its trace id and mark.
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
                accepted, is_full = outbox.put_all([publications[place] for place in places])
            except (ServiceUnavailable, SettingsError) as error:
                failure, accepted = error, [False] * len(places)
            else:
                if not is_full:
                    failure = ServiceUnavailable(f"results: the {outbox.name} refuses decisions, and is not full")
                elif not outbox.waits:
                    self._count_left_out(name, accepted.count(False))
                    accepted = [True] * len(places)
            for place, is_accepted in zip(places, accepted, strict=True):
                if is_accepted:
                    publications[place].published_to.add(name)
                else:
                    errors[place] = failure
        return errors

    def _names(self, decision: Decision) -> list[str]:
        """The queues or streams that a decision goes to, that of its outcome last."""
        queues, via = self._settings.queues, self._settings.results.via
        outcomes: list[Outcome] = [decision.outcome] if decision.sampled is None else ["review", decision.outcome]
        return [queues.name(each, decision.visibility) for each in outcomes if via(each) != "none"]


def _trace_in(message: Any, decision: Decision, limits: Limits) -> bytes:
    """The trace that a kombu message submitted, as JSON with the decision's score; empty if it is over the limits here.

    What was checked goes without the fields that a trace does not have: no check has seen these.
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
    """Where decisions for one queue or stream are put. Safe to share between threads."""

    def __init__(self, kind: str, destination: Destination, settings: Settings) -> None:
        self.name = f"{kind} {destination.name}"
        self.destination = destination
        self.refused_at = -math.inf  # When it last had no room for a decision, by the monotonic clock; never, if it has by now.
        self.waits = settings.waits_for_room(destination.name)  # Whether what has no room waits for it, and is not left out.
        self._limit = settings.queues.results_limit
        self._most_bytes = settings.results_bytes

    def put_all(self, publications: Sequence[Publication]) -> tuple[list[bool], bool]:
        """Publish decisions, in order; return for each whether it is, and whether that is full which has refused one.

        After an error any of them may be published. Log when it becomes full, and when that is over.
        """
        accepted: list[bool] = []
        unread = 0
        for portion in portions(publications, lambda each: each.trace_bytes, _PORTION_BYTES):
            of_portion, unread = self._put(portion)
            accepted += of_portion
            if of_portion.count(True) < len(portion):
                break
        accepted += [False] * (len(publications) - len(accepted))
        # One that the last decision has just filled does not count as full: nothing waits for room yet.
        is_full, was_full = not all(accepted) and self._is_full(unread), self.refused_at > -math.inf
        self.refused_at = time.monotonic() if is_full else -math.inf
        if is_full and not was_full:
            log.warning("results_full", queue=self.destination.name, unread=unread, waits=self.waits)
        elif was_full and not is_full:
            log.info("results_drained", queue=self.destination.name, unread=unread)
        return accepted, is_full

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        """Publish; return for each decision whether it is, without the last ones that had no room; and how many are unread."""
        raise NotImplementedError

    def _is_full(self, _unread: int) -> bool:
        """Whether what has just refused a decision, and has so many unread ones, is full, or refuses for another reason."""
        return True


class _QueueOutbox(_Outbox):
    def __init__(self, app: Celery, queue: Queue, settings: Settings) -> None:
        super().__init__("queue", destination_of(settings, queue.name), settings)
        self._app = app
        self._queue = queue
        outcomes = [outcome for outcome in get_args(Outcome) if queue.name in settings.queues.names(outcome)]
        is_task = any(settings.results.via(outcome) == "task" for outcome in outcomes)
        self._task = settings.results.task if is_task else ""
        self._refusals = _NO_REFUSALS  # The first and the last in a row, by the monotonic clock.

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        messages = [self._message(publication) for publication in publications]
        if self.destination.system == "redis":
            args = self._queue.name, messages, self._limit, self._most_bytes
            published, unread = with_producer(self._app, "results", lambda producer: producer.channel.publish_within(*args))
            return [True] * published, unread
        unread, room = 0, len(messages)
        # RabbitMQ refuses late, and on a queue of another app not at all.
        if self._limit:
            unread = waiting(self._app, self._queue)
            room = max(0, min(room, self._limit - unread))
        # No longer in a row after an error: a node that restarts refuses before and after it.
        refusals, self._refusals = self._refusals, _NO_REFUSALS
        accepted = publish_all(self._app, "results", self._queue, messages[:room], [self._queue]) if room else []
        if all(accepted):
            return accepted, unread + sum(accepted)
        unread = waiting(self._app, self._queue)
        self._refusals = refusals
        return accepted, unread

    def _is_full(self, unread: int) -> bool:
        is_limited_by_bytes = self._most_bytes > 0 and unread > 0
        if self.destination.system == "redis" or 0 < self._limit * _TAKES_AGAIN_AT <= unread or is_limited_by_bytes:
            return True
        # Also a queue refuses that is being deleted, or has no leader: what is left out now would never be published.
        now = time.monotonic()
        first_at, last_at = self._refusals
        if now - last_at > _ROOM_ASKED_WITHIN_S:
            first_at = now
        self._refusals = first_at, now
        return unread > 0 and now - first_at >= _REFUSES_FOR_S

    def _message(self, publication: Publication) -> Outgoing:
        """The message of a decision, which calls a task if it is for one: copies of it have the same id and the same mark."""
        body, trace_id = publication.body(), publication.decision.trace_id
        headers = {**publication.context, _MARK: publication.decision.mark}
        if not self._task:
            return Outgoing(body, trace_id, headers)
        # Whether the result is kept, the task says itself.
        call = self._app.amqp.as_task_v2(trace_id, self._task, argsrepr="(decision,)", origin="kp-scorer", ignore_result=None)
        return Outgoing(task_body(body), trace_id, {**call.headers, **headers})


class _StreamOutbox(_Outbox):
    def __init__(self, stream: DecisionStream, settings: Settings) -> None:
        super().__init__("stream", Destination("redis", stream.name), settings)
        self._stream = stream

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        published, unread = self._stream.publish(publications, self._limit, self._most_bytes)
        return [True] * published, unread
