"""How a message that gets no decision becomes a dead letter: one that was not parsed, or was delivered in vain too often."""

from contextlib import suppress
from typing import Any

from kp_scorer.broker.task_body import argument_in, raw_body
from kp_scorer.broker.task_message import checked_id, deliveries_by, parse_submission, submission_in
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, Reason
from kp_scorer.store import DeadLetters


def bury_unread(dead_letters: DeadLetters, message: Any, reason: Reason, detail: str, trace_id: str = "") -> Decision | None:
    """Keep a kombu message that was not decoded; ``trace_id`` is what it calls its trace, if it is a submission.

    Returns:
        The decision on this very submission, if there is one: then nothing is kept.

    Raises:
        ServiceUnavailable: Redis cannot be reached; the message must be given back, not acknowledged.
    """
    body = raw_body(message)
    # What is malformed is no submission; of what is, another worker keeps the same bytes if it reads them.
    payload = body if reason == "malformed" else argument_in(body)
    return dead_letters.bury(payload, reason, detail, trace_id, deliveries=deliveries_by(message))


def bury_poison(dead_letters: DeadLetters, message: Any, deliveries: int, limits: Limits) -> Decision | None:
    """Keep a kombu message that was delivered ``deliveries`` times in vain.

    Returns:
        The decision on this very submission, if there is one: then nothing is kept.

    Raises:
        ServiceUnavailable: Redis cannot be reached; the message must be given back, not acknowledged.
    """
    payload = submission_in(message, limits)
    trace_id, digest = checked_id(message.headers.get("id")), b""
    with suppress(InvalidTrace):
        trace = decode_trace(parse_submission(payload, limits), limits)
        trace_id, digest = trace.id, trace.digest()
    return dead_letters.bury(payload, "poison", said_of_poison(deliveries), trace_id, digest, deliveries)


def said_of_poison(deliveries: int) -> str:
    """What is said of a message that was delivered so often in vain."""
    return f"delivered {deliveries} times, and no worker came to an end with it"
