"""The submissions that producers may send. They have few ids and few contents, so that they often meet."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from kp_scorer.broker.wire import as_bytes, trace_id_of
from kp_scorer.decoding import check_late_outcome, decode_trace, is_late_outcome
from kp_scorer.embedding.embedder import Vector, Vectors
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.trace import LateOutcome, ReasoningTrace, outcome_key

from tests.support.builders import minimal_payload, steps
from tests.support.word_embedder import WordEmbedder

LIMITS: Final = Limits()
IDS: Final = ("kp:trace:0", "kp:trace:1", "kp:trace:acme:2", "kp:trace:acme:3", "kp:trace:other:4")
_TEXTS: Final = ("pay the invoice", "route a parcel", "pay the parcel", "close the ticket of today", "pay the  invoice")

DOMAINS: Final = ("cod1", "code", "cod2", "cod3", "cod1")
"""The domain of each text. The first and the last text are similar and share a domain; the settings name only one domain."""

KINDS: Final = ("first", "first again", "second", "third", "undecodable", "nameless", "solved later", "failed later", "forged")
"""The kinds of submissions. The second has the content of the first in other bytes; "nameless" has an id in its header only.

The last three are late outcomes. The last of these is forged, under the id of the one before.
"""
SECRET: Final = "secret of the ledger"
OUTCOME_IDS: Final = tuple(f"kp:outcome:{number}-{kind[:6]}" for number in range(5) for kind in KINDS[6:8])


@dataclass(frozen=True)
class Payload:
    """A submission as messages and dead letters hold it."""

    raw: bytes
    header_id: str
    """The id in the header of the message."""
    named_id: str
    """The id in the content; empty if the content has none."""
    trace: ReasoningTrace | None
    """None if the content cannot be decoded."""
    digest: bytes
    """Empty if the content cannot be decoded."""
    late: LateOutcome | None = None


@cache
def payload_of(trace_id: str, kind: str) -> Payload:
    """Return the submission of a kind under an id. Some kinds have the same content under several ids."""
    if kind == "nameless":
        return _payload({"steps": "none"}, trace_id)
    number = IDS.index(trace_id)
    if kind in KINDS[6:]:
        success, key = kind == "solved later", outcome_key(SECRET if kind != "forged" else "guessed", trace_id)
        outcome_id = f"kp:outcome:{number}-{'solved' if success else 'failed'}"
        late = {"@type": "LateOutcome", "id": outcome_id, "trace_id": trace_id, "success": success, "key": key}
        return _payload(late, outcome_id)
    offset = {"first": 0, "first again": 0, "second": 1, "third": 2, "undecodable": 0}[kind]
    place = (number + offset) % len(_TEXTS)
    content = minimal_payload(
        trace_id=trace_id,
        domain=DOMAINS[place],
        success=place != 1,
        objective=_TEXTS[place],
        steps=steps(*["thought"] * (kind != "undecodable")),
    )
    if kind == "first again":
        content["metadata"]["created_at"] = "2026-01-02T00:00:00Z"
    return _payload(content, trace_id)


def _payload(content: dict[str, Any], header_id: str) -> Payload:
    if is_late_outcome(content):
        late = check_late_outcome(content, LIMITS)
        return Payload(as_bytes(content), late.id, late.id, None, late.digest(), late)
    trace: ReasoningTrace | None = None
    with suppress(InvalidTrace):
        trace = decode_trace(content, LIMITS)
    return Payload(as_bytes(content), header_id, trace_id_of(content), trace, trace.digest() if trace else b"")


@cache
def by_bytes(raw: bytes) -> Payload:
    """Return the submission with these bytes, as someone who has only the bytes would read it."""
    content = json.loads(raw)
    return _payload(content, trace_id_of(content))


@cache
def vector_of(digest: bytes) -> Vector:
    """Return the vector of the content with this digest."""
    traces = (payload_of(trace_id, kind).trace for trace_id in IDS for kind in KINDS)
    trace = next(trace for trace in traces if trace and trace.digest() == digest)
    vector: Vector = WordEmbedder().embed([trace.embedding_text])[0]
    return vector


def letter_id_of(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


class EmbeddingFailed(Exception):
    """The error that the failing embedder raises."""


class FailingEmbedder(WordEmbedder):
    fails = False

    def embed(self, texts: Sequence[str]) -> Vectors:
        # Fail on the texts of submissions only, so that the probe shows the embedder to be healthy.
        if self.fails and any(text.startswith(_TEXTS) for text in texts):
            raise EmbeddingFailed
        return super().embed(texts)
