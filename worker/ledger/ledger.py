"""What a ledger is, wherever it lies; and the one in memory, for scoring offline."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

State = Literal["pending", "decided", "dead"]


class Record(NamedTuple):
    """What is known of a trace."""

    state: State
    content: bytes
    """Its 16-byte content digest; empty where a dead letter could not be decoded."""
    decision: bytes
    """Its decision as JSON; empty unless decided."""
    reason: str
    """Why it is dead; empty otherwise."""


class Verdict(NamedTuple):
    """A decision to commit, as JSON, and the content digest it was made for."""

    trace_id: str
    content: bytes
    decision: bytes


class Ledger(Protocol):
    """The part of the ledger that deciding needs."""

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Read the records, in order; None where nothing is known.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def commit(self, verdicts: Sequence[Verdict]) -> list[bytes | None]:
        """Store each decision unless its trace has one: the first wins.

        Returns:
            For each verdict the decision that stands, or None if the id was taken by other content.

        Raises:
            ServiceUnavailable: the ledger cannot be reached; committing again is safe.
        """
        ...


class MemoryLedger:
    """A ledger that lives as long as the process."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._records: dict[str, Record] = {}

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Read the records; see :class:`Ledger`."""
        return [self._records.get(trace_id) for trace_id in trace_ids]

    def commit(self, verdicts: Sequence[Verdict]) -> list[bytes | None]:
        """Store decisions, the first wins; see :class:`Ledger`."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> bytes | None:
        record = self._records.setdefault(verdict.trace_id, Record("decided", verdict.content, verdict.decision, ""))
        return record.decision if record.content == verdict.content else None
