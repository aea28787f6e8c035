"""What is known of submitted traces, and when to look again for those that have not ended."""

import time
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kp_scorer.decision import Decision
from kp_scorer.errors import DecisionTimeout, Reason, TraceDead
from kp_scorer.store import Record, State

_POLL_FASTEST_S: Final = 0.01
_POLL_SLOWEST_S: Final = 0.25

LEAST_S: Final = 1.0
"""A look-up gets this much time, however little is left of a wait: an answer in good order takes a fraction of it."""


class Status(NamedTuple):
    """What is known of a submitted trace: its state, its decision if decided, reason and detail if dead."""

    trace_id: str
    state: State
    decision: Decision | None = None
    reason: Reason | None = None
    detail: str = ""


def status_of(trace_id: str, record: Record) -> Status:
    """What a trace's record says."""
    decision = Decision.model_validate_json(record.decision) if record.decision else None
    return Status(trace_id, record.state, decision, record.reason, record.detail)


def decision_of(trace_id: str, status: Status | None, timeout_s: float) -> Decision:
    """The decision that was waited for.

    Raises:
        DecisionTimeout: there is none within the time; it says whether the trace is known at all.
        TraceDead: none will come.
    """
    if status and status.reason is not None:
        raise TraceDead(trace_id, status.reason, status.detail)
    if status and status.decision is not None:
        return status.decision
    raise DecisionTimeout(trace_id, timeout_s, is_known=status is not None)


class Unsettled:
    """Traces that are waited for: which have not ended, and how long to pause before the next look. It waits for nothing."""

    def __init__(self, trace_ids: Iterable[str], timeout_s: float, answer_s: float) -> None:
        """Begin to wait for ``timeout_s``; a look-up may take ``answer_s`` of it."""
        self.trace_ids = list(dict.fromkeys(trace_ids))
        """Those that have not ended."""
        self.pause_s = _POLL_FASTEST_S
        """How long to wait before the next look."""
        self._deadline = time.monotonic() + timeout_s
        self._answer_s = answer_s

    def look_up_s(self) -> float:
        """How long the next look-up may take."""
        return min(max(self._left_s(), LEAST_S), self._answer_s)

    def settle(self, found: Sequence[Status | None]) -> list[Status]:
        """Take note of what was looked up; return those that have ended."""
        settled = [status for status in found if status and status.state != "pending"]
        ended = {status.trace_id for status in settled}
        self.trace_ids = [trace_id for trace_id in self.trace_ids if trace_id not in ended]
        self.pause_s = _POLL_FASTEST_S if settled else min(self.pause_s * 1.5, _POLL_SLOWEST_S)
        return settled

    def is_over(self) -> bool:
        """Whether there is nothing more to wait for, or no time; otherwise pause, and look again."""
        left_s = self._left_s()
        self.pause_s = min(self.pause_s, max(left_s, 0.0))
        return not self.trace_ids or left_s <= 0

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()
