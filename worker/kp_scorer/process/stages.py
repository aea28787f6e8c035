"""The decider, as the batcher calls it: what its batches cost, and when it last had the whole novelty log."""

import time
from collections.abc import Callable, Sequence

from kp_scorer.decider import Decider, Prepared, Settled
from kp_scorer.process.observer import Observer
from kp_scorer.trace import ReasoningTrace


class WatchedStages:
    """Decides as the decider does. Any thread may ask how that goes."""

    def __init__(self, decider: Decider, tokens: Callable[[], int], observer: Observer) -> None:
        """Watch ``decider``, whose mirror has just read the novelty log to its end.

        Args:
            decider: decides.
            tokens: how many its embedder has embedded by now.
            observer: is told of each batch.
        """
        self._decider = decider
        self._tokens = tokens
        self._observer = observer
        self._caught_up_at = time.monotonic()

    def behind_s(self) -> float:
        """Seconds since the mirror was last at the end of the novelty log: never much, as an idle worker reads on too."""
        return time.monotonic() - self._caught_up_at

    def prepare(self, traces: Sequence[ReasoningTrace], *, alone: bool) -> Prepared:
        """Begin with traces; see :meth:`~kp_scorer.decider.Decider.prepare`."""
        tokens = self._tokens()
        prepared = self._decider.prepare(traces, alone=alone)
        times_s = prepared.look_up_ms / 1_000, prepared.embed_ms / 1_000
        self._observer.prepared(len(prepared.begun), *times_s, self._tokens() - tokens)
        return prepared

    def finish(self, prepared: Prepared) -> Sequence[Settled | None]:
        """End what was begun; see :meth:`~kp_scorer.decider.Decider.finish`."""
        started = time.monotonic()
        settled = self._decider.finish(prepared)
        self._caught_up_at = time.monotonic()
        self._observer.finished(self._caught_up_at - started)
        return settled

    def refresh(self) -> None:
        """Read on in the novelty log; see :meth:`~kp_scorer.decider.Decider.refresh`."""
        self._decider.refresh()
        self._caught_up_at = time.monotonic()
