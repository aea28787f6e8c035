"""How a message that gets no decision becomes a dead letter: one that was not parsed, or was delivered in vain too often."""

from contextlib import suppress
from typing import Any

from kp_scorer.broker.task_message import checked_id, deliveries_by, raw_body, submission_in, task_body
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, decode_json
from kp_scorer.errors import InvalidTrace, Reason
from kp_scorer.store import DeadLetters, Store


def bury_unread(store: Store, message: Any, reason: Reason, detail: str, trace_id: str = "") -> None:
    """Keep a kombu message that was not parsed; ``trace_id`` is what its headers call the trace, if it is a submission.

    If a client has noted this very submission, that is kept in place of the body, and its record ends.

    Raises:
        ServiceUnavailable: Redis cannot be reached; the message must be given back, not acknowledged.
    """
    payload = raw_body(message)
    noted = store.ledger.noted(trace_id) if trace_id else b""
    # Anyone may write any id, so what is noted under it counts only if the body says that and no more.
    if noted and payload in (noted, task_body(noted)):
        payload = noted
    store.dead_letters.bury(payload, reason, detail, trace_id, deliveries=deliveries_by(message))


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
        trace = decode_json(payload, limits)
        trace_id, digest = trace.id, trace.digest()
    return dead_letters.bury(payload, "poison", said_of_poison(deliveries), trace_id, digest, deliveries)


def said_of_poison(deliveries: int) -> str:
    """What is said of a message that was delivered so often in vain."""
    return f"delivered {deliveries} times, and no worker came to an end with it"
