"""Reading decisions as they come: at-least-once, through outages, each once for whoever reads."""

from collections import OrderedDict
from collections.abc import Iterator
from threading import Event
from typing import Final

import structlog

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Results, open_results
from kp_scorer.decision import Decision, Outcome
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings

_POLL_S: Final = 0.2
_RETRY_S: Final = 1.0
_REMEMBERED: Final = 100_000  # Traces whose last decision is known: as many as are read while a copy may be redelivered.

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

    Where the body raises an error, leaves the loop, or takes longer than ``broker.visibility_timeout_s``, its decision is
    delivered again, to this reader or another. Copies of what was acknowledged here are dropped; a later run must recognise
    those itself, by ``trace_id`` and ``decided_at``. After an outage it connects anew. What is no decision is dead-lettered.

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
    settings = with_endpoints(settings or load_settings())
    stopping = stopping or Event()
    marks: OrderedDict[str, str] = OrderedDict()
    is_reached = False
    with make_celery(settings) as app:
        while not stopping.is_set():
            try:
                with open_results(app, settings, outcome, group) as results:
                    is_reached = True
                    yield from _new_in(results, marks, stopping, follow=follow)
                    return
            except ServiceUnavailable as error:
                if not (follow and is_reached):
                    raise
                log.warning("decisions_wait", detail=str(error))
            stopping.wait(_RETRY_S)


def _new_in(results: Results, marks: OrderedDict[str, str], stopping: Event, *, follow: bool) -> Iterator[Decision]:
    """Yield and acknowledge decisions; ``marks`` are those of the last ones by trace id, so that copies are recognised."""
    while not stopping.is_set():
        is_idle = True
        for decision, acknowledge in results.receive():
            is_idle = False
            if marks.get(decision.trace_id) != decision.mark:
                yield decision
                marks[decision.trace_id] = decision.mark
                marks.move_to_end(decision.trace_id)
                if len(marks) > _REMEMBERED:
                    marks.popitem(last=False)
            acknowledge()
            if stopping.is_set():
                return
        if is_idle:
            if not follow:
                return
            stopping.wait(_POLL_S)
