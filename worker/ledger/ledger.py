"""What a ledger is, wherever it lies; and the one in memory, for scoring offline."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

State = Literal["pending", "decided", "dead"]


class Record(NamedTuple):
    """What is known of a trace."""

    state: State
    content: bytes
    """Its 16-byte content digest; empty where a dead letter could not be decoded."""
    decision: bytes = b""
    """Its decision as JSON; empty unless decided."""
    reason: str = ""
    """Why it is dead; empty otherwise."""
    attempts: int = 0
    """How often a worker had begun to decide it and not come to an end."""


class Opening(NamedTuple):
    """A trace about to be decided: its id and 16-byte content digest."""

    trace_id: str
    content: bytes


class Verdict(NamedTuple):
    """A decision to commit, as JSON, and the content digest it was made for."""

    trace_id: str
    content: bytes
    decision: bytes


class Ledger(Protocol):
    """The part of the ledger that deciding needs."""

    def begin(self, openings: Sequence[Opening], *, alone: bool = False) -> list[Record]:
        """Read the records of traces about to be decided, in order, and open those that have none.

        Counts the attempt of a pending trace if it is the first, or if the trace is decided ``alone``: so that a worker's death
        is charged only to those it was deciding together.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        ...

    def absolve(self, trace_ids: Sequence[str]) -> None:
        """Forget the attempts of traces whose deciding ended in good order, if not in a decision.

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
    """A ledger that lives as long as the process, and therefore knows of no attempt that did not end."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._records: dict[str, Record] = {}

    def begin(self, openings: Sequence[Opening], *, alone: bool = False) -> list[Record]:
        """Read the records, or open them; see :class:`Ledger`."""
        return [self._records.setdefault(trace_id, Record("pending", content)) for trace_id, content in openings]

    def absolve(self, trace_ids: Sequence[str]) -> None:
        """Nothing to forget; see :class:`Ledger`."""

    def commit(self, verdicts: Sequence[Verdict]) -> list[bytes | None]:
        """Store decisions, the first wins; see :class:`Ledger`."""
        return [self._commit(verdict) for verdict in verdicts]

    def _commit(self, verdict: Verdict) -> bytes | None:
        record = self._records.get(verdict.trace_id)
        if record is None or record.state == "pending":
            record = self._records[verdict.trace_id] = Record("decided", verdict.content, verdict.decision)
        return record.decision if record.content == verdict.content else None
