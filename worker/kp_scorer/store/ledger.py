"""What a ledger is, wherever it lies; and the one in memory, for scoring offline."""

from collections.abc import Sequence
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
    """How often a worker had begun to decide it and not come to an end."""


class Verdict(NamedTuple):
    """A decision to commit, as JSON, and the digest it was made for."""

    trace_id: str
    digest: bytes
    decision: bytes


class Standing(NamedTuple):
    """The decision that stands for a trace, as JSON, and whether it is the one just committed."""

    decision: bytes
    is_own: bool


class Ledger(Protocol):
    """The part of the ledger that deciding needs."""

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Read the records of traces about to be decided, in order, and open those that have none.

        Counts the attempt of a pending trace if it is the first, or if the trace is decided ``alone``: so that a worker's death
        is charged only to those it was deciding together.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def refund(self, trace_ids: Sequence[str]) -> None:
        """Take back the attempts of traces whose deciding ended in good order, if not in a decision.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def commit(self, verdicts: Sequence[Verdict]) -> list[Standing | None]:
        """Store each decision unless its trace has one: the first wins.

        Returns:
            For each verdict the decision that stands, or None if the id was taken by another digest.

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

    def refund(self, trace_ids: Sequence[str]) -> None:
        """Nothing to take back; see :class:`Ledger`."""

    def commit(self, verdicts: Sequence[Verdict]) -> list[Standing | None]:
        """Store decisions, the first wins; see :class:`Ledger`."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> Standing | None:
        record = self._records.get(verdict.trace_id)
        is_own = record is None or record.state == "pending"
        if record is None or is_own:
            record = self._records[verdict.trace_id] = Record("decided", verdict.digest, verdict.decision)
        return Standing(record.decision, is_own) if record.digest == verdict.digest else None
