"""The decider, as the batcher calls it: what its batches cost, when it last had the whole novelty log, what was done when."""

import time
from collections.abc import Callable, Sequence

from kp_scorer.decider import Decider, Prepared, Settled
from kp_scorer.process.batcher import Stages
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.observer import Observer
from kp_scorer.spans import Step
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


NotedBatch = tuple[Sequence[Delivery], Prepared]
"""A batch between the two stages, and the messages that it came by."""


class NotedStages:
    """Stages for messages in hand, each of which notes what is done with its trace."""

    def __init__(self, stages: Stages[ReasoningTrace, Prepared, Settled]) -> None:
        """Have these stages do it."""
        self._stages = stages

    def prepare(self, deliveries: Sequence[Delivery], *, alone: bool) -> NotedBatch:
        """Begin with what the messages submit."""
        traces = [delivery.trace for delivery in deliveries if delivery.trace]
        begun_s = time.time()
        prepared = self._stages.prepare(traces, alone=alone)
        looked_up_s = begun_s + prepared.look_up_ms / 1_000
        looked_up = Step("look up", begun_s, looked_up_s, len(traces))
        embedded = Step("embed", looked_up_s, looked_up_s + prepared.embed_ms / 1_000, len(prepared.begun))
        for delivery, case in zip(deliveries, prepared.cases, strict=True):
            delivery.steps += [looked_up, embedded] if case.is_begun else [looked_up]
        return deliveries, prepared

    def finish(self, work: NotedBatch) -> Sequence[Settled | None]:
        """End what was begun."""
        deliveries, prepared = work
        begun_s = time.time()
        settled = self._stages.finish(prepared)
        decided = Step("decide", begun_s, time.time(), len(prepared.begun))
        for delivery, case in zip(deliveries, prepared.cases, strict=True):
            if case.is_begun:
                delivery.steps.append(decided)
        return settled

    def refresh(self) -> None:
        """Do what there is to do when there is nothing to finish."""
        self._stages.refresh()
