"""The two stages of deciding a batch, measured."""

import time
from collections.abc import Sequence

from kp_scorer.decider import Decider, Prepared, Resolved
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics


class Stages:
    """Decides as the decider does. Each stage has a thread of its own; any thread may read the lag."""

    def __init__(self, decider: Decider, metrics: Metrics) -> None:
        """Measure ``decider``, whose mirror has just read the novelty log to its end."""
        self._decider = decider
        self._metrics = metrics
        self._caught_up_at = time.monotonic()

    def behind_s(self) -> float:
        """Seconds since the mirror was last at the end of the novelty log: never much, as an idle worker reads on too."""
        return time.monotonic() - self._caught_up_at

    def prepare(self, deliveries: Sequence[Delivery], *, alone: bool) -> Prepared:
        """Prepare the traces of messages; ``alone``: there is only this one, and nothing else is in flight."""
        tokens = self._decider.tokens_embedded
        prepared = self._decider.prepare([delivery.trace for delivery in deliveries if delivery.trace], alone=alone)
        self._metrics.batch_traces.observe(len(prepared.claimed))
        self._metrics.look_up_s.observe(prepared.look_up_ms / 1_000)
        self._metrics.embed_s.observe(prepared.embed_ms / 1_000)
        self._metrics.tokens.inc(self._decider.tokens_embedded - tokens)
        return prepared

    def finish(self, prepared: Prepared) -> Sequence[Resolved | None]:
        """Finish what was prepared; None for a message whose trace is to be prepared again, alone."""
        started = time.monotonic()
        resolved = self._decider.finish(prepared)
        self._caught_up_at = time.monotonic()
        self._metrics.finish_s.observe(self._caught_up_at - started)
        return resolved

    def refresh(self) -> None:
        """Read on in the novelty log while there is nothing to finish."""
        self._decider.refresh()
        self._caught_up_at = time.monotonic()
