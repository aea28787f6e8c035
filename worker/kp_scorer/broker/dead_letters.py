"""Dead letters of queued messages: those not parsed, delivered too often, or too large for a worker."""

from contextlib import suppress
from typing import Any, NamedTuple

from kp_scorer.broker.wire import checked_id, parse_submission, raw_body, submission_in
from kp_scorer.decision import Decision, Received
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, Reason
from kp_scorer.ledger.dead_letters import DeadLetters


class DeadLettering(NamedTuple):
    """Why a message gets no decision."""

    reason: Reason
    detail: str
    """Field paths and figures, never content."""
    deliveries: int
    trace_id: str = ""
    """The id that its submission, or its header, names; empty if none."""
    digest: bytes = b""
    """That of its trace; empty if it is none, or was not decoded."""


def poison(message: Any, deliveries: int) -> DeadLettering:
    """Why a kombu message that was delivered so often without a result is dead-lettered."""
    detail = f"delivered {deliveries} times, and no worker came to an end with it"
    return DeadLettering("poison", detail, deliveries, checked_id(message.headers.get("id")))


def dead_letter(
    dead_letters: DeadLetters, message: Any, why: DeadLettering, limits: Limits, received: Received | None = None
) -> Decision | None:
    """Dead-letter a kombu message; ``limits`` are those that it was ``received`` within, by a worker.

    It returns the decision on this very submission, if there is one: then nothing is kept. After ServiceUnavailable, as Redis
    cannot be reached, the message must be requeued, not acknowledged.
    """
    reason, detail, deliveries, trace_id, digest = why
    # A malformed message is no submission. Of a submission, every worker keeps the same bytes.
    payload = raw_body(message) if reason == "malformed" else submission_in(message, limits)
    # What was cut has no type, and may look like a whole trace.
    if reason == "poison" and message.content_type == "application/json":
        with suppress(InvalidTrace):
            trace = decode_trace(parse_submission(payload, limits), limits)
            trace_id, digest = trace.id, trace.digest()
    return dead_letters.dead_letter(payload, reason, detail, trace_id, digest, deliveries, received)
