"""What a ledger holds and does, wherever it is; and the one in memory, for scoring offline."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, TraceConflict, TraceDead

Parsed = TypeVar("Parsed", bound=BaseModel)

TraceState = Literal["pending", "decided", "dead"]

DAMAGED_DECISION: Final = "the ledger's record of it, decision: expected a decision"
"""The detail of what is dead because the decision in its record is none."""
_MOST: Final = 253_402_300_799_999  # The last millisecond of the year 9999.


class Identity(NamedTuple):
    """Which trace it is and what it says: its id and its 16-byte digest."""

    trace_id: str
    digest: bytes


class Record(NamedTuple):
    """What the ledger holds of a trace."""

    state: TraceState
    digest: bytes  # Empty where a dead letter could not be decoded.
    decision: Decision | None = None  # None unless decided.
    reason: Reason | None = None  # Why it is dead; None if it is not. A record that cannot be read is dead, and ``damaged``.
    detail: str = ""
    attempts: int = 0  # How many workers have ended while they decided it.
    is_held: bool = False  # Whether another worker, which is alive, is deciding it; False where it is only looked up.
    since_ms: int = 0  # Since when it is pending, by Redis' clock; where it is looked up.
    resends: int = 0  # How often it was lost and sent again since; where it is looked up.
    good: bool | None = None  # How it is labelled, if it is; where it is looked up.


class Tallies(NamedTuple):
    """How many decisions were stored."""

    domains: dict[str, int]  # By domain; under an empty name those of domains after too many.
    guards: dict[str, int]


class Verdict(NamedTuple):
    """A decision to commit, as JSON, the digest it was made for, what it rests on, and what it counts as once it is stored."""

    trace_id: str
    digest: bytes
    decision: bytes
    entry: str  # That of the novelty log that it rests on; empty without an embedder.
    domain: str
    is_known: bool  # Whether settings name this domain. Of others, which producers invent, only so many are told apart.
    guards: str = ""  # The guards that fired, with a space between them.


Committed = Literal["stored", "again"] | Decision | TraceConflict | TraceDead
"""How a commit ended, if not with this decision stored: with the one that stands, or why there is none; or ``again``: the trace
has another place in the novelty log by now, and with it another novelty, so that it must be decided again."""


class Submission(NamedTuple):
    """A submission about to be sent: its trace's id, its 16-byte digest, and itself as UTF-8 JSON."""

    trace_id: str
    digest: bytes
    payload: bytes


class LostSubmission(NamedTuple):
    """A submission to be sent again, and how often that was done before."""

    trace_id: str
    payload: bytes
    resends: int
    digest: bytes


class SubmissionCounts(NamedTuple):
    """How many submissions there have been, and what became of them: submitted = pending + decided + dead."""

    submitted: int
    pending: int
    decided: int
    dead: int


def number_in(field: bytes | int | None) -> int:
    """A count, or a time in ms, in a field in Redis; 0 if it is anything else, as for the scripts."""
    try:
        number = int(field or 0)
    except ValueError:
        return 0
    return number if 0 <= number <= _MOST else 0


def text_in(field: bytes | None) -> str:
    """The text in a field in Redis; bytes that are no text are escaped."""
    return (field or b"").decode("utf-8", "backslashreplace")


def parsed_in(model: type[Parsed], field: bytes | None) -> Parsed | None:
    """The decision or the like that a field in Redis holds as JSON; None if it holds none."""
    try:
        return model.model_validate_json(field or b"")
    except ValidationError:
        # It quotes what it does not expect.
        return None


def dead_letter_id_of(payload: bytes) -> str:
    """The id that a submission of these bytes has as a dead letter."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


class MemoryLedger:
    """The part of :class:`~kp_scorer.store.ledger.RedisLedger` that deciding needs, as long as the process lives.

    It holds the records of the newest traces, ``most`` of them; of any number without.
    """

    def __init__(self, most: float = math.inf) -> None:
        self._most = most
        self._records = OrderedDict[str, tuple[bytes, bytes]]()  # The digest, and the decision as JSON if there is one.

    def acquire(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Read the records, or make them. No attempt ends but with the process."""
        records: list[Record] = []
        for trace_id, digest in identities:
            known_digest, decision = self._records.setdefault(trace_id, (digest, b""))
            decided = Decision.model_validate_json(decision) if decision else None
            records.append(Record("decided" if decided else "pending", known_digest, decided))
        while len(self._records) > self._most:
            self._records.popitem(last=False)
        return records

    def release(self, trace_ids: Sequence[str]) -> None:
        """Nothing is held."""

    def commit(self, verdicts: Sequence[Verdict]) -> list[Committed]:
        """Store decisions, the first end stands; count nothing."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> Committed:
        digest, decision = self._records.get(verdict.trace_id, (verdict.digest, b""))
        if digest != verdict.digest:
            return TraceConflict(verdict.trace_id)
        if decision:
            return Decision.model_validate_json(decision)
        self._records[verdict.trace_id] = digest, verdict.decision
        return "stored"
