"""Sends submissions again whose messages are lost, as after a broker that came back without its last second."""

import structlog
from celery import Celery

from kp_scorer.broker.publishing import send_traces, waiting
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.process.observer import Observer
from kp_scorer.settings import LedgerSettings
from kp_scorer.store import Claim, Store

log = structlog.get_logger("kp_scorer.process.reconciler")


class Reconciler:
    """Looks for traces that the ledger holds as pending and the queue no longer holds. Any number of workers may do so."""

    def __init__(
        self, app: Celery, queues: SubmissionQueues, store: Store, settings: LedgerSettings, observer: Observer
    ) -> None:
        """Send what is lost to the queue of traces again, ``settings.max_resends`` times at most; tell ``observer`` of it."""
        self._app = app
        self._queues = queues
        self._store = store
        self._settings = settings
        self._observer = observer

    def reconcile(self) -> None:
        """Send again, or bury, what is due.

        Deciding twice changes nothing, so a trace that was only late is safe.

        Raises:
            ServiceUnavailable: Redis or the broker cannot be reached; what was claimed is claimed again later.
        """
        is_empty = waiting(self._app, self._queues.traces) == 0
        resend_after_ms = int(self._settings.resend_after_s * 1_000)
        claims = self._store.ledger.claim_lost(resend_after_ms, queue_is_empty=is_empty)
        # Those to be buried first: sending may take long, and a worker may meet them meanwhile.
        for claim in sorted(claims, key=lambda claim: claim.resends, reverse=True):
            self._settle(claim)

    def _settle(self, claim: Claim) -> None:
        trace_id, payload, resends, digest = claim
        (record,) = self._store.ledger.look_up([trace_id])
        if record is None or record.state != "pending":
            # It has ended while others that were claimed with it were sent.
            return
        if resends >= self._settings.max_resends:
            # The first sending is none of the resends.
            detail = f"sent {resends + 1} times, never decided"
            self._store.dead_letters.bury(payload, "lost", detail, trace_id, digest, deliveries=0)
            return
        try:
            send_traces(self._app, self._queues, [(trace_id, payload)])
        except Exception as error:
            # What cannot be sent now is due again later, and says nothing about the others.
            log.warning("trace_not_sent_again", trace_id=trace_id, detail=type(error).__name__)
            return
        self._store.ledger.resent(trace_id)
        self._observer.resent()
        log.warning("trace_sent_again", trace_id=trace_id, resends=resends + 1)
