"""The queue of the shadow's decisions. Whoever publishes live ones never waits for it, and it never fails them."""

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog
from celery import Celery
from kombu import Producer

from kp_scorer.broker.outbox import message_of
from kp_scorer.broker.publishing import publish_all, with_producer
from kp_scorer.broker.queues import shadow_queue
from kp_scorer.decision import Decision
from kp_scorer.errors import ScorerError
from kp_scorer.scoring import Policy, decide_again
from kp_scorer.settings import Settings
from kp_scorer.store import Publication

_MOST_IN_HAND: Final = 2_000
"""A second's work without an embedder; some 16 MB."""

log = structlog.get_logger("kp_scorer.broker.shadow_outbox")


class ShadowOutbox:
    """Where live decisions are decided again and put on a queue that holds the newest. What cannot be put there is dropped."""

    def __init__(self, app: Celery, settings: Settings, policy: Policy) -> None:
        """Decide again by ``policy``, and publish through the app's connection pool."""
        self._app = app
        self._policy = policy
        self._queue = shadow_queue(settings)
        self._most = settings.queues.results_limit
        self._plain = settings.results.plain
        self._is_redis = settings.broker.is_redis
        self._lock = threading.Lock()
        self._in_hand: deque[Decision] = deque(maxlen=_MOST_IN_HAND)
        self._crowded_out = 0
        self._is_well = True

    def take(self, decisions: Sequence[Decision]) -> None:
        """Take live decisions in hand, in place of the oldest if there are too many. It takes no time, and any thread may."""
        with self._lock:
            self._crowded_out += max(0, len(self._in_hand) + len(decisions) - _MOST_IN_HAND)
            self._in_hand.extend(decisions)

    def publish(self) -> None:
        """Decide again what is in hand, and publish that. One thread does so.

        Raises:
            SettingsError: RabbitMQ has a queue of this name with other arguments; what was in hand is dropped.
            ServiceUnavailable: the broker cannot be reached, refuses, or has no such queue; what was in hand is dropped.
        """
        with self._lock:
            decisions, dropped = list(self._in_hand), self._crowded_out
            self._in_hand.clear()
            self._crowded_out = 0
        try:
            dropped += self._put(decisions)
        except BaseException:
            self._is_well = False
            dropped += len(decisions)
            raise
        else:
            self._is_well = True
        finally:
            if dropped:
                log.warning("shadow_dropped", queue=self._queue.name, count=dropped)

    def flush(self) -> None:
        """Publish what is left before the process ends, unless the broker had trouble: nobody waits for it then."""
        if self._is_well:
            with suppress(ScorerError):
                self.publish()

    def _put(self, decisions: Sequence[Decision]) -> int:
        """Publish; return how many RabbitMQ did not take."""
        if not decisions:
            return 0
        messages = [message_of(Publication(decide_again(decision, self._policy))) for decision in decisions]
        taken = publish_all(self._app, "shadow", self._queue, messages, if_missing=[self._queue], plain=self._plain)
        if self._is_redis:
            # RabbitMQ sees to it by itself.
            with_producer(self._app, "shadow", self._keep_newest)
        return taken.count(False)

    def _keep_newest(self, producer: Producer) -> None:
        producer.channel.client.ltrim(self._queue.name, 0, self._most - 1)
