"""The status of submitted traces, and when to poll those that are still pending."""

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kp_scorer.decision import Decision
from kp_scorer.errors import DecisionTimeout, Reason, TraceDead
from kp_scorer.ledger.records import Record, TraceState

_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25

LEAST_S: Final = 1.0
"""A look-up gets this much time, however little is left of a wait: a healthy server needs a fraction of it."""


class Status(NamedTuple):
    """The status of a submitted trace: its state, its decision if decided, reason and detail if dead."""

    trace_id: str
    state: TraceState
    decision: Decision | None = None
    reason: Reason | None = None
    detail: str = ""


def status_of(trace_id: str, record: Record) -> Status:
    """The status that a trace's record holds."""
    return Status(trace_id, record.state, record.decision, record.reason, record.detail)


def decision_of(trace_id: str, status: Status | None, timeout_s: float) -> Decision:
    """The decision that a caller waited for."""
    if status and status.reason is not None:
        raise TraceDead(trace_id, status.reason, status.detail)
    if status and status.decision is not None:
        return status.decision
    raise DecisionTimeout(trace_id, timeout_s, is_known=status is not None)


class Polling:
    """Which traces a caller waits for, until when, and how long to pause between look-ups. It does no I/O and never sleeps."""

    def __init__(self, trace_ids: Iterable[str], timeout_s: float, answer_s: float) -> None:
        """Begin to wait for ``timeout_s``; a look-up may take ``answer_s`` of it."""
        self.pending = list(dict.fromkeys(trace_ids))  # The traces that are neither decided nor dead.
        self.pause_s = _POLL_FASTEST_S
        self._deadline = time.monotonic() + timeout_s
        self._answer_s = answer_s

    def look_up_s(self) -> float:
        """How long the next look-up may take."""
        return min(max(self._deadline - time.monotonic(), LEAST_S), self._answer_s)

    def update(self, statuses: Sequence[Status | None]) -> list[Status]:
        """Remove the traces that a look-up shows as decided or dead from the pending ones; return them, and set the pause."""
        completed = [status for status in statuses if status and status.state != "pending"]
        completed_ids = {status.trace_id for status in completed}
        self.pending = [trace_id for trace_id in self.pending if trace_id not in completed_ids]
        slower_s = _POLL_FASTEST_S if completed else min(self.pause_s * 1.5, _POLL_SLOWEST_S)
        self.pause_s = min(slower_s, max(self._deadline - time.monotonic(), 0.0))
        return completed

    def is_over(self) -> bool:
        """Whether nothing is pending any more, or the time is up."""
        return not self.pending or time.monotonic() >= self._deadline
