"""The first stage of deciding: look traces up in the ledger, one round trip for whatever waits, and have them checked."""

import time
from collections.abc import Callable, Sequence

from kp_scorer.decider import Case, Decider
from kp_scorer.process.admission import Admission
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.watchdog import StallTimer, VitalThread


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
        self._metrics.look_up_s.observe(cases[0].look_up_ms / 1_000)
        for delivery, case in zip(group, cases, strict=True):
            delivery.case, case.received = case, delivery.received
            case.held_ms = round(delivery.in_flight_s() * 1_000 - case.look_up_ms, 3)

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
