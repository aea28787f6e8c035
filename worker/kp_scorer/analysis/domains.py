"""Decisions by domain: the largest domains each by itself, all others together, as anybody may send any number of domains."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple

from kp_scorer.decision import Decision

MOST_DOMAINS: Final = 7


class Domain(NamedTuple):
    """The decisions of a domain, in the order in which they came; or those of all smaller ones."""

    name: str
    """Its name, as traces gave it; the smaller ones have none."""
    decisions: Sequence[Decision]
    smaller: int = 0
    """How many smaller domains these are; 0 for a domain by itself."""


def by_domain(decisions: Sequence[Decision], most: int = MOST_DOMAINS) -> list[Domain]:
    """Part decisions by domain, the largest first; from ``most`` domains on, the smaller ones are the last part together."""
    found: defaultdict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        found[decision.domain].append(decision)
    ordered = sorted(found, key=lambda name: (-len(found[name]), name))
    # A single one that is left is better shown by its name.
    alone = ordered if len(ordered) <= most + 1 else ordered[:most]
    rest = set(ordered[len(alone) :])
    domains = [Domain(name, found[name]) for name in alone]
    return [*domains, Domain("", [each for each in decisions if each.domain in rest], len(rest))] if rest else domains
