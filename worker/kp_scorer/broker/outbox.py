"""One queue or stream of decisions on the publishing side: whether it has room, and what to do when it has none."""

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import structlog
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.publishing import Outgoing, publish_all, waiting, with_producer
from kp_scorer.broker.task_body import task_body
from kp_scorer.broker.task_message import call_headers
from kp_scorer.decision import Outcome
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import QueueSettings, Settings
from kp_scorer.store import DecisionStream, Drops, Publication

_LOOK_EVERY_S: Final = 1.0
"""How often a queue is looked at: others publish to it too, and others read it."""
_TELL_EVERY_S: Final = 1.0
_LOW_WATER: Final = 0.8
"""RabbitMQ, once it has refused a message, takes none before less than this part of the limit is left on the queue."""
_DROPPED_AT_ONCE: Final = 100
"""Before the queue is looked at again, as other workers may be dropping too."""

MARK: Final = "decided_at"
"""The header that holds a decision's mark."""

log = structlog.get_logger("kp_scorer.broker.outbox")


class Outbox:
    """Where decisions for one queue are put. Safe to share between threads."""

    def __init__(self, app: Celery, queue: Queue, settings: Settings, outcome: Outcome, drops: Drops) -> None:
        """Publish to ``queue``, as the settings say of this outcome, through the app's connection pool."""
        self._app = app
        self._queue = queue
        self._settings = settings.queues
        self._drops_oldest = settings.queues.when_full(outcome) == "drop_oldest"
        self._task = settings.results.task if settings.via(outcome) == "task" else ""
        self._plain = settings.results.plain and not self._task
        self._drops = drops
        self._notices = Notices(queue.name)
        self._lock = threading.Lock()
        self._making_room = threading.Lock()
        self._room = 0
        self._look_again_at = 0.0

    def put_all(self, publications: Sequence[Publication]) -> list[bool]:
        """Publish decisions, in order; where the queue is full and the settings say so, in place of the oldest.

        Returns:
            For each whether it is published; the queue is full for the others.

        Raises:
            SettingsError: RabbitMQ has a queue of this name with other arguments.
            ServiceUnavailable: the broker cannot be reached; any of them may be published.
        """
        # No more at once than the queue may hold: the oldest make room one by one.
        most = self._settings.results_limit or len(publications)
        parts = [publications[start : start + most] for start in range(0, len(publications), most)]
        return [is_taken for part in parts for is_taken in self._put(part)]

    def _put(self, publications: Sequence[Publication]) -> list[bool]:
        room = self._take_room(len(publications))
        if room < len(publications) and self._drops_oldest:
            self._drop_oldest(len(publications) - room)
            room = len(publications)
        taken = self._publish(publications[:room])
        if self._drops_oldest and not all(taken):
            # Others have filled it since.
            self._drop_to_low_water()
            refused = [publication for publication, is_taken in zip(publications, taken, strict=True) if not is_taken]
            again = iter(self._publish(refused))
            taken = [is_taken or next(again) for is_taken in taken]
        return taken + [False] * (len(publications) - room)

    def is_full(self) -> ServiceUnavailable:
        """What to say of a decision that is not published."""
        return ServiceUnavailable(f"results: the queue {self._queue.name} is full of unread decisions")

    def _publish(self, publications: Sequence[Publication]) -> list[bool]:
        """Publish; return which of them the queue took."""
        if not publications:
            return []
        messages = [message_of(publication) for publication in publications]
        if self._task:
            messages = [_call(message, self._task) for message in messages]
        return publish_all(self._app, "results", self._queue, messages, if_missing=[self._queue], plain=self._plain)

    def _take_room(self, wanted: int) -> int:
        """Say how many more the queue has room for: one thread looks for all of them, and as rarely as it can."""
        if not self._settings.results_limit:
            return wanted
        with self._lock:
            full = self._notices.full
            used_up = self._room < wanted and not full
            # Whoever drops must know that the queue is full this very moment: it may be in the middle of being read.
            if used_up or (full and self._drops_oldest) or time.monotonic() >= self._look_again_at:
                self._look_again_at = time.monotonic() + _LOOK_EVERY_S
                self._look()
            room = max(0, min(wanted, self._room))
            self._room -= room
            return room

    def _look(self) -> None:
        unread = waiting(self._app, self._queue)
        self._room = self._settings.results_limit - unread
        self._notices.looked(unread, full=self._settings.is_full(unread))

    def _drop_to_low_water(self) -> None:
        """Drop what has to go before RabbitMQ, which has refused a message, takes another."""
        most = int(self._settings.results_limit * _LOW_WATER) - 1
        # One thread drops for all of them.
        with self._making_room:
            while (excess := waiting(self._app, self._queue) - most) > 0 and self._drop_oldest(min(excess, _DROPPED_AT_ONCE)):
                pass

    def _drop_oldest(self, most: int) -> int:
        """Take so many of the oldest decisions off the queue for good; return how many there were."""

        def drop(producer: Producer) -> int:
            producer.maybe_declare(self._queue)
            return sum(self._drop_one(producer.channel) for _ in range(most))

        dropped = with_producer(self._app, "results", drop)
        self._notices.dropped(dropped)
        return dropped

    def _drop_one(self, channel: Any) -> bool:
        message = channel.basic_get(self._queue.name)
        if message is None:
            return False
        try:
            # First, so that none goes uncounted.
            self._drops.note(self._queue.name)
        except ServiceUnavailable:
            channel.basic_reject(message.delivery_tag, requeue=True)
            raise
        channel.basic_ack(message.delivery_tag)
        return True


