"""The decider, as the batcher calls it, and when it last had the whole novelty log."""

import time
from collections.abc import Sequence

from kp_scorer.decider import Decider, Prepared, Settled
from kp_scorer.trace import ReasoningTrace


class WatchedStages:
    """Decides as the decider does. Any thread may ask how that goes."""

    def __init__(self, decider: Decider) -> None:
        """Watch ``decider``, whose mirror has just read the novelty log to its end."""
        self._decider = decider
        self._caught_up_at = time.monotonic()

    def behind_s(self) -> float:
        """Seconds since the mirror was last at the end of the novelty log: never much, as an idle worker reads on too."""
        return time.monotonic() - self._caught_up_at

    def prepare(self, traces: Sequence[ReasoningTrace], *, alone: bool) -> Prepared:
        """Begin with traces; see :meth:`~kp_scorer.decider.Decider.prepare`."""
        return self._decider.prepare(traces, alone=alone)

    def finish(self, prepared: Prepared) -> Sequence[Settled | None]:
        """End what was begun; see :meth:`~kp_scorer.decider.Decider.finish`."""
        settled = self._decider.finish(prepared)
        self._caught_up_at = time.monotonic()
        return settled

    def refresh(self) -> None:
        """Read on in the novelty log; see :meth:`~kp_scorer.decider.Decider.refresh`."""
        self._decider.refresh()
        self._caught_up_at = time.monotonic()
