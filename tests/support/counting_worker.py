"""The worker of ``fast_worker``, which also logs the number of kombu's transports in memory after each full collection."""

import gc
import threading
from queue import SimpleQueue
from typing import Final

import structlog
from kombu.transport.base import Transport

from tests.support.fast_worker import run

# A collection can begin anywhere, even within a call of the log, so its callback must not log. It only puts an item here; a
# SimpleQueue allows that even if a put is interrupted by another.
_COLLECTED: Final = SimpleQueue[None]()

log = structlog.get_logger("tests.support.counting_worker")


def _note(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == 2:
        _COLLECTED.put(None)


def _count() -> None:
    while True:
        _COLLECTED.get()
        # Use the type, because asking a weak proxy to a dead object for its class raises ReferenceError.
        log.info("transports", count=sum(issubclass(type(each), Transport) for each in gc.get_objects()))


if __name__ == "__main__":
    gc.callbacks.append(_note)
    threading.Thread(target=_count, daemon=True).start()
    run()
