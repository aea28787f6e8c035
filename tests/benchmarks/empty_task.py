"""A Celery app whose only task does nothing: what Celery itself costs a message. ``EMPTY_BROKER_URL`` has its queue."""

import os
from typing import Any

from celery import Celery

app = Celery("empty", broker=os.environ["EMPTY_BROKER_URL"], set_as_current=False)
app.conf.update(
    task_ignore_result=True, task_acks_late=True, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True
)


@app.task(name="empty")  # type: ignore[untyped-decorator]
def empty(argument: Any) -> None:
    """Do nothing with what is sent."""
