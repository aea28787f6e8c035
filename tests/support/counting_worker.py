"""The worker of ``fast_worker`` that logs how many of kombu's transports it holds when it is told to stop."""

import gc
from typing import Any

import structlog
from celery import signals
from kombu.transport.base import Transport

from tests.support.fast_worker import run

log = structlog.get_logger("tests.support.counting_worker")


def _count(**_: Any) -> None:
    gc.collect()
    # By type: asked for its class, a weak reference to what is gone raises ReferenceError.
    log.info("transports", count=sum(issubclass(type(each), Transport) for each in gc.get_objects()))


if __name__ == "__main__":
    signals.worker_shutting_down.connect(_count, weak=False)
    run()