class StreamOutbox:
    """Where decisions for one stream are put. Safe to share between threads."""

    def __init__(self, stream: DecisionStream, settings: QueueSettings, outcome: Outcome) -> None:
        """Put on ``stream``, as the settings say of this outcome."""
        self._stream = stream
        self._most = settings.results_limit
        self._drops_oldest = settings.when_full(outcome) == "drop_oldest"
        self._notices = Notices(stream.name)

    def put_all(self, publications: Sequence[Publication]) -> list[bool]:
        """Put decisions on the stream, in order; where it is full and the settings say so, in place of the oldest.

        Returns:
            For each whether it is there; the stream is full for the others.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or has something else by this name; any of them may be there.
        """
        placed = self._stream.put(publications, self._most, drop_oldest=self._drops_oldest)
        # Not when the last one has just come: then nothing waits yet.
        self._notices.looked(placed.unread, full=placed.put < len(publications) or placed.dropped > 0)
        self._notices.dropped(placed.dropped)
        return [True] * placed.put + [False] * (len(publications) - placed.put)

    def is_full(self) -> ServiceUnavailable:
        """What to say of a decision that is not there."""
        return ServiceUnavailable(f"results: the stream {self._stream.name} is full of unread decisions")


class Notices:
    """What is logged of a queue or a stream of decisions: when it becomes full, when it is no more, and what is dropped."""

    def __init__(self, name: str) -> None:
        """Say it of the queue ``name``."""
        self.full = False
        """Whether it was full when it was last looked at."""
        self._name = name
        self._lock = threading.Lock()
        self._untold = 0
        self._tell_again_at = 0.0

    def looked(self, unread: int, *, full: bool) -> None:
        """Say so if this is news."""
        with self._lock:
            was_full, self.full = self.full, full
        if full and not was_full:
            log.warning("results_full", queue=self._name, unread=unread)
        elif was_full and not full:
            log.info("results_drained", queue=self._name, unread=unread)

    def dropped(self, count: int) -> None:
        """Say how many were dropped, once a second at the most."""
        with self._lock:
            self._untold += count
            if not self._untold or time.monotonic() < self._tell_again_at:
                return
            self._tell_again_at = time.monotonic() + _TELL_EVERY_S
            untold, self._untold = self._untold, 0
        log.warning("results_dropped", queue=self._name, count=untold)


def message_of(publication: Publication) -> Outgoing:
    """The message that says what was decided: copies of it have the same id and the same mark."""
    decision, context = publication
    return Outgoing(decision.model_dump_json().encode(), decision.trace_id, {**context, MARK: decision.mark})


def _call(said: Outgoing, task: str) -> Outgoing:
    """The message by which another Celery app calls its task with what a message says. The id of the call is the trace's."""
    headers = call_headers(task, said.message_id, "(decision,)")
    return said._replace(body=task_body(said.body), headers={**headers, **said.headers})
