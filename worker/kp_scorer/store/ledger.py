"""What a ledger is, wherever it lies; and the one in memory, for scoring offline."""

from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple, Protocol

from kp_scorer.errors import Reason

State = Literal["pending", "decided", "dead"]


class Identity(NamedTuple):
    """Which trace it is and what it says: its id and its 16-byte digest."""

    trace_id: str
    digest: bytes


class Record(NamedTuple):
    """What is known of a trace."""

    state: State
    digest: bytes
    """The 16-byte digest of what it says; empty where a dead letter could not be decoded."""
    decision: bytes = b""
    """Its decision as JSON; empty unless decided."""
    reason: Reason | None = None
    """Why it is dead; None if it is not."""
    detail: str = ""
    """What exactly it died of; empty if it did not."""
    attempts: int = 0
    """How many workers have ended while they decided it."""
    is_held: bool = False
    """Whether another worker, which is alive, is deciding it."""


class Tally(NamedTuple):
    """What a decision counts as, once it is stored."""

    domain: str
    is_known: bool
    """Whether settings name this domain. Of others, which producers may invent for ever, only so many are told apart."""
    outcomes: str = ""
    """What became of the trace, and what would have by the shadow's policy: ``accepted>rejected``; empty without a shadow."""


class Verdict(NamedTuple):
    """A decision to commit, as JSON, the digest it was made for, and the entry of the novelty log that it rests on."""

    trace_id: str
    digest: bytes
    decision: bytes
    entry: str
    """Empty without an embedder."""
    tally: Tally


class Standing(NamedTuple):
    """The decision that stands for a trace, as JSON, and whether it is the one just committed."""

    decision: bytes
    is_own: bool


class Death(NamedTuple):
    """Why a trace is dead, in place of a decision."""

    reason: Reason
    detail: str


class Refusal(Enum):
    """Why a decision was not stored and no other one stands."""

    CONFLICT = "conflict"
    """The trace's id was taken by another digest."""
    AGAIN = "again"
    """The trace has another place in the novelty log by now, and with it another novelty: decide it again."""


Committed = Standing | Death | Refusal


class Ledger(Protocol):
    """The part of the ledger that deciding needs."""

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Read the records of traces about to be decided, in order, and open those that have none.

        A trace that is pending is held by its worker from now on, until it is committed, buried or released: other workers are
        told so. An attempt is counted when its holder is known to be gone. A trace with attempts is held only by who decides it
        ``alone``, so that it takes no other trace along.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def release(self, trace_ids: Sequence[str]) -> None:
        """Hold traces no longer whose deciding ended in good order, if not in a decision.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def commit(self, verdicts: Sequence[Verdict], comparison: str = "") -> list[Committed]:
        """Store each decision unless its trace has ended: the first end stands.

        Args:
            verdicts: what to store.
            comparison: stands for the policies that the outcomes in their tallies are by; empty without a shadow.

        Returns:
            For each verdict the decision that stands, or why there is none.

        Raises:
            ServiceUnavailable: the ledger cannot be reached; committing again is safe.
        """
        ...


class MemoryLedger:
    """A ledger that lives as long as the process, and therefore knows of no attempt that did not end."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._records: dict[str, Record] = {}

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Read the records, or open them; see :class:`Ledger`."""
        return [self._records.setdefault(trace_id, Record("pending", digest)) for trace_id, digest in identities]

    def release(self, trace_ids: Sequence[str]) -> None:
        """Nothing is held; see :class:`Ledger`."""

    def commit(self, verdicts: Sequence[Verdict], comparison: str = "") -> list[Committed]:
        """Store decisions, the first wins, and count nothing; see :class:`Ledger`."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> Committed:
        record = self._records.get(verdict.trace_id)
        is_own = record is None or record.state == "pending"
        if record is None or is_own:
            record = self._records[verdict.trace_id] = Record("decided", verdict.digest, verdict.decision)
        return Standing(record.decision, is_own) if record.digest == verdict.digest else Refusal.CONFLICT
