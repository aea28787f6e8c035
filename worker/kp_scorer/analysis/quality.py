"""How good the gate is: precision and recall by the labels of a sample of all traces, with intervals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kp_scorer.analysis.calibration import Floats, Share, Z, counted_share, domain_of
from kp_scorer.decision import Decision

Booleans = np.ndarray[Any, np.dtype[np.bool_]]

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


def weighted_share(is_part: Booleans, probabilities: Floats) -> Share | None:
    """The share of a part in all traces, from those that were sampled by these probabilities; None if there are none.

    A ratio estimator, each trace weighing 1 / its probability. The interval is Wilson's where all are equal. Otherwise the
    distances of each probability's own interval add up by their squares (Zou, Huang and Zhang, 2009), with the variance that
    comes of not knowing how many traces each stands for. That counts where their shares differ by more than chance.
    """
    if not is_part.size:
        return None
    total = float((1 / probabilities).sum())
    share = float(is_part @ (1 / probabilities)) / total
    below = above = 0.0
    for probability in np.unique(probabilities):
        stratum = is_part[probabilities == probability]
        count, hits, weight = stratum.size, int(stratum.sum()), stratum.size / probability / total
        own = counted_share(hits, count)
        assert own, "a stratum has traces"
        smoothed = (hits + Z**2 / 2) / (count + Z**2)
        by_chance = (1 - weight) ** 2 * smoothed * (1 - smoothed) / count
        between = max((own.value - share) ** 2 - by_chance, 0.0) * (Z * weight) ** 2 / count
        below += (weight * (own.value - own.low)) ** 2 + between
        above += (weight * (own.high - own.value)) ** 2 + between
    return Share(share, max(share - math.sqrt(below), 0.0), min(share + math.sqrt(above), 1.0))
