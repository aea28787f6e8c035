"""The stage that looks traces up: it leases and checks those that this worker is to decide, and has late outcomes judged."""

import time
from collections.abc import Sequence

from kp_scorer.decider import Decider
from kp_scorer.process.admission import Admission, Sink
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.watchdog import StallTimer, VitalThread
from kp_scorer.reviser import Reviser
from kp_scorer.trace import LateOutcome, ReasoningTrace


class LookUpStage:
    """Looks up and leases each group in one round trip; passes on the traces that are still to be decided."""

    def __init__(self, admission: Admission, decider: Decider, reviser: Reviser, metrics: Metrics, pass_on: Sink) -> None:
        """Start the thread; ``pass_on`` gets deliveries whose traces are leased and checked."""
        self._admission = admission
        self._decider = decider
        self._reviser = reviser
        self._metrics = metrics
        self._pass_on = pass_on
        self.thread = VitalThread(self._run, "look-up")
        self.thread.start()

    def _run(self, stall: StallTimer) -> None:
        while group := self._admission.next_group():
            stall.start()
            if late := [(delivery, delivery.trace) for delivery in group if isinstance(delivery.trace, LateOutcome)]:
                self._revise(late)
            if runs := [(delivery, delivery.trace) for delivery in group if isinstance(delivery.trace, ReasoningTrace)]:
                self._look_up(runs)
            stall.stop()

    def _revise(self, group: Sequence[tuple[Delivery, LateOutcome]]) -> None:
        """Have the traces of late outcomes decided again, which needs no other deciding stage."""
        deliveries = [delivery for delivery, _ in group]
        received, is_alone = [delivery.received for delivery in deliveries], deliveries[0].is_alone
        try:
            self._admission.raise_if_aborted()
            ends = self._reviser.revise([late for _, late in group], received, alone=is_alone)
        except Exception as error:
            self._admission.fail(deliveries, error)
        else:
            self._admission.resolve(list(zip(deliveries, ends, strict=True)))

    def _look_up(self, group: Sequence[tuple[Delivery, ReasoningTrace]]) -> None:
        deliveries = [delivery for delivery, _ in group]
        try:
            self._admission.raise_if_aborted()
            decisions = self._decider.acquire([trace for _, trace in group], alone=deliveries[0].is_alone)
        except Exception as error:
            self._admission.fail(deliveries, error)
            return
        self._metrics.look_up_s.observe(decisions[0].times_ms["look_up_ms"] / 1_000)
        for delivery, pending in zip(deliveries, decisions, strict=True):
            delivery.pending, pending.received = pending, delivery.received
            pending.times_ms["held_ms"] = round(delivery.in_flight_s() * 1_000 - pending.times_ms["look_up_ms"], 3)
        self._admission.resolve([(each, each.pending.resolved) for each in deliveries if not each.pending.is_claimed])
        leased = [each for each in deliveries if each.pending.is_claimed]
        if self._decider.checks:
            for delivery in leased:
                self._check(delivery)
        elif leased:
            self._pass_on(leased)

    def _check(self, delivery: Delivery) -> None:
        """Check a trace and pass it on at once, so that the engine does not wait for the checks of later ones."""
        self.thread.stall.start()
        started = time.monotonic()
        try:
            self._admission.raise_if_aborted()
            self._decider.check(delivery.pending)
        except Exception as error:
            self._decider.ledger.release([delivery.pending.trace.id])
            self._admission.fail([delivery], error)
        else:
            self._metrics.checks_s.observe(time.monotonic() - started)
            self._pass_on([delivery])
