"""The records of a ledger, the parsers of fields in Redis, and the ledger in memory for scoring offline."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, TraceConflict, TraceDead
from kp_scorer.gate import MemoryFacts

Parsed = TypeVar("Parsed", bound=BaseModel)

TraceState = Literal["pending", "decided", "dead"]

Change = Literal["", "kept", "dropped"]
"""The change that a revision makes under a gate: its trace is kept from now on, or no longer; empty for no change."""
DAMAGED_DECISION: Final = "the ledger's record of it, decision: expected a decision"
"""The detail of a trace that is dead because the decision in its record cannot be read."""
_MOST: Final = 253_402_300_799_999  # The last millisecond of the year 9999.


class Identity(NamedTuple):
    """The id of a trace, and the 16-byte digest of its content."""

    trace_id: str
    digest: bytes


class Record(NamedTuple):
    """The ledger's record of a trace."""

    state: TraceState
    digest: bytes  # Empty if the submission could not be decoded.
    decision: Decision | None = None  # None unless decided. The first decision; from a look-up, the newest.
    reason: Reason | None = None  # None unless dead. An unreadable record is dead, with the reason ``damaged``.
    detail: str = ""
    attempts: int = 0  # The number of workers that ended while they decided it.
    is_held: bool = False  # True if another worker that is alive decides it; False from a look-up.
    since_ms: int = 0  # The time when it became pending, by Redis' clock; only from a look-up, like the next two.
    resends: int = 0  # The number of times that it was lost and sent again since then.
    good: bool | None = None  # Its label, or else its late outcome; None if it has none.
    first: Decision | None = None  # The first decision; only from a look-up, and None unless it was revised.


class Tallies(NamedTuple):
    """Counts of the stored decisions."""

    domains: dict[str, int]  # The decisions in each domain. Once there are many domains, further ones share the empty name.
    guards: dict[str, int]  # The decisions for which each guard fired.
    revised: dict[str, int]  # The revisions with each outcome.


class Verdict(NamedTuple):
    """A decision to commit: its JSON, the digest and log entry that it was made for, and the fields for the tallies."""

    trace_id: str
    digest: bytes
    decision: bytes
    entry: str  # The entry of the novelty log that the decision rests on; empty without an embedder.
    domain: str
    is_known: bool  # True if settings name this domain. Producers invent other domains, and only some of those get a tally.
    guards: str = ""  # The guards that fired, with a space between them.
    fact: bytes = b""  # The decision's fact, from ``Fact.packed``; empty without a gate.
    is_kept: bool = False
    trace: bytes = b""  # A copy of the trace as JSON; empty while no other log is warmed.


Committed = Literal["stored", "again"] | Decision | TraceConflict | TraceDead
"""The result of a commit: ``stored``; the earlier decision that stands, or the error for having none; or ``again`` if the trace
has got another place in the novelty log, and with it another novelty, so that it must be decided again."""
Revised = Committed | Literal["waits", "too_many"]
"""The result of storing a revision: that of a commit, where ``again`` means that a newer decision on the trace has been stored
meanwhile; ``waits`` if the late outcome waits for its trace; or ``too_many`` if too many outcomes of the trace wait already.
"""


class Submission(NamedTuple):
    """A submission about to be sent: its trace's id and 16-byte digest, and its UTF-8 JSON."""

    trace_id: str
    digest: bytes
    payload: bytes


class Revision(NamedTuple):
    """A late outcome with the revision that it leads to, as JSON; without a revision, the outcome is to wait for its trace."""

    outcome_id: str
    digest: bytes
    trace_id: str
    submission: bytes  # The late outcome as UTF-8 JSON.
    supersedes: str = ""  # The time of the decision that was judged again.
    decision: bytes = b""
    outcome: str = ""
    change: Change = ""


class LostSubmission(NamedTuple):
    """A submission to be sent again, and the number of earlier resends."""

    trace_id: str
    payload: bytes
    resends: int
    digest: bytes


class SubmissionCounts(NamedTuple):
    """The numbers of submissions by state; submitted = pending + decided + dead."""

    submitted: int
    pending: int
    decided: int
    dead: int


def number_in(field: bytes | int | None) -> int:
    """Return the count or the time in ms that a field in Redis holds; 0 if it holds anything else, as in the scripts."""
    try:
        number = int(field or 0)
    except ValueError:
        return 0
    return number if 0 <= number <= _MOST else 0


def text_in(field: bytes | None) -> str:
    """Return the text in a field in Redis, with bytes that are not UTF-8 escaped."""
    return (field or b"").decode("utf-8", "backslashreplace")


def parsed_in(model: type[Parsed], field: bytes | None) -> Parsed | None:
    """Return the model that a field in Redis holds as JSON; None if it holds anything else."""
    try:
        return model.model_validate_json(field or b"")
    except ValidationError:
        # The error is not passed on, as it quotes the field.
        return None


def dead_letter_id_of(payload: bytes) -> str:
    """Return the id of the dead letter of a submission with these bytes."""
    return hashlib.blake2b(payload, digest_size=16).hexdigest()


class MemoryLedger:
    """A ledger in memory, with the part of :class:`~kp_scorer.store.ledger.RedisLedger` that deciding needs.

    It keeps the records of the ``most`` newest traces.
    """

    copies_traces: Final = False

    def __init__(self, most: float = math.inf, facts: MemoryFacts | None = None) -> None:
        self._most = most
        self._facts = facts
        self._records = OrderedDict[str, tuple[bytes, bytes]]()  # By trace id: the digest, and the decision if there is one.

    def acquire(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Return the records of traces, and create missing ones. No attempt is charged, as the ledger ends with its process."""
        records: list[Record] = []
        for trace_id, digest in identities:
            known_digest, decision = self._records.setdefault(trace_id, (digest, b""))
            decided = Decision.model_validate_json(decision) if decision else None
            records.append(Record("decided" if decided else "pending", known_digest, decided))
        while len(self._records) > self._most:
            self._records.popitem(last=False)
        return records

    def release(self, trace_ids: Sequence[str]) -> None:
        """Do nothing, as traces are not leased here."""

    def commit(self, verdicts: Sequence[Verdict]) -> list[Committed]:
        """Store each decision, unless its trace has one. Keep no tallies."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> Committed:
        digest, decision = self._records.get(verdict.trace_id, (verdict.digest, b""))
        if digest != verdict.digest:
            return TraceConflict(verdict.trace_id)
        if decision:
            return Decision.model_validate_json(decision)
        self._records[verdict.trace_id] = digest, verdict.decision
        if self._facts:
            self._facts.append(verdict.trace_id, verdict.domain, verdict.fact)
        return "stored"
