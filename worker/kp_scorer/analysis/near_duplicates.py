"""Traces that say almost the same, in groups."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from kp_scorer.decision import Decision

NEAR: Final = 0.95
"""The similarity from which on two traces count as near duplicates."""


class Member(NamedTuple):
    """A trace of a group."""

    trace_id: str
    decision: Decision | None
    """None if it is known only as what another one repeats."""


class Group(NamedTuple):
    """Near duplicates, each of some other one in the group, in the order in which they came."""

    members: tuple[Member, ...]


def near_duplicates(decisions: Sequence[Decision], near: float = NEAR) -> list[Group]:
    """Group the traces whose nearest earlier one is at least as similar as ``near``, or has the same content.

    No trace is in two groups, and none is alone in one; the largest group comes first. Of a trace only its nearest earlier one
    is known, which is enough to find the group.
    """
    groups = _Groups()
    for decision in decisions:
        for other in _repeated(decision, near):
            groups.join(other, decision.trace_id)
    known = {decision.trace_id: decision for decision in decisions}
    found = [Group(tuple(Member(trace_id, known.get(trace_id)) for trace_id in ids)) for ids in groups.listed()]
    return sorted(found, key=lambda group: -len(group.members))


def _repeated(decision: Decision, near: float) -> list[str]:
    nearest, earliest = decision.novelty.nearest, decision.novelty.duplicate_of
    found = [nearest.trace_id] if nearest and nearest.similarity >= near else []
    return [*found, earliest] if earliest else found


class _Groups:
    """Which ids belong together: each leads to another one of its group, and in the end to the one that stands for it."""

    def __init__(self) -> None:
        self._next: dict[str, str] = {}

    def join(self, one: str, other: str) -> None:
        self._next.setdefault(one, one)
        self._next.setdefault(other, other)
        self._next[self._last(other)] = self._last(one)

    def listed(self) -> list[list[str]]:
        """The groups, and the ids in each, in the order in which they were first named."""
        found: dict[str, list[str]] = {}
        for each in self._next:
            found.setdefault(self._last(each), []).append(each)
        return [ids for ids in found.values() if len(ids) > 1]

    def _last(self, one: str) -> str:
        while (after := self._next[one]) != one:
            # The way gets shorter each time that it is gone.
            self._next[one] = self._next[after]
            one = after
        return one
