"""Batch without delay: take what is waiting, never wait for more, and prepare one batch while another is finished."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from queue import Empty, Queue, SimpleQueue
from typing import Generic, Protocol, TypeVar

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.watchdog import StallTimer, VitalThread

Item = TypeVar("Item")
Item_contra = TypeVar("Item_contra", contravariant=True)
Work = TypeVar("Work")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Stages(Protocol[Item_contra, Work, Result_co]):
    """What is done with a batch, in two stages that run on a thread each."""

    def prepare(self, items: Sequence[Item_contra], *, alone: bool) -> Work:
        """Begin with items; ``alone`` means that there is one, and nothing else in hand."""
        ...

    def finish(self, work: Work) -> Sequence[Result_co | None]:
        """Return each item's result, in order; None for an item to be prepared again, alone."""
        ...

    def refresh(self) -> None:
        """Called while there is nothing to finish. What it raises is ignored."""
        ...


class _Signal(Enum):
    STOP = "stop"
    LOOK = "look at those to be tried alone"


class MicroBatcher(Generic[Item, Work, Result]):
    """Two threads that work on whatever items wait, at most ``max_batch`` at a time.

    An idle system answers at single-item latency, a busy one forms batches. If a batch fails, its items are tried one by
    one, with nothing else in hand, so that an item that causes the failure fails alone; only an outage fails them together.
    """

    def __init__(
        self,
        stages: Stages[Item, Work, Result],
        hand_on: Callable[[Sequence[tuple[Item, Result | Exception]]], None],
        max_batch: int,
        idle_s: float = 0.5,
    ) -> None:
        """Start the threads.

        Args:
            stages: what to do with a batch.
            hand_on: called, by either thread, with items that have come to their end, each with its result or what was raised
                for it. It must not raise an error, nor wait.
            max_batch: how many items go together at most.
            idle_s: ``stages.refresh`` is called after so many seconds without anything to finish.
        """
        self._stages = stages
        self._hand_on = hand_on
        self._max_batch = max_batch
        self._idle_s = idle_s
        self._waiting: SimpleQueue[Item | _Signal] = SimpleQueue()
        self._alone: deque[Item] = deque()
        # One batch is ready while another is finished. A second would only wait longer.
        self._prepared: Queue[tuple[Sequence[Item], Work] | None] = Queue(maxsize=1)
        self._in_hand = 0
        self._changed = threading.Condition()
        self._given_up = threading.Event()
        self._preparing, self._finishing = StallTimer(), StallTimer()
        self.threads = VitalThread(self._prepare_all, "preparer"), VitalThread(self._finish_all, "finisher")
        """Without either, what is handed over stays undecided for good."""
        for thread in self.threads:
            thread.start()

    def submit(self, item: Item) -> None:
        """Hand over an item. Any thread may do so."""
        self._waiting.put(item)

    def still_s(self) -> float:
        """Seconds that a stage has been working on its current batch, the longer of the two."""
        return max(self._preparing.elapsed_s(), self._finishing.elapsed_s())

    def give_up(self) -> None:
        """Fail what waits, and what is handed over from now on, with ServiceUnavailable; what is in hand is finished."""
        self._given_up.set()

    def stop(self) -> None:
        """Finish what was handed over, then end the threads."""
        self._waiting.put(_Signal.STOP)
        for thread in self.threads:
            thread.join()

    def _prepare_all(self) -> None:
        stopping = False
        while not (stopping and self._is_done()):
            if self._alone:
                self._wait_until_nothing_is_in_hand()
                self._prepare([self._alone.popleft()], alone=True)
            elif not stopping:
                batch, stopping = self._take()
                self._prepare(batch, alone=False)
        self._prepared.put(None)

    def _is_done(self) -> bool:
        # In this order: an item in hand may have to be tried alone.
        self._wait_until_nothing_is_in_hand()
        return not self._alone

    def _wait_until_nothing_is_in_hand(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._in_hand)

    def _take(self) -> tuple[list[Item], bool]:
        """Wait for an item and take it and those behind it, up to the next signal; return too whether that says stop."""
        found = self._waiting.get()
        batch: list[Item] = []
        while not isinstance(found, _Signal):
            batch.append(found)
            if len(batch) == self._max_batch:
                return batch, False
            try:
                found = self._waiting.get_nowait()
            except Empty:
                return batch, False
        return batch, found is _Signal.STOP

    def _prepare(self, batch: Sequence[Item], *, alone: bool) -> None:
        if not batch:
            return
        if self._given_up.is_set():
            self._fail(batch, ServiceUnavailable("worker: about to end"))
            return
        self._preparing.start()
        try:
            work = self._stages.prepare(batch, alone=alone)
        except Exception as error:
            self._fail(batch, error)
            return
        finally:
            self._preparing.stop()
        with self._changed:
            self._in_hand += 1
        self._prepared.put((batch, work))

    def _finish_all(self) -> None:
        while True:
            try:
                prepared = self._prepared.get(timeout=self._idle_s)
            except Empty:
                self._finishing.start()
                # The next item meets the same error and reports it; here it would only end the thread.
                with suppress(Exception):
                    self._stages.refresh()
                self._finishing.stop()
                continue
            if prepared is None:
                return
            self._finishing.start()
            self._finish(*prepared)
            self._finishing.stop()
            with self._changed:
                self._in_hand -= 1
                self._changed.notify_all()

    def _finish(self, batch: Sequence[Item], work: Work) -> None:
        try:
            results = list(zip(batch, self._stages.finish(work), strict=True))
        except Exception as error:
            self._fail(batch, error)
            return
        if alone := [item for item, result in results if result is None]:
            self._try_alone(alone)
        self._hand_on([(item, result) for item, result in results if result is not None])

    def _fail(self, batch: Sequence[Item], error: Exception) -> None:
        if len(batch) > 1 and not isinstance(error, ServiceUnavailable):
            self._try_alone(batch)
            return
        self._hand_on([(item, error) for item in batch])

    def _try_alone(self, items: Sequence[Item]) -> None:
        self._alone.extend(items)
        self._waiting.put(_Signal.LOOK)
