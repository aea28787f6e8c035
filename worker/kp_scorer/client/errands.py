"""One thread that talks to the servers, for callers who wait only so long: threads and coroutines, any number of them."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

Found = TypeVar("Found")

_Waiting = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

_starting = threading.Lock()


def _renew_lock() -> None:
    # A fork in the very moment when another thread holds it would leave it locked for ever.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class Errands:
    """Runs errands one after the other in a thread of their own. Any thread may hand them over.

    What talks to a server waits for each of its steps, and tries again, for much longer together than for one of them. A daemon
    thread, as one that is stuck must not keep the interpreter from ending.
    """

    def __init__(self) -> None:
        """The thread starts with the first errand."""
        self._waiting: _Waiting = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, errand: Callable[[], Found]) -> Future[Found]:
        """Hand over an errand.

        Whoever waits no longer cancels the future: then an errand that waits behind another, which is stuck, is never begun.
        """
        future: Future[Found] = Future()
        with _starting:
            # A fork leaves the thread behind.
            if self._thread is None or not self._thread.is_alive():
                self._waiting = SimpleQueue()
                self._thread = threading.Thread(target=_run, args=[self._waiting], name="kp-scorer-client", daemon=True)
                self._thread.start()
            # Spans that it records are part of what its caller does.
            self._waiting.put((partial(copy_context().run, errand), future))
        return future

    def end(self) -> None:
        """End the thread, after the errands that it has; what is handed over later starts another."""
        with _starting:
            self._waiting.put(None)
            self._thread = None


def _run(waiting: _Waiting) -> None:
    while (found := waiting.get()) is not None:
        errand, future = found
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(errand())
            except BaseException as error:
                future.set_exception(error)
        # Nothing of it is kept alive while there is nothing to do.
        del found, errand, future
