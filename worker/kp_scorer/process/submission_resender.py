"""Resends submissions whose messages were lost, for instance by a broker that restarted without its last second."""

import structlog
from celery import Celery

from kp_scorer.broker.calls import waiting
from kp_scorer.broker.publishing import send_traces
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.wire import checked_id
from kp_scorer.process.metrics import Metrics
from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering

log = structlog.get_logger("kp_scorer.process.submission_resender")


def resend_lost(app: Celery, queues: SubmissionQueues, store: Store, settings: LedgerSettings, metrics: Metrics) -> None:
    """Resend or dead-letter the traces that are pending in the ledger but not on the queue. Any number of workers may do so.

    Deciding is idempotent, so resending a trace that was only late does no harm. ServiceUnavailable if Redis or the broker
    cannot be reached; a later call claims the traces again.
    """
    is_empty = waiting(app, queues.traces) == 0
    claims = store.ledger.claim_lost(int(settings.resend_after_s * 1_000), queue_is_empty=is_empty)
    # The traces to dead-letter come first: resending may take long, and a worker may receive them meanwhile.
    for claim in sorted(claims, key=lambda claim: claim.resends, reverse=True):
        (record,) = store.ledger.look_up([claim.trace_id])
        if not claim.payload or (record and record.reason == "damaged"):
            log.warning("record_damaged", trace_id=checked_id(claim.trace_id))
            if claim.payload and record:
                why = DeadLettering("damaged", record.detail, claim.trace_id, deliveries=0)
                store.dead_letters.dead_letter(claim.payload, why)
        elif record is None or record.state != "pending":
            # The trace ended while others of the same claim were sent.
            continue
        elif claim.resends >= settings.max_resends:
            # The first sending was no resend.
            detail = f"sent {claim.resends + 1} times, never decided"
            why = DeadLettering("lost", detail, claim.trace_id, claim.digest, deliveries=0)
            store.dead_letters.dead_letter(claim.payload, why)
        else:
            try:
                send_traces(app, queues, [(claim.trace_id, claim.payload)])
            except Exception as error:
                # It will be due again; the others may still be sent.
                log.warning("trace_not_sent_again", trace_id=claim.trace_id, detail=type(error).__name__)
                continue
            store.ledger.count_resend(claim.trace_id)
            metrics.resends.inc()
            log.warning("trace_sent_again", trace_id=claim.trace_id, resends=claim.resends + 1)
