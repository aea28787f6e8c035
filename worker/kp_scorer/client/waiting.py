"""The status of a submitted trace, and how long a call waits for an answer or a decision."""

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kp_scorer.decision import Decision
from kp_scorer.errors import DecisionTimeout, Reason, ServiceUnavailable, TraceDead
from kp_scorer.store.records import TraceState

_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25
LEAST_S: Final = 1.0  # The least time for a look-up, however little is left of a wait: a healthy server needs a fraction of it.


class Status(NamedTuple):
    """The status of a submitted trace."""

    trace_id: str
    state: TraceState
    """``pending``, ``decided`` or ``dead``."""
    decision: Decision | None = None
    """None until the trace is decided."""
    reason: Reason | None = None
    """None unless the trace is dead."""
    detail: str = ""
    """Names the fields or the cause if the trace is dead."""


def decision_of(trace_id: str, status: Status | None, timeout_s: float) -> Decision:
    """Return the decision in a status, or raise the error that says why there is none."""
    if status and status.reason is not None:
        raise TraceDead(trace_id, status.reason, status.detail)
    if status and status.decision is not None:
        return status.decision
    raise DecisionTimeout(trace_id, timeout_s, is_known=status is not None)


class Polling:
    """The traces that a caller waits for, the deadline, and the pause between look-ups. It does no I/O and never sleeps."""

    def __init__(self, trace_ids: Iterable[str], timeout_s: float, answer_s: float) -> None:
        """Wait for ``timeout_s`` from now on; a look-up may take ``answer_s`` of it."""
        self.pending = list(dict.fromkeys(trace_ids))  # The traces that are neither decided nor dead.
        self.pause_s = _POLL_FASTEST_S
        self._deadline = time.monotonic() + timeout_s
        self._answer_s = answer_s

    def look_up_s(self) -> float:
        """Return the seconds that the next look-up may take."""
        return min(max(self._deadline - time.monotonic(), LEAST_S), self._answer_s)

    def update(self, statuses: Sequence[Status | None]) -> list[Status]:
        """Remove from the pending traces those that a look-up shows as decided or dead, and return them; set the pause."""
        completed = [status for status in statuses if status and status.state != "pending"]
        completed_ids = {status.trace_id for status in completed}
        self.pending = [trace_id for trace_id in self.pending if trace_id not in completed_ids]
        slower_s = _POLL_FASTEST_S if completed else min(self.pause_s * 1.5, _POLL_SLOWEST_S)
        self.pause_s = min(slower_s, max(self._deadline - time.monotonic(), 0.0))
        return completed

    def is_over(self) -> bool:
        """Return whether nothing is pending any more, or the time is up."""
        return not self.pending or time.monotonic() >= self._deadline


class Deadline:
    """The time that a call may still wait: what is left of its timeout or, without one, the whole limit for each answer."""

    def __init__(self, timeout_s: float | None, answer_s: float, too_late: str) -> None:
        """Wait for ``timeout_s`` in all, or for ``answer_s`` each time.

        ``too_late`` is the text of the error, with a placeholder for the limit.
        """
        self._limit_s = answer_s if timeout_s is None else timeout_s
        self._ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        self.error = ServiceUnavailable(too_late.format(self._limit_s))

    def left_s(self) -> float:
        """Return the seconds that the call may wait for its next answer."""
        return self._limit_s if self._ends_at is None else max(self._ends_at - time.monotonic(), 0.0)
