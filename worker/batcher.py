"""Batches by themselves: take what is waiting, never wait for more."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from worker.errors import ServiceUnavailable

Item = TypeVar("Item")
Result = TypeVar("Result")


class MicroBatcher(Generic[Item, Result]):
    """One thread that works on whatever items wait, at most ``max_batch`` at a time.

    An idle system answers at single-item latency, a busy one batches by itself. If a batch fails, its items are tried one by
    one, so that a poisonous one fails alone; only an outage fails them together.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result]],
        max_batch: int,
        idle: Callable[[], None] = lambda: None,
        idle_s: float = 0.5,
    ) -> None:
        """Start the thread. ``work`` gives one result an item, in order; ``idle`` is called after ``idle_s`` without an item.

        Both run in that thread alone. What ``idle`` raises is ignored.
        """
        self._work = work
        self._idle = idle
        self._idle_s = idle_s
        self._max_batch = max_batch
        self._waiting: SimpleQueue[tuple[Item, Future[Result]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    def submit(self, item: Item) -> "Future[Result]":
        """Hand over an item; the future gets its result, or what ``work`` raised for it."""
        future: Future[Result] = Future()
        self._waiting.put((item, future))
        return future

    def stop(self) -> None:
        """Finish what was handed over, then end the thread."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping:
            try:
                first = self._waiting.get(timeout=self._idle_s)
            except Empty:
                # Whatever is wrong, the next item will meet it too and tell; here it would only end the thread.
                with suppress(Exception):
                    self._idle()
                continue
            batch = [first] if first else []
            stopping = first is None
            while batch and not stopping and len(batch) < self._max_batch:
                try:
                    more = self._waiting.get_nowait()
                except Empty:
                    break
                if more is None:
                    stopping = True
                else:
                    batch.append(more)
            self._settle(batch)

    def _settle(self, batch: Sequence[tuple[Item, "Future[Result]"]]) -> None:
        if not batch:
            return
        try:
            results = self._work([item for item, _ in batch])
            settled = list(zip(batch, results, strict=True))
        except Exception as error:
            if len(batch) == 1 or isinstance(error, ServiceUnavailable):
                for _, future in batch:
                    future.set_exception(error)
            else:
                for member in batch:
                    self._settle([member])
        else:
            for (_, future), result in settled:
                future.set_result(result)
