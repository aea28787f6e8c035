"""Thresholds by domain for a target, with intervals."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kp_scorer.decision import Decision
from kp_scorer.errors import SettingsError
from kp_scorer.report.intervals import Floats, Share, Z, counted_share
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.sections import ScoringSettings

Integers = np.ndarray[Any, np.dtype[np.integer]]

BAD: Final = 0  # The label of a trace, as the next two are.
GOOD: Final = 1
UNLABELLED: Final = 2
_LABELS: Final = 3

_WIDEST: Final = 0.1  # An interval wider than this, either way, is worth nothing.
_WIDEST_PRECISION: Final = 0.15  # The same of a precision, which is of the accepted traces alone.
_FEWEST: Final = 10  # The fewest traces on one side of a threshold that show where it lies.
_FEWEST_ACCEPTED: Final = 20
_STEPS: Final = 10_000
_COARSE: Final = 10  # So many steps are one of three decimals.
_SAME: Final = 1e-9  # Scores that differ by less are equal: they were summed in another order.
_GUARDED: Final = -1  # In place of the score of what a guard rejects.
_ROUNDING: Final = 1e-12
_RESAMPLE_SEED: Final = 1
_FAR: Final = 0.05  # So far from the share that was asked for, a threshold is not what was asked for.
_RESAMPLES: Final = 1_000
_PERCENTILES: Final = (2.5, 97.5)


class Target(NamedTuple):
    """A share, between 0 and 1, and what it is a share of."""

    of: Literal["accept", "precision"]
    """``accept``: of the traces, those that are accepted. ``precision``: of the accepted traces, those that are good."""
    share: float

    @property
    def percents(self) -> str:
        """The share as people write it."""
        return f"{100 * self.share:.6g}%"

    def traces_for(self, either_way: float) -> int:
        """How many traces it takes to come within ``either_way`` of the share in 19 of 20 cases."""
        return math.ceil(self.share * (1 - self.share) * (Z / either_way) ** 2)

    @property
    def least_traces(self) -> int:
        """The fewest traces, for a precision those with labels, that allow a suggestion."""
        return max(self.traces_for(_WIDEST), math.ceil(_FEWEST / min(self.share, 1 - self.share) - _SAME))

    @property
    def least_accepted(self) -> int:
        """The fewest accepted traces with labels that have a precision."""
        return max(self.traces_for(_WIDEST_PRECISION), _FEWEST_ACCEPTED)


class Sample(NamedTuple):
    """Scores, 0..1, or -inf of what a guard rejects, labels, and how many traces have both; all of shape (values,)."""

    scores: Floats
    labels: Integers
    counts: Integers

    @property
    def traces(self) -> int:
        """How many traces these are."""
        return int(self.counts.sum())

    @property
    def labelled(self) -> int:
        """How many of them have a label."""
        return int(self.counts[self.labels != UNLABELLED].sum())

    def is_too_small(self, target: Target) -> bool:
        """Whether so few traces allow no suggestion."""
        return (self.traces if target.of == "accept" else self.labelled) < target.least_traces


class Suggestion(NamedTuple):
    """A threshold, and its expected effect on traces of the same kind."""

    threshold: float
    low: float  # 19 of 20 samples of as many traces lead to a threshold between this and ``high``.
    high: float
    accepted: Share
    precision: Share | None  # None where no accepted trace has a label.


class Cohort(NamedTuple):
    """Traces that get one threshold: those of a domain, or of several domains together."""

    traces: int
    suggestion: Suggestion | None = None
    lack: Literal["too_few", "out_of_reach", "too_alike"] | None = None
    """Why there is no suggestion: too few traces; no threshold has the precision or, as guards reject some, the share; or the
    scores are so alike that all thresholds accept far more or far fewer."""
    nearest: tuple[float, float] = (0.0, 1.0)  # Which shares the thresholds on both sides of the target accept, if too alike.


class Calibration(NamedTuple):
    """Suggested thresholds."""

    domains: Mapping[str, Cohort]  # Every domain, in the order of their names.
    other_domains: Cohort
    """For all other domains: of those with too few traces that keep no threshold, or of all if these are still too few."""
    other_domains_are_all: bool


def calibrate(
    decisions: Collection[Decision],
    *,
    accept: float | None = None,
    precision: float | None = None,
    good: Mapping[str, bool] = MappingProxyType({}),
    settings: Settings | None = None,
) -> Settings:
    """Suggest thresholds by domain, as `kp-scorer calibrate` does, and return the settings with them.

    The share to reach, 0..1, is either of a domain's traces, which to ``accept``, or of the accepted ones, which are to be
    ``good`` by their ids (``precision``). Domains with too few decisions keep what applies to them.

    Raises:
        ValueError: there is not one target, or it is no such share.
        SettingsError: a setting is wrong, or a review is above its new threshold.
    """
    settings = settings or load_settings()
    target = Target("precision", precision or 0.0) if accept is None else Target("accept", accept)
    if None not in (accept, precision) or not 0 < target.share < 1:
        raise ValueError("expected either accept or precision, a share between 0 and 1")
    samples = samples_of(((decision, good.get(decision.trace_id)) for decision in decisions), settings.scoring.aliases)
    scoring = with_thresholds(calibrate_samples(samples, target, settings.scoring.thresholds), settings.scoring)
    if clashes := list(scoring.reviews_above()):
        raise SettingsError("; ".join(f"scoring.{clash}" for clash in clashes))
    return settings.model_copy(update={"scoring": scoring})


def re_decide(decisions: Iterable[Decision], settings: Settings | None = None) -> list[Decision]:
    """Decide again by the thresholds, weights, guards on novelty and aliases of other settings; nothing is embedded or stored.

    What depends on the traces stays as it was decided: ``scoring.cap_step_term`` and ``scoring.max_confidence`` change nothing.
    """
    policy = (settings or load_settings()).scoring
    return [decide_again(decision, policy) for decision in decisions]


def domain_of(decision: Decision, aliases: Mapping[str, str]) -> str:
    """The domain whose threshold applies to a decision.

    The alias that it was made by applies only where ``aliases`` has no other.
    """
    decided_as = decision.taken_for or decision.domain
    return aliases.get(decision.domain) or aliases.get(decided_as, decided_as)


def samples_of(decisions: Iterable[tuple[Decision, bool | None]], aliases: Mapping[str, str]) -> dict[str, Sample]:
    """The scores of decisions, each with its label, by the domain whose threshold applies to them.

    Labels count of sampled traces alone, if any of these has one: what else people label is what they come to see, the accepted
    traces above all. Scores are as fine as thresholds can be, so that those of any number of decisions take bounded memory.
    """
    counts: defaultdict[str, Counter[tuple[int, int, bool]]] = defaultdict(Counter)
    has_labelled_sample = False
    for decision, is_good in decisions:
        place = _GUARDED if decision.is_guarded else _half_steps(decision.score)
        label = UNLABELLED if is_good is None else GOOD if is_good else BAD
        is_sampled = decision.sampled is not None
        has_labelled_sample |= is_sampled and label != UNLABELLED
        counts[domain_of(decision, aliases)][place, label, is_sampled] += 1
    return {domain: _sample(of_domain, only_sampled=has_labelled_sample) for domain, of_domain in counts.items()}


def _half_steps(score: float) -> int:
    """A score in half steps: even on a step, odd between two, where no threshold separates it from others."""
    steps = round(score * _STEPS)
    return 2 * steps if abs(score - steps / _STEPS) < _SAME else 2 * math.floor(score * _STEPS) + 1


def _sample(counts: Counter[tuple[int, int, bool]], *, only_sampled: bool) -> Sample:
    places, labels, is_sampled = np.array(list(counts)).T
    if only_sampled:
        labels = np.where(is_sampled, labels, UNLABELLED)
    return Sample(np.where(places == _GUARDED, -np.inf, places / (2 * _STEPS)), labels, np.array(list(counts.values())))


def calibrate_samples(samples: Mapping[str, Sample], target: Target, with_own_threshold: Collection[str] = ()) -> Calibration:
    """Suggest a threshold for each domain with enough traces, and one for the rest; there is at least one domain.

    Domains in ``with_own_threshold`` keep their threshold if they have too few traces; these traces then have no part in the
    threshold of the other domains.
    """
    samples = dict(sorted(samples.items()))
    few = [sample for domain, sample in samples.items() if domain not in with_own_threshold and sample.is_too_small(target)]
    are_all = not few or _joined(few).is_too_small(target)
    return Calibration(
        {domain: _cohort(sample, target) for domain, sample in samples.items()},
        _cohort(_joined(samples.values() if are_all else few), target),
        are_all,
    )


def _joined(samples: Iterable[Sample]) -> Sample:
    return Sample(*map(np.concatenate, zip(*samples, strict=True)))


def _cohort(sample: Sample, target: Target) -> Cohort:
    if sample.is_too_small(target):
        return Cohort(sample.traces, lack="too_few")
    suggestion = suggest(sample, target)
    if suggestion and target.of == "accept" and _misses(suggestion.accepted, target.share):
        shares = _accepted_share(_above(_tally(sample, target)[1]))[1:]
        fewer = float(shares[shares < target.share].max(initial=0.0))
        return Cohort(sample.traces, None, "too_alike", (fewer, float(shares[shares > target.share].min())))
    return Cohort(sample.traces, suggestion, None if suggestion else "out_of_reach")


def _misses(accepted: Share, wanted: float) -> bool:
    return not accepted.low <= wanted <= accepted.high and abs(accepted.value - wanted) > _FAR


def with_thresholds(calibration: Calibration, scoring: ScoringSettings) -> ScoringSettings:
    """The settings with the suggested thresholds, where there is a suggestion; a review may be above its own."""
    domains = dict(scoring.thresholds)
    for domain, cohort in calibration.domains.items():
        if cohort.suggestion:
            domains[domain] = cohort.suggestion.threshold
        elif cohort.lack in ("out_of_reach", "too_alike"):
            # That of the rest would miss the target, too.
            domains.setdefault(domain, scoring.threshold)
    fallback = calibration.other_domains.suggestion
    threshold = fallback.threshold if fallback else scoring.threshold
    return scoring.model_copy(update={"threshold": threshold, "thresholds": dict(sorted(domains.items()))})


def suggest(sample: Sample, target: Target) -> Suggestion | None:
    """Suggest a threshold for a sample that has enough traces; None if there is none that reaches the target.

    The intervals come from choosing anew in 1,000 resamples: how a choice differs between its own resample and the sample is
    how the suggestion differs between the sample and unseen traces. The same sample gets the same intervals.
    """
    thresholds, traces = _tally(sample, target)
    accepted = _above(traces)
    index, is_reached = _choose(accepted, target)
    if not is_reached:
        return None
    chosen, shares, precisions = _resampled(traces, accepted, target)
    low, high = np.percentile(thresholds[chosen], _PERCENTILES)
    bad, good, _ = map(int, accepted[index])
    counted = counted_share(good, good + bad)
    if counted:
        # Where all are good, so are those of every resample, which would make it certain.
        resampled = _around(counted.value, precisions)
        counted = Share(counted.value, min(resampled.low, counted.low), max(resampled.high, counted.high))
    share = _around(float(_accepted_share(accepted)[index]), shares)
    return Suggestion(float(thresholds[index]), float(low), float(high), share, counted)


def _around(value: float, off: Floats) -> Share:
    low, high = np.nanpercentile(off, _PERCENTILES)
    return Share(value, max(value + float(low), 0.0), min(value + float(high), 1.0))


def _resampled(traces: Integers, accepted: Integers, target: Target) -> tuple[Integers, Floats, Floats]:
    """Choose in resamples; return the choices, and how much more share and precision each has in the sample than there."""
    flat, rng = traces.reshape(-1), np.random.default_rng(_RESAMPLE_SEED)
    filled = np.flatnonzero(flat)
    drawn, total = np.zeros_like(flat), flat.sum()
    share, precision = _accepted_share(accepted), _precision(accepted)
    rounds = []
    for _ in range(_RESAMPLES):
        drawn[filled] = rng.multinomial(total, flat[filled] / total)
        resampled = _above(drawn.reshape(traces.shape))
        index, _ = _choose(resampled, target)
        more_share = share[index] - _accepted_share(resampled)[index]
        rounds.append((index, more_share, precision[index] - _precision(resampled)[index]))
    chosen, shares, precisions = map(np.array, zip(*rounds, strict=True))
    return chosen, shares, precisions


def cuts(scores: Floats) -> Floats:
    """The thresholds that separate scores (0..1), ascending from 0, of shape (cuts,).

    Each accepts fewer than the one before, and at least the highest score. Between two scores more than one step apart there is
    exactly one, in the middle, so that the last bits of another engine stay on the same side. Scores with no step between them
    are always accepted together.
    """
    ordered, grid = np.sort(scores), np.arange(_STEPS + 1) / _STEPS
    rejected = np.searchsorted(ordered, grid - _SAME)
    hits_none = rejected == np.searchsorted(ordered, grid + _SAME)
    steps = np.flatnonzero(hits_none & (rejected > 0) & (rejected < len(scores)))
    _, first, count = np.unique(rejected[steps], return_index=True, return_counts=True)
    low, high = steps[first], steps[first + count - 1]
    middle = (low + high) // 2
    coarse = (middle + _COARSE // 2) // _COARSE * _COARSE
    return np.concatenate([[0.0], np.where((low <= coarse) & (coarse <= high), coarse, middle) / _STEPS])


def _tally(sample: Sample, target: Target) -> tuple[Floats, Integers]:
    """The thresholds that separate the traces that a target is about, there being some, and all traces between two.

    Returns:
        The thresholds, ascending, -inf first, which is below all that may be chosen, then from 0, of shape (cuts,); and the
        traces from each to the next, by label, of shape (cuts, 3).
    """
    scores = sample.scores if target.of == "accept" else sample.scores[sample.labels != UNLABELLED]
    thresholds = np.concatenate([[-np.inf], cuts(scores[scores >= 0])])
    places = (np.searchsorted(thresholds, sample.scores, "right") - 1) * _LABELS + sample.labels
    traces = np.bincount(places, sample.counts, minlength=thresholds.size * _LABELS)
    return thresholds, traces.astype(np.int64).reshape(-1, _LABELS)


def _above(traces: Integers) -> Integers:
    """How many traces each threshold accepts, from those between two, of shape (cuts, 3) as these."""
    return np.cumsum(traces[::-1], 0)[::-1]


def _accepted_share(accepted: Integers) -> Floats:
    """The share of traces that each threshold accepts, of shape (cuts,)."""
    count = accepted.sum(-1)
    return np.asarray(count / count[0])


def _precision(accepted: Integers) -> Floats:
    """The share of good traces among the accepted ones with labels, NaN if there are none, of shape (cuts,)."""
    labelled = accepted[:, GOOD] + accepted[:, BAD]
    share: Floats = np.divide(accepted[:, GOOD], labelled, out=np.full(labelled.shape, np.nan), where=labelled > 0)
    return share


def _choose(accepted: Integers, target: Target) -> tuple[int, bool]:
    """Choose a threshold for a sample, from what each accepts, of shape (cuts, 3).

    For a share of accepted traces it is the nearest one, of two the higher. For a precision it is the lowest that reaches it
    and accepts ``target.least_accepted`` traces with labels; where none does, the one with the highest.

    Returns:
        The position of the threshold, never the first, and whether it reaches the target.
    """
    shares, precisions = _accepted_share(accepted)[1:], _precision(accepted)[1:]
    accepted = accepted[1:]
    if target.of == "accept":
        counts, is_reached = accepted.sum(-1), bool(shares[0] >= target.share)
        off = np.abs(shares - target.share)
        index = np.flatnonzero(off <= off.min() + _ROUNDING)[-1]
    else:
        counts = accepted[:, GOOD] + accepted[:, BAD]
        precisions = np.where(counts >= target.least_accepted, precisions, -1.0)
        reaching = precisions >= target.share - _ROUNDING
        is_reached = bool(reaching.any())
        index = (reaching if is_reached else precisions).argmax()
    # The middle one of those that accept as many: a resample has nothing between them.
    same = np.flatnonzero(counts == counts[index])
    return int(same[0] + same[-1]) // 2 + 1, is_reached
