"""The third stage of deciding: place, judge and commit, two round trips for whatever has its vectors."""

import time
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.process.admission import Admission
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.watchdog import StallTimer, VitalThread

_IDLE_S: Final = 0.5


class DecideStage:
    """Group commit: what is ready when one group has been committed is the next group. Owns the mirror of the novelty log."""

    def __init__(self, admission: Admission, decider: Decider, metrics: Metrics) -> None:
        """Start the thread. The mirror has just been read to its end."""
        self._admission = admission
        self._decider = decider
        self._metrics = metrics
        self._ready: SimpleQueue[Sequence[Delivery] | None] = SimpleQueue()
        self._caught_up_at = time.monotonic()
        self.stall = StallTimer()
        """Runs while a group is decided, or the log is read on."""
        self.thread = VitalThread(self._run, "committer")
        self.thread.start()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Decide the traces of these. Any thread may do so."""
        self._ready.put(deliveries)

    def stop(self) -> None:
        """End the thread. Nothing may be put before or after that is still to be decided."""
        self._ready.put(None)

    def behind_s(self) -> float:
        """Seconds since the mirror was last at the end of the log: never much, as an idle worker reads on, too."""
        return time.monotonic() - self._caught_up_at

    def _run(self) -> None:
        while True:
            try:
                group = self._ready.get(timeout=_IDLE_S)
            except Empty:
                self._refresh()
                continue
            if group is None:
                return
            self._decide([*group, *self._others()])

    def _others(self) -> list[Delivery]:
        """What else is ready."""
        others: list[Delivery] = []
        with suppress(Empty):
            while group := self._ready.get_nowait():
                others += group
        return others

    def _refresh(self) -> None:
        self.stall.start()
        # The next trace meets the same error and reports it; here it would only end the thread.
        with suppress(Exception):
            self._decider.refresh()
            self._caught_up_at = time.monotonic()
        self.stall.stop()

    def _decide(self, group: Sequence[Delivery]) -> None:
        self.stall.start()
        started = time.monotonic()
        cases = [delivery.case for delivery in group if delivery.case]
        try:
            self._decider.finish(cases)
        except Exception as error:
            self._admission.fail(group, error)
        else:
            self._caught_up_at = time.monotonic()
            self._metrics.finish_s.observe(self._caught_up_at - started)
            self._metrics.batch_traces.observe(len(group))
            ends = [(delivery, case.resolved) for delivery, case in zip(group, cases, strict=True)]
            self._admission.resolve([(delivery, end) for delivery, end in ends if end])
            self._admission.decide_alone([delivery for delivery, end in ends if not end])
            for _, end in ends:
                if isinstance(end, Decision):
                    self._metrics.count_decided(end)
        self.stall.stop()
