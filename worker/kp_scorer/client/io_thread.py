"""A thread that makes all calls to the servers, so that threads and coroutines can wait for them with a time limit."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]

_starting = threading.Lock()


def _renew_lock() -> None:
    # If another thread held the lock during a fork, it would stay locked forever in the child.
    global _starting
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


class IoThread:
    """Runs calls one after the other in a thread of its own. Any thread may submit them.

    A call retries each of its steps, so it may take much longer than one timeout. The thread is a daemon, because a stuck call
    must not keep the interpreter from exiting.
    """

    def __init__(self) -> None:
        """Prepare the thread, which starts with the first call."""
        self._calls: _Calls = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Queue a call; return the future of its result. The caller cancels the future when it stops waiting."""
        future: Future[Result] = Future()
        with _starting:
            # In the child of a fork, the thread does not exist.
            if self._thread is None or not self._thread.is_alive():
                self._calls = SimpleQueue()
                self._thread = threading.Thread(target=_run, args=[self._calls], name="kp-scorer-client", daemon=True)
                self._thread.start()
            # The call runs in the caller's context, so that its spans belong to the caller's.
            self._calls.put((partial(copy_context().run, call), future))
        return future

    def stop(self) -> None:
        """End the thread after the queued calls; a later call starts another."""
        with _starting:
            self._calls.put(None)
            self._thread = None


def _run(calls: _Calls) -> None:
    while (queued := calls.get()) is not None:
        call, future = queued
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        # An idle thread must not keep the call and its result alive.
        del queued, call, future
