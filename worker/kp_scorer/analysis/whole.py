"""All that a report says, from the decisions that it is about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kp_scorer.analysis.acceptance import accepted_at
from kp_scorer.analysis.closest_calls import ClosestCalls, closest_calls
from kp_scorer.analysis.distribution import Distribution, distribution
from kp_scorer.analysis.domains import Domain, by_domain
from kp_scorer.analysis.flips import Flips, flips_of, redecided
from kp_scorer.analysis.near_duplicates import Group, near_duplicates
from kp_scorer.analysis.novelty_course import Course, novelty_course
from kp_scorer.analysis.overrides import overrides_of
from kp_scorer.analysis.scores import Scores, scores_of
from kp_scorer.analysis.tempo import Latency, Throughput, latencies, throughput
from kp_scorer.decision import Decision, Dimensions, Override
from kp_scorer.scoring import Policy

DIMENSIONS: Final = tuple(Dimensions.model_fields)


@dataclass(frozen=True, slots=True)
class OfDomain:
    """What is said of a domain, or of all."""

    domain: Domain
    scores: Scores
    accepted_at: tuple[int, ...]
    """How many traces each threshold would accept."""
    overrides: Mapping[Override, int]
    flips: Flips
    """How many flip by the shadow policy; none without one."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """What the decisions say, altogether and by domain."""

    total: OfDomain
    domains: Sequence[OfDomain]
    dimensions: Mapping[str, Distribution]
    novelty: Course
    groups: Sequence[Group]
    """Near duplicates."""
    closest: ClosestCalls
    letters: Mapping[str, int]
    """How many dead letters there are of each reason."""
    throughput: Throughput | None
    latencies: Sequence[Latency]
    has_shadow: bool


def analyse(decisions: Sequence[Decision], letters: Mapping[str, int], shadow: Policy | None) -> Analysis:
    """Analyse decisions, of which there must be one at least, in the order of their traces.

    ``letters`` is how many dead letters there are of each reason; ``shadow`` a policy to compare theirs with.
    """
    return Analysis(
        total=_of(Domain("", decisions), shadow),
        domains=[_of(domain, shadow) for domain in by_domain(decisions)],
        dimensions={name: distribution([getattr(each.dimensions, name) for each in decisions]) for name in DIMENSIONS},
        novelty=novelty_course(decisions),
        groups=near_duplicates(decisions),
        closest=closest_calls(decisions),
        letters=letters,
        throughput=throughput(decisions),
        latencies=latencies(decisions),
        has_shadow=shadow is not None,
    )


def _of(domain: Domain, shadow: Policy | None) -> OfDomain:
    return OfDomain(
        domain=domain,
        scores=scores_of(domain),
        accepted_at=accepted_at([decision.score for decision in domain.decisions]),
        overrides=overrides_of(domain),
        flips=flips_of(redecided(domain.decisions, shadow)) if shadow else Flips(),
    )
