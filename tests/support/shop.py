"""A producer's own Celery app, which does not import our package, with a task that decisions call.

``SHOP_BROKER`` is the URL of its broker, ``SHOP_QUEUES`` names its queues, and ``SHOP_STORE`` is a Redis. There the list
``shop:received`` records each call: id, mark and decision. On RabbitMQ one of the queues is a quorum queue.
"""

import json
import os
from typing import Any

import redis
from celery import Celery
from kombu import Queue

BROKER = os.environ["SHOP_BROKER"]
ACCEPTED, REJECTED = os.environ["SHOP_QUEUES"].split(",")
STORE = redis.Redis.from_url(os.environ["SHOP_STORE"])

app = Celery("shop", broker=BROKER, set_as_current=False)
app.conf.task_queues = [
    Queue(ACCEPTED, queue_arguments={"x-queue-type": "quorum"} if BROKER.startswith("amqp") else None),
    Queue(REJECTED),
]
app.conf.broker_connection_retry_on_startup = True


@app.task(name="shop.decided", bind=True)  # type: ignore[untyped-decorator]  # celery ships no types
def decided(self: Any, decision: dict[str, Any]) -> None:
    STORE.rpush("shop:received", json.dumps([self.request.id, self.request.decided_at, decision]))
