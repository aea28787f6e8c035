"""Finds submissions and decisions on queues in Redis, which are lists, and removes them."""

import json
from collections.abc import Callable, Iterator
from operator import methodcaller
from types import SimpleNamespace
from typing import Any, Final

from celery import Celery

from kp_scorer.broker.calls import with_producer, with_redis
from kp_scorer.broker.headers import leave_packed
from kp_scorer.broker.redis_transport.queue import QueueKeys
from kp_scorer.broker.wire import open_item, submission_in
from kp_scorer.limits import Limits, check_values

_READ_AT_ONCE: Final = 20  # More could take too much memory: a message may have megabytes.
_VALUES_AROUND: Final = 1_000  # The values that a decision may have besides its trace.


def search_queue(
    app: Celery, name: str, limits: Limits, is_wanted: Callable[[object], bool], *, remove: bool = False
) -> Iterator[object]:
    """Yield the wanted submissions or decisions on a queue in Redis; with ``remove``, also remove them. An item may come twice.

    An item that is not JSON, or has too many values for a trace, is not wanted. Messages in flight are not searched. Raises
    ServiceUnavailable.
    """
    # The queue's own list comes last, as workers move messages of other priorities there.
    for each in reversed(with_producer(app, name, lambda producer: producer.channel.lists(name))):
        start = 0
        # No message is missed if producers add some meanwhile: they add at the front, which moves the unread ones to higher
        # places.
        while items := with_redis(app, each, methodcaller("lrange", each, start, start + _READ_AT_ONCE - 1)):
            start += len(items)
            for item in items:
                content = _content(item, limits)
                if content is not None and is_wanted(content):
                    if remove:
                        start -= with_redis(app, each, methodcaller("lrem", each, 1, item))
                    yield content


def count_in_flight(app: Celery, name: str) -> int:
    """Return how many messages of a queue in Redis are in flight."""
    return with_redis(app, name, lambda client: int(client.zcard(QueueKeys(name).renewed)))


def _content(item: bytes, limits: Limits) -> Any:
    """Return the submission or the decision in a message; None if it has none."""
    # A producer may have written anything.
    try:
        opened = open_item(item)
        headers = dict(opened.headers)
        leave_packed(headers)
        message = SimpleNamespace(content_type=opened.content_type, headers=headers, body=opened.body, properties={})
        content = submission_in(message, limits)
        check_values(content, limits.values + _VALUES_AROUND)
        return json.loads(content)
    except Exception:
        return None
