"""How good the gate is: precision and recall by the labels of a sample of all traces, with intervals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision
from kp_scorer.report.calibration import domain_of
from kp_scorer.report.intervals import Booleans, Floats, Share, weighted_share

LEAST_LABELS: Final = 50
"""So many labels stand for a domain by themselves: from there on ``tests.benchmarks.quality`` checks the intervals."""


class Estimate(NamedTuple):
    """How good a threshold is, or without one the gate; each share is None where it would be one of no traces.

    It accepts so many of all traces. Precision is the share of good ones among these, recall that of these among the good.
    """

    threshold: float | None
    accepted: Share | None
    precision: Share | None
    recall: Share | None


class Judged(NamedTuple):
    """Labelled traces, in arrays of shape (traces,); no threshold accepts a score of -inf; probabilities are above 0."""

    scores: Floats
    accepted: Booleans
    good: Booleans
    probabilities: Floats

    def estimate(self, threshold: float | None = None) -> Estimate:
        """Estimate how good a threshold is; without one the gate as it decided."""
        good, weighing = self.good, self.probabilities
        accepted = self.accepted if threshold is None else self.scores >= threshold
        precision, recall = (
            weighted_share(part[among], weighing[among]) for part, among in ((good, accepted), (accepted, good))
        )
        return Estimate(threshold, weighted_share(accepted, weighing), precision, recall)


class Quality(NamedTuple):
    """How good the gate is for a domain, or for several together."""

    domains: tuple[str, ...]
    labels: int
    estimates: tuple[Estimate, ...]
    """The gate's, then that of each threshold, in steps of 0.05, with labelled traces on both sides."""


def qualities(decisions: Iterable[tuple[Decision, bool | None]], aliases: Mapping[str, str]) -> list[Quality]:
    """Estimate how good the gate is by the sampled decisions that have a label: for all domains, then by domain.

    Domains with fewer than 50 labels are together, as the last. Empty if no sampled decision has a label.
    """
    rows: defaultdict[str, list[tuple[float, bool, bool, float]]] = defaultdict(list)
    for decision, is_good in decisions:
        if decision.sampled and is_good is not None:
            is_accepted = decision.outcome == "accepted"
            is_barred = decision.is_guarded or (decision.score >= decision.threshold and not is_accepted)
            score = -math.inf if is_barred else decision.score
            rows[domain_of(decision, aliases)].append((score, is_accepted, is_good, decision.sampled))
    ordered = sorted(rows, key=lambda domain: (-len(rows[domain]), domain))
    large = [(domain,) for domain in ordered if len(rows[domain]) >= LEAST_LABELS]
    groups = filter(None, dict.fromkeys([tuple(ordered), *large, tuple(ordered[len(large) :])]))
    return [_quality(group, [row for domain in group for row in rows[domain]]) for group in groups]


def _quality(domains: tuple[str, ...], rows: Sequence[tuple[float, bool, bool, float]]) -> Quality:
    judged = Judged(*map(np.array, zip(*rows, strict=True)))
    # What is barred is accepted by no threshold.
    scores = judged.scores[np.isfinite(judged.scores)]
    tried = (step / 20 for step in range(21) if scores.size and scores.min() < step / 20 <= scores.max())
    return Quality(domains, len(rows), (judged.estimate(), *map(judged.estimate, tried)))
