"""Answers to monitors, published by a thread of their own."""

import threading
from queue import Full, Queue
from typing import Any, Final, NamedTuple
from uuid import UUID

import structlog
from celery import Celery
from kombu import Producer

from kp_scorer.broker.publishing import publish_options, with_producer
from kp_scorer.logs import raised_at

MOST_WAITING: Final = 16
"""Replies that wait for the broker; what comes meanwhile is not answered."""

_EXPIRES_S: Final = 60

log = structlog.get_logger("kp_scorer.process.replies")


class Reply(NamedTuple):
    """What to say, and to whom."""

    answer: dict[str, Any]
    to: UUID
    ticket: UUID | None


class Replies:
    """Publishes one reply after the other, however long the broker takes.

    The thread that consumes must not wait for that: the broker would miss its heartbeats, and deliver all in hand once more.
    """

    def __init__(self, app: Celery) -> None:
        """Publish by this app."""
        self._app = app
        self._waiting: Queue[Reply] = Queue(MOST_WAITING)
        threading.Thread(target=self._publish_all, name="replies", daemon=True).start()

    def put(self, reply: Reply) -> None:
        """Have a reply published when its turn comes, unless too many wait."""
        try:
            self._waiting.put_nowait(reply)
        except Full:
            log.warning("reply_dropped")

    def _publish_all(self) -> None:
        while True:
            reply = self._waiting.get()
            try:
                self._publish(reply)
            except Exception as error:
                log.warning("reply_failed", detail=type(error).__name__, where=raised_at(error))

    def _publish(self, reply: Reply) -> None:
        # By the default exchange: which queues the exchange of replies leads to is up to whoever may write to the broker, and
        # one of ours might be among them. No queue of ours is called like this.
        queue = f"{reply.to}.{self._app.control.mailbox.reply_exchange.name}"
        options = {**publish_options(self._app), "delivery_mode": "transient", "mandatory": False}

        def send(producer: Producer) -> None:
            headers = {"ticket": reply.ticket and str(reply.ticket)}
            producer.publish(reply.answer, routing_key=queue, headers=headers, serializer="json", **options)
            if self._app.conf.broker_transport:
                producer.channel.expire(queue, _EXPIRES_S)

        with_producer(self._app, "reply", send)
