"""Sends submissions again whose messages are lost, as after a broker that came back without its last second."""

import json
from collections.abc import Sequence

import structlog
from celery import Celery
from kombu import Queue

from worker.dead_letters import DeadLetters
from worker.ledger import RedisLedger
from worker.publishing import send_trace, waiting
from worker.settings import LedgerSettings

log = structlog.get_logger("worker.reconciler")


class Reconciler:
    """Looks for traces that the ledger holds as pending and the queue no longer holds. Any number of workers may do so."""

    def __init__(
        self, app: Celery, queues: Sequence[Queue], ledger: RedisLedger, dead_letters: DeadLetters, settings: LedgerSettings
    ) -> None:
        """Send what is lost to the last of ``queues`` again, ``settings.max_resends`` times at most."""
        self._app = app
        self._queues = queues
        self._ledger = ledger
        self._dead_letters = dead_letters
        self._settings = settings

    def reconcile(self) -> None:
        """Send again, or bury, what is due.

        Deciding twice changes nothing, so a trace that was only late is safe.

        Raises:
            ServiceUnavailable: Redis or the broker cannot be reached; what was claimed is claimed again later.
        """
        is_empty = waiting(self._app, self._queues[-1]) == 0
        resend_after_ms = int(self._settings.resend_after_s * 1_000)
        for trace_id, payload, resends in self._ledger.claim_lost(resend_after_ms, queue_is_empty=is_empty):
            if resends > self._settings.max_resends:
                detail = f"sent {resends} times, never decided"
                self._dead_letters.bury(payload, "lost", detail, trace_id, attempts=resends)
            else:
                send_trace(self._app, self._queues, trace_id, json.loads(payload))
                log.warning("trace_sent_again", trace_id=trace_id, resends=resends)
