"""The stage that commits: it places traces in the novelty log, judges them and stores their decisions."""

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


class CommitStage:
    """Commits all deliveries that are ready as one group; the next group forms meanwhile. It owns the mirror of the log."""

    def __init__(self, admission: Admission, decider: Decider, metrics: Metrics) -> None:
        """Start the thread. The mirror must have just been read to the end of the log."""
        self._admission = admission
        self._decider = decider
        self._metrics = metrics
        self._ready: SimpleQueue[Sequence[Delivery] | None] = SimpleQueue()
        self.behind = StallTimer()  # Times how long ago the mirror was at the end of the log; an idle worker reads on, too.
        self.behind.start()
        if decider.novelty:
            metrics.mirror_lag_s.set_function(self.behind.elapsed_s)
        self.thread = VitalThread(self._run, "committer")
        self.thread.start()

    def put(self, deliveries: Sequence[Delivery]) -> None:
        """Hand over deliveries whose traces are ready to be judged. Any thread may call this."""
        self._ready.put(deliveries)

    def stop(self) -> None:
        """End the thread. The stage must be empty by then, and get no more deliveries."""
        self._ready.put(None)

    def _run(self, stall: StallTimer) -> None:
        while True:
            together: list[Delivery] = []
            with suppress(Empty):
                group = self._ready.get(timeout=_IDLE_S)
                if group is None:
                    return
                together += group
                while group := self._ready.get_nowait():
                    together += group
            stall.start()
            if together:
                self._decide(together)
            else:
                # An error would end the thread here. It is not lost: the next trace meets it again, and reports it.
                with suppress(Exception):
                    self._decider.refresh()
                    self.behind.start()
            stall.stop()

    def _decide(self, group: Sequence[Delivery]) -> None:
        started = time.monotonic()
        try:
            self._decider.finish([delivery.pending for delivery in group])
        except Exception as error:
            self._admission.fail(group, error)
        else:
            self.behind.start()
            self._metrics.finish_s.observe(time.monotonic() - started)
            self._metrics.batch_traces.observe(len(group))
            ends = [(delivery, delivery.pending.resolved) for delivery in group]
            self._admission.resolve(ends)
            for _, end in ends:
                if isinstance(end, Decision):
                    self._metrics.count_decided(end)
