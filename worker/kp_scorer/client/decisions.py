"""Reads decisions from queues and streams as they come: at-least-once, through outages, without copies within one run."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, Final

import structlog
from celery import Celery
from kombu import Queue

from kp_scorer.broker.calls import unavailable_if_broker_fails, with_producer
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import results_queues, results_streams
from kp_scorer.broker.wire import raw_body
from kp_scorer.decision import Decision, DecisionKind
from kp_scorer.decoding import parse_strict_json
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, ServiceUnavailable, SettingsError
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.server_sections import QueueSettings, ResultsSettings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering, DeadLetters
from kp_scorer.store.decision_stream import StreamReader

_POLL_S: Final = 0.2
_RETRY_S: Final = 1.0
_VALUES_AROUND: Final = 1_000  # The values that a decision may have besides its trace; it has some fifty.
# The number of traces whose last decision is remembered. A reader gets through fewer decisions before a copy is redelivered.
_REMEMBERED: Final = 100_000

log = structlog.get_logger("kp_scorer.client.decisions")


def _check_readable(queues: QueueSettings, results: ResultsSettings, kinds: Sequence[DecisionKind], group: str) -> None:
    """Raise SettingsError unless decisions of these kinds can be read here; the error says where else to read them."""
    names = " and ".join(dict.fromkeys(map(queues.name, kinds)))
    if not kinds:
        raise SettingsError("results.publish names no outcome: `kp-scorer status` shows decisions")
    if results.via == "stream" and not group:
        where = f"{names} in the Redis of redis.url"
        raise SettingsError(f"decisions go to the streams {where}: read them with XREADGROUP, or name a consumer group")
    if results.via == "task":
        raise SettingsError(f"decisions call the task {results.task} by {names}: workers of its Celery app take them")


_Received = Iterator[tuple[Decision, Callable[[], None]]]


@dataclass
class Results:
    """Receives decisions from queues and streams. Other messages become dead letters, as they would block their queue."""

    queues: Sequence[Queue]  # Each is bound to a channel.
    readers: Sequence[StreamReader]
    dead_letters: DeadLetters
    limits: Limits

    def receive(self) -> _Received:
        """Yield the decisions that are there now, each once, with a function that acknowledges it.

        An acknowledged decision is removed from its queue, or no longer delivered to its consumer group. Otherwise it is
        delivered again.
        """
        for queue in self.queues:
            while (message := _next(queue)) is not None:
                # A message that was cut may look complete, but lacks the content type of JSON.
                is_json = message.content_type == "application/json"
                acknowledge = unavailable_if_broker_fails("results")(message.ack)
                yield from self._received(queue.name, raw_body(message), acknowledge, is_json=is_json)
        for reader in self.readers:
            for entry, decision in reader.receive():
                yield from self._received(reader.name, decision, partial(reader.acknowledge, entry))

    def _received(self, name: str, body: bytes, acknowledge: Callable[[], None], *, is_json: bool = True) -> _Received:
        try:
            # Parse the body here, because kombu would let the message choose among its decoders.
            decision = Decision.model_validate(parse_strict_json(body if is_json else b"", self.limits))
        except (InvalidTrace, ValueError):
            self.dead_letters.dead_letter(body, DeadLettering("malformed", f"queue {name}: expected a decision"))
            acknowledge()
        else:
            yield decision, acknowledge


@unavailable_if_broker_fails("results")
def _next(queue: Any) -> Any:
    # Kombu 5.7.0's own get raises an error for a body that it cannot decompress, at every delivery.
    delivered = queue.channel.basic_get(queue.name)
    return None if delivered is None else queue.channel.message_to_python(delivered)


@contextmanager
def open_results(app: Celery, settings: Settings, outcome: DecisionKind | None = None, group: str = "") -> Iterator[Results]:
    """Connect to the queues of decisions, or as a ``group`` to their streams: of one outcome, of revisions, or all but these.

    Raises SettingsError if decisions call a task of another app, go to streams and there is no group, or go nowhere.
    """
    # Revisions are read only on request.
    kinds = [outcome] if outcome else [each for each in settings.kinds if each != "revised"]
    _check_readable(settings.queues, settings.results, kinds, group)
    queues = list(results_queues(settings, kinds).values())
    streams = results_streams(settings, kinds)
    if not settings.broker.is_redis:
        # Declare the queues passively: workers have declared them, and readers may have no permission to do so.
        with_producer(
            app, "results", lambda producer: [queue(producer.channel).queue_declare(passive=True) for queue in queues], queues
        )
    idle_ms = settings.broker.visibility_timeout_s * 1_000
    limits = settings.limits
    limits = limits.model_copy(update={"values": limits.values + _VALUES_AROUND, "depth": limits.depth + 1})
    with Store.open(settings) as store, app.connection_for_read() as connection:
        with unavailable_if_broker_fails("results"):
            channel = connection.default_channel
        readers = [store.decision_stream(name).reader(group, idle_ms) for name in streams]
        yield Results([queue(channel) for queue in queues], readers, store.dead_letters, limits)


def read_decisions(
    outcome: DecisionKind | None = None,
    *,
    group: str = "",
    follow: bool = True,
    stopping: Event | None = None,
    settings: Settings | None = None,
) -> Iterator[Decision]:
    """Yield decisions from the queues and streams that workers publish to; each is acknowledged after the body of the loop.

    If the body raises an error, leaves the loop, or takes longer than ``broker.visibility_timeout_s``, its decision is
    delivered again, to this reader or another. Copies of decisions that this run has acknowledged are dropped; a later run must
    recognise copies itself, by ``trace_id`` and ``decided_at``. After an outage it reconnects. Messages that are no decisions
    become dead letters.

    Args:
        outcome: yield only decisions with this outcome, or ``revised``: those that revise others. By default all but these.
        group: the consumer group to read streams as, if decisions go to streams. A missing group is created. The stream keeps
            decisions until the group has acknowledged them.
        follow: wait for more decisions; otherwise end when all that are there have been read.
        stopping: once it is set, the loop ends, after the body and its acknowledgement.
        settings: by default those of the environment and the configuration file.

    Raises:
        SettingsError: a setting is wrong, decisions go elsewhere, or RabbitMQ has a queue with other arguments.
        ServiceUnavailable: the broker or Redis cannot be reached. With ``follow``, only the first connection raises it.
    """
    settings = with_endpoints(settings or load_settings())
    stopping = stopping or Event()
    marks: OrderedDict[str, str] = OrderedDict()
    is_reached = False
    with make_celery(settings) as app:
        while not stopping.is_set():
            try:
                with open_results(app, settings, outcome, group) as results:
                    is_reached = True
                    yield from _new_in(results, marks, stopping, follow=follow)
                    return
            except ServiceUnavailable as error:
                if not (follow and is_reached):
                    raise
                log.warning("decisions_wait", detail=str(error))
            stopping.wait(_RETRY_S)


def _new_in(results: Results, marks: OrderedDict[str, str], stopping: Event, *, follow: bool) -> Iterator[Decision]:
    """Yield and acknowledge decisions; ``marks`` has the last decision's mark by trace id, which identifies copies."""
    while not stopping.is_set():
        is_idle = True
        for decision, acknowledge in results.receive():
            is_idle = False
            if marks.get(decision.trace_id) != decision.mark:
                yield decision
                marks[decision.trace_id] = decision.mark
                marks.move_to_end(decision.trace_id)
                if len(marks) > _REMEMBERED:
                    marks.popitem(last=False)
            acknowledge()
            if stopping.is_set():
                return
        if is_idle:
            if not follow:
                return
            stopping.wait(_POLL_S)
