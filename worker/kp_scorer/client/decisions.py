"""Reading decisions as they come: at-least-once, through outages, each once for whoever reads."""

from collections import OrderedDict
from collections.abc import Iterator
from threading import Event
from typing import Any, Final

import structlog

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Results, open_results
from kp_scorer.decision import Decision, Outcome
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.local.endpoints import with_endpoints
from kp_scorer.settings import Settings, load_settings

_POLL_S: Final = 0.2
_RETRY_S: Final = 1.0
_REMEMBERED: Final = 100_000
"""Of so many traces the last decision is known: as many as are read while a copy may still be redelivered."""

log = structlog.get_logger("kp_scorer.client.decisions")


def read_decisions(
    outcome: Outcome | None = None,
    *,
    group: str = "",
    follow: bool = True,
    stopping: Event | None = None,
    settings: Settings | None = None,
) -> Iterator[Decision]:
    """Yield decisions from the queues and streams that workers publish to; each is acknowledged after the body of the loop.

    Where the body raises an error, or leaves the loop, its decision is delivered again, to this reader or another. Copies of
    what was acknowledged here are dropped; a later run must recognise those itself, by ``trace_id`` and ``decided_at``. After
    an outage it connects anew. What is on a queue and no decision becomes a dead letter, reason ``malformed``.

    Args:
        outcome: only decisions with this one.
        group: the consumer group as which it reads streams; without one it reads queues alone. A group is made if it is
            missing, and then keeps what it does not read.
        follow: wait for more; otherwise end when all are read that are there.
        stopping: ends the loop, after the body and its acknowledgement, once it is set.
        settings: by default those of the environment and the configuration file.

    Raises:
        SettingsError: a setting is wrong, all decisions go elsewhere, or RabbitMQ has a queue with other arguments.
        ServiceUnavailable: the broker or Redis cannot be reached; with ``follow`` only before it has been reached once.
    """
    reader = DecisionReader(with_endpoints(settings or load_settings()), outcome, group, follow=follow, stopping=stopping)
    for document in reader:
        yield Decision.model_validate(document)


class DecisionReader:
    """Yields decisions, as the JSON objects that were published; see :func:`read_decisions`."""

    def __init__(
        self, settings: Settings, outcome: Outcome | None, group: str, *, follow: bool, stopping: Event | None = None
    ) -> None:
        self._settings = settings
        self._outcome = outcome
        self._group = group
        self._follow = follow
        self._stopping = stopping or Event()
        self._marks: OrderedDict[str, str] = OrderedDict()
        """The marks of the last decisions that were read, by trace id."""
        self.dead_lettered = 0
        """How many messages were no decisions, so far."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Connect, and yield decisions until ``stopping`` is set or, without ``follow``, none is left."""
        is_reached = False
        with make_celery(self._settings) as app:
            while not self._stopping.is_set():
                try:
                    with open_results(app, self._settings, self._outcome, self._group) as results:
                        is_reached = True
                        yield from self._read(results)
                        return
                except ServiceUnavailable as error:
                    if not (self._follow and is_reached):
                        raise
                    log.warning("decisions_wait", detail=str(error))
                self._stopping.wait(_RETRY_S)

    def _read(self, results: Results) -> Iterator[dict[str, Any]]:
        while not self._stopping.is_set():
            is_idle = True
            for received in results.receive():
                is_idle = False
                trace_id, mark = received.decision["trace_id"], received.decision["decided_at"]
                if self._marks.get(trace_id) != mark:
                    yield received.decision
                    self._remember(trace_id, mark)
                received.acknowledge()
                if self._stopping.is_set():
                    break
            self.dead_lettered, results.dead_lettered = self.dead_lettered + results.dead_lettered, 0
            if is_idle and not self._follow:
                return
            if is_idle:
                self._stopping.wait(_POLL_S)

    def _remember(self, trace_id: str, mark: str) -> None:
        self._marks[trace_id] = mark
        self._marks.move_to_end(trace_id)
        if len(self._marks) > _REMEMBERED:
            self._marks.popitem(last=False)
