"""Resends submissions whose messages were lost, for instance by a broker that restarted without its last second."""

import time
from collections.abc import Sequence

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


def resend_lost(
    app: Celery,
    queues: Sequence[SubmissionQueues],
    store: Store,
    settings: LedgerSettings,
    metrics: Metrics,
    empty_at: dict[str, float],
) -> None:
    """Resend or dead-letter the traces that are pending in the ledger but on no queue. Any number of workers may do so.

    They go to the first queue, as the ledger does not know theirs. Resending a trace that was only late does no harm.
    ``empty_at`` remembers when each queue was last empty, by the monotonic clock. Raises ServiceUnavailable if Redis or the
    broker cannot be reached; a later call claims the traces again.
    """
    now = time.monotonic()
    empty_at |= {each.traces.name: now for each in queues if waiting(app, each.traces) == 0}
    empty_ms_ago = int((now - min(empty_at.values())) * 1_000) if len(empty_at) == len(queues) else -1
    claims = store.ledger.claim_lost(int(settings.resend_after_s * 1_000), empty_ms_ago=empty_ms_ago)
    # The traces to dead-letter come first: resending may take long, and a worker might decide them meanwhile.
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
            # Add one, because the first sending was not a resend.
            detail = f"sent {claim.resends + 1} times, never decided"
            why = DeadLettering("lost", detail, claim.trace_id, claim.digest, deliveries=0)
            store.dead_letters.dead_letter(claim.payload, why)
        else:
            try:
                send_traces(app, queues[0], [(claim.trace_id, claim.payload)])
            except Exception as error:
                # The trace will be due again, and sending the others may succeed.
                log.warning("trace_not_sent_again", trace_id=claim.trace_id, detail=type(error).__name__)
                continue
            store.ledger.count_resend(claim.trace_id)
            metrics.resends.inc()
            log.warning("trace_sent_again", trace_id=claim.trace_id, resends=claim.resends + 1)
