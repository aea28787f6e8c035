"""The stages of deciding before and after the engine: look up and have checked; place, judge and commit.

One takes one round trip for whatever waits, the other two for whatever has its vectors.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from kp_scorer.decider import Case, Decider
from kp_scorer.decision import Decision
from kp_scorer.process.admission import Admission
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.watchdog import StallTimer, VitalThread

_IDLE_S: Final = 0.5


class LookUpStage:
    """Resolves what is decided or dead already, and passes on what this worker is to decide."""

    def __init__(
        self, admission: Admission, decider: Decider, metrics: Metrics, pass_on: Callable[[Sequence[Delivery]], None]
    ) -> None:
        """Start the thread; ``pass_on``, which must not raise, gets deliveries whose traces are leased and checked."""
        self._admission = admission
        self._decider = decider
        self._metrics = metrics
        self._pass_on = pass_on
        self.stall = StallTimer()
        """Runs while a group is looked up, and while each of its traces is checked and passed on."""
        self.thread = VitalThread(self._run, "look-up")
        self.thread.start()

    def _run(self) -> None:
        while group := self._admission.next_group():
            self.stall.start()
            try:
                self._acquire(group)
            except Exception as error:
                self._admission.fail(group, error)
            else:
                self._dispatch(group)
            self.stall.stop()

    def _acquire(self, group: Sequence[Delivery]) -> None:
        self._admission.raise_if_aborted()
        cases = self._decider.acquire([delivery.trace for delivery in group if delivery.trace], alone=group[0].is_alone)
        self._metrics.look_up_s.observe(cases[0].times_ms["look_up_ms"] / 1_000)
        for delivery, case in zip(group, cases, strict=True):
            delivery.case, case.received = case, delivery.received
            case.times_ms["held_ms"] = round(delivery.in_flight_s() * 1_000 - case.times_ms["look_up_ms"], 3)

    def _dispatch(self, group: Sequence[Delivery]) -> None:
        cases = [(delivery, delivery.case) for delivery in group if delivery.case]
        self._admission.resolve([(delivery, case.resolved) for delivery, case in cases if case.resolved])
        self._admission.decide_alone([delivery for delivery, case in cases if not (case.resolved or case.is_claimed)])
        leased = [(delivery, case) for delivery, case in cases if case.is_claimed]
        if leased and not self._decider.checks:
            self._pass_on([delivery for delivery, _ in leased])
            return
        for delivery, case in leased:
            self._check(delivery, case)

    def _check(self, delivery: Delivery, case: Case) -> None:
        """Check a trace and pass it on at once: the engine waits for none that comes after it."""
        self.stall.start()
        started = time.monotonic()
        try:
            self._admission.raise_if_aborted()
            self._decider.check(case)
        except Exception as error:
            self._decider.release([case])
            self._admission.fail([delivery], error)
        else:
            self._metrics.checks_s.observe(time.monotonic() - started)
            self._pass_on([delivery])


class DecideStage:
    """Group commit: what is ready when one group has been committed is the next group. Owns the mirror of the novelty log."""

    def __init__(self, admission: Admission, decider: Decider, metrics: Metrics) -> None:
        """Start the thread. The mirror has just been read to its end."""
        self._admission = admission
        self._decider = decider
        self._metrics = metrics
        self._ready: SimpleQueue[Sequence[Delivery] | None] = SimpleQueue()
        self._caught_up_at = time.monotonic()
        if decider.novelty:
            metrics.mirror_lag_s.set_function(self.behind_s)
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
            together = [*group]
            with suppress(Empty):
                while group := self._ready.get_nowait():
                    together += group
            self._decide(together)

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
