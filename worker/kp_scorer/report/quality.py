"""Estimates the quality of the gate: its precision and recall, by the labels of a sample of all traces, with intervals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision
from kp_scorer.report.calibration import domain_of
from kp_scorer.report.intervals import Booleans, Floats, Share, weighted_share

LEAST_LABELS: Final = 50  # A domain with fewer has no estimate of its own. Tests verify that intervals hold from here on.


class Estimate(NamedTuple):
    """The quality of a threshold, or of the gate if there is none. A share of no traces is None.

    Precision is the share of good traces among the accepted ones, recall that of accepted traces among the good ones.
    """

    threshold: float | None
    accepted: Share | None
    precision: Share | None
    recall: Share | None


class Judged(NamedTuple):
    """Labelled traces, in arrays of shape (traces,). No threshold accepts a score of -inf. Probabilities are above 0."""

    scores: Floats
    accepted: Booleans
    good: Booleans
    probabilities: Floats

    def estimate(self, threshold: float | None = None) -> Estimate:
        """Estimate the quality of a threshold; without one, that of the gate as it decided."""
        good, weighing = self.good, self.probabilities
        accepted = self.accepted if threshold is None else self.scores >= threshold
        precision, recall = (
            weighted_share(part[among], weighing[among]) for part, among in ((good, accepted), (accepted, good))
        )
        return Estimate(threshold, weighted_share(accepted, weighing), precision, recall)


class Quality(NamedTuple):
    """The quality of the gate for a domain, or for several together."""

    domains: tuple[str, ...]
    labels: int
    estimates: tuple[Estimate, ...]
    """The estimate of the gate, then one for each threshold in steps of 0.05 that has labelled traces on both sides."""


def qualities(
    decisions: Iterable[tuple[Decision, bool | None]], aliases: Mapping[str, str], *, are_all: bool = False
) -> list[Quality]:
    """Estimate the quality of the gate by the sampled decisions with a label: for all domains together, then by domain.

    Domains with fewer than 50 labels are estimated together, last. Without any sampled and labelled decision the list is empty.
    With ``are_all``, all labelled decisions count, sampled or not, and each weighs the same.
    """
    rows: defaultdict[str, list[tuple[float, bool, bool, float]]] = defaultdict(list)
    for decision, is_good in decisions:
        probability = 1.0 if are_all else decision.sampled
        if probability and is_good is not None:
            score = -math.inf if decision.is_guarded else decision.score
            rows[domain_of(decision, aliases)].append((score, decision.outcome == "accepted", is_good, probability))
    ordered = sorted(rows, key=lambda domain: (-len(rows[domain]), domain))
    large = [(domain,) for domain in ordered if len(rows[domain]) >= LEAST_LABELS]
    groups = filter(None, dict.fromkeys([tuple(ordered), *large, tuple(ordered[len(large) :])]))
    return [_quality(group, [row for domain in group for row in rows[domain]]) for group in groups]


def _quality(domains: tuple[str, ...], rows: Sequence[tuple[float, bool, bool, float]]) -> Quality:
    judged = Judged(*map(np.array, zip(*rows, strict=True)))
    # No threshold accepts a guarded trace.
    scores = judged.scores[np.isfinite(judged.scores)]
    tried = (step / 20 for step in range(21) if scores.size and scores.min() < step / 20 <= scores.max())
    return Quality(domains, len(rows), (judged.estimate(), *map(judged.estimate, tried)))
