"""Decisions beside what another policy makes of them, and how many flip."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from kp_scorer.decision import Decision
from kp_scorer.scoring import Policy, decide_again


class Redecided(NamedTuple):
    """A decision as it was made, and as another policy makes it."""

    before: Decision
    after: Decision

    @property
    def is_flip(self) -> bool:
        """Whether the outcome changes."""
        return self.before.outcome != self.after.outcome

    @property
    def is_weighed_otherwise(self) -> bool:
        """Whether the weights change, and with them the score, whatever the threshold."""
        return self.before.weights != self.after.weights


@dataclass(frozen=True, slots=True)
class Flips:
    """How many traces there are, how many are accepted, and how many flip to each outcome."""

    traces: int = 0
    accepted_before: int = 0
    accepted_after: int = 0
    to_accepted: int = 0
    to_review: int = 0
    to_rejected: int = 0

    @property
    def total(self) -> int:
        """How many flip."""
        return self.to_accepted + self.to_review + self.to_rejected

    @property
    def from_accepted(self) -> int:
        """How many that were accepted flip."""
        return self.accepted_before + self.to_accepted - self.accepted_after

    @property
    def by_acceptance(self) -> tuple[int, int, int]:
        """How many flip to accepted, how many from there, and how many between review and rejected."""
        return self.to_accepted, self.from_accepted, self.total - self.to_accepted - self.from_accepted

    def __add__(self, other: "Flips") -> "Flips":
        return Flips(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


def redecided(decisions: Iterable[Decision], policy: Policy) -> list[Redecided]:
    """Decide each again by another policy, in order. The decisions themselves stay as they are."""
    return [Redecided(decision, decide_again(decision, policy)) for decision in decisions]


def flips_of(pairs: Sequence[Redecided]) -> Flips:
    """Count the flips."""
    to = Counter(pair.after.outcome for pair in pairs if pair.is_flip)
    return Flips(
        traces=len(pairs),
        accepted_before=sum(pair.before.outcome == "accepted" for pair in pairs),
        accepted_after=sum(pair.after.outcome == "accepted" for pair in pairs),
        to_accepted=to["accepted"],
        to_review=to["review"],
        to_rejected=to["rejected"],
    )


def flips_by_domain(pairs: Iterable[Redecided]) -> dict[str, Flips]:
    """Count the flips of each domain; domains in the order of their names."""
    found: dict[str, list[Redecided]] = {}
    for pair in pairs:
        found.setdefault(pair.before.domain, []).append(pair)
    return {domain: flips_of(of_domain) for domain, of_domain in sorted(found.items())}
