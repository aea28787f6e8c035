"""The worker of ``fast_worker`` that logs, after each full collection of garbage, how many of kombu's transports it holds."""

import gc
import threading
from queue import SimpleQueue
from typing import Final

import structlog
from kombu.transport.base import Transport

from tests.support.fast_worker import run

# A collection begins anywhere, also within a call of the log; putting something here may be interrupted by itself.
_COLLECTED: Final = SimpleQueue[None]()

log = structlog.get_logger("tests.support.counting_worker")


def _note(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        _COLLECTED.put(None)


def _count() -> None:
    while True:
        _COLLECTED.get()
        # By type: asked for its class, a weak reference to what is gone raises ReferenceError.
        log.info("transports", count=sum(issubclass(type(each), Transport) for each in gc.get_objects()))


if __name__ == "__main__":
    gc.callbacks.append(_note)
    threading.Thread(target=_count, daemon=True).start()
    run()
