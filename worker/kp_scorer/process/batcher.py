"""Batch without delay: never wait for more traces, and prepare one batch while another is finished."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, Queue
from typing import Final

from kp_scorer.decider import Prepared, Resolved
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.stages import Stages
from kp_scorer.process.watchdog import StallTimer, VitalThread

_IDLE_S: Final = 0.5


class MicroBatcher:
    """Two threads that decide whatever traces wait, at most ``max_batch`` at a time.

    An idle worker answers at the latency of one trace, a busy one forms batches. If a batch fails, its traces are retried one
    by one, with nothing else in flight, so that a trace that causes the failure fails alone; an outage fails them together.
    """

    def __init__(
        self, stages: Stages, on_resolved: Callable[[Sequence[tuple[Delivery, Resolved | Exception]]], None], max_batch: int
    ) -> None:
        """Start the threads; either calls ``on_resolved``, which must not raise an error, nor wait."""
        self._stages = stages
        self._on_resolved = on_resolved
        self._max_batch = max_batch
        self._changed = threading.Condition()
        self._waiting: deque[Delivery] = deque()
        self._alone: deque[Delivery] = deque()
        self._batches_in_flight = 0
        self._stopping = False
        self._aborted = False
        # One batch is ready while another is finished. A second would only wait longer.
        self._prepared: Queue[tuple[Sequence[Delivery], Prepared] | None] = Queue(maxsize=1)
        self._preparing, self._finishing = StallTimer(), StallTimer()
        self.threads = VitalThread(self._prepare_all, "preparer"), VitalThread(self._finish_all, "finisher")
        """If either dies, submitted traces stay undecided for good."""
        for thread in self.threads:
            thread.start()

    def submit(self, delivery: Delivery) -> None:
        """Have the trace of a message decided. Any thread may do so."""
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify()

    def stalled_s(self) -> float:
        """Seconds that a stage has been working on its current batch, the longer of the two."""
        return max(self._preparing.elapsed_s(), self._finishing.elapsed_s())

    def abort(self) -> None:
        """Fail what waits or is submitted from now on with ServiceUnavailable; finish what is in flight."""
        self._aborted = True

    def stop(self) -> None:
        """Finish what was submitted, then end the threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for thread in self.threads:
            thread.join()

    def _prepare_all(self) -> None:
        while batch := self._next_batch():
            self._prepare(*batch)
        self._prepared.put(None)

    def _next_batch(self) -> tuple[Sequence[Delivery], bool] | None:
        """Wait for a batch; return it and whether it is decided alone. None once all are finished and no more come."""
        with self._changed:
            while True:
                if self._alone:
                    self._changed.wait_for(lambda: not self._batches_in_flight)
                    return [self._alone.popleft()], True
                if self._waiting:
                    size = min(self._max_batch, len(self._waiting))
                    return [self._waiting.popleft() for _ in range(size)], False
                # A trace in flight may have to be retried alone.
                if self._stopping and not self._batches_in_flight:
                    return None
                self._changed.wait()

    def _prepare(self, batch: Sequence[Delivery], alone: bool) -> None:
        if self._aborted:
            self._fail(batch, ServiceUnavailable("worker: about to end"))
            return
        self._preparing.start()
        try:
            prepared = self._stages.prepare(batch, alone=alone)
        except Exception as error:
            self._fail(batch, error)
            return
        finally:
            self._preparing.stop()
        with self._changed:
            self._batches_in_flight += 1
        self._prepared.put((batch, prepared))

    def _finish_all(self) -> None:
        while True:
            try:
                prepared = self._prepared.get(timeout=_IDLE_S)
            except Empty:
                self._finishing.start()
                # The next trace meets the same error and reports it; here it would only end the thread.
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
                self._batches_in_flight -= 1
                self._changed.notify()

    def _finish(self, batch: Sequence[Delivery], prepared: Prepared) -> None:
        try:
            resolved = list(zip(batch, self._stages.finish(prepared), strict=True))
        except Exception as error:
            self._fail(batch, error)
            return
        self._retry_alone([delivery for delivery, end in resolved if end is None])
        self._on_resolved([(delivery, end) for delivery, end in resolved if end is not None])

    def _fail(self, batch: Sequence[Delivery], error: Exception) -> None:
        if len(batch) > 1 and not isinstance(error, ServiceUnavailable):
            self._retry_alone(batch)
        else:
            self._on_resolved([(delivery, error) for delivery in batch])

    def _retry_alone(self, deliveries: Sequence[Delivery]) -> None:
        with self._changed:
            self._alone.extend(deliveries)
            self._changed.notify()
