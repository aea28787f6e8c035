"""Suggests thresholds by domain that reach a target, with intervals."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

import numpy as np

from kp_scorer.decision import Decision
from kp_scorer.errors import SettingsError
from kp_scorer.report.suggestion import BAD, GOOD, SAME, STEPS, UNLABELLED, Sample, Suggestion, Target, nearest_shares, suggest
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.sections import ScoringSettings

_GUARDED: Final = -1  # Replaces the score of a trace that a guard rejects.
_FAR: Final = 0.05  # A threshold that misses the target share by more than this does not reach it.


class Cohort(NamedTuple):
    """The traces of one domain, or of several together, which get one threshold."""

    traces: int
    suggestion: Suggestion | None = None
    lack: Literal["too_few", "out_of_reach", "too_alike"] | None = None
    """The reason for no suggestion. ``too_few``: there are too few traces. ``out_of_reach``: no threshold has the precision, or
    guards reject so many traces that none has the share. ``too_alike``: many traces have one score, so every threshold accepts
    far more or far fewer."""
    nearest: tuple[float, float] = (0.0, 1.0)  # The shares that the two nearest thresholds accept, if ``too_alike``.


class Calibration(NamedTuple):
    """The thresholds that are suggested for some traces."""

    domains: Mapping[str, Cohort]  # All domains, sorted by name.
    other_domains: Cohort
    """The traces of all domains that have too few and no threshold of their own; or all traces, if even these are too few."""
    other_domains_are_all: bool


def calibrate(
    decisions: Collection[Decision],
    *,
    accept: float | None = None,
    precision: float | None = None,
    good: Mapping[str, bool] = MappingProxyType({}),
    settings: Settings | None = None,
) -> Settings:
    """Return the settings with thresholds by domain that reach a target, as ``kp-scorer calibrate`` suggests them.

    A domain with too few decisions keeps its threshold.

    Args:
        decisions: the decisions to learn from.
        accept: the target as the share of a domain's traces to accept, 0..1.
        precision: the target as the share of accepted traces that are good, 0..1.
        good: labels by trace id for a ``precision``: True is good.
        settings: by default those of the environment and the configuration file.

    Raises:
        ValueError: there is not exactly one target, or it is not a share between 0 and 1.
        SettingsError: a setting is wrong, or a bound of review is above its new threshold.
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
    """Decide again by the thresholds, weights, guards on novelty and aliases of other settings. Nothing is embedded or stored.

    Dimensions stay as they are, so ``scoring.cap_step_term`` and ``scoring.max_confidence`` have no effect.

    Args:
        decisions: they stay unchanged.
        settings: by default those of the environment and the configuration file.

    Raises:
        SettingsError: a setting is wrong.
    """
    policy = (settings or load_settings()).scoring
    return [decide_again(decision, policy) for decision in decisions]


def domain_of(decision: Decision, aliases: Mapping[str, str]) -> str:
    """Return the domain whose threshold applies to a decision."""
    # The alias by which it was decided applies only where there is none now.
    decided_as = decision.taken_for or decision.domain
    return aliases.get(decision.domain) or aliases.get(decided_as, decided_as)


def samples_of(decisions: Iterable[tuple[Decision, bool | None]], aliases: Mapping[str, str]) -> dict[str, Sample]:
    """Return a sample of scores and labels for each domain whose threshold applies to some of the decisions.

    If any sampled trace has a label, only labels of sampled traces count: people label what they come to see, which is mostly
    accepted traces. Scores are rounded to half a step of thresholds, so any number of decisions takes bounded memory.
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
    """Return a score in half steps: even on a step; odd between two steps, where no threshold separates it from others."""
    steps = round(score * STEPS)
    return 2 * steps if abs(score - steps / STEPS) < SAME else 2 * math.floor(score * STEPS) + 1


def _sample(counts: Counter[tuple[int, int, bool]], *, only_sampled: bool) -> Sample:
    places, labels, is_sampled = np.array(list(counts)).T
    if only_sampled:
        labels = np.where(is_sampled, labels, UNLABELLED)
    return Sample(np.where(places == _GUARDED, -np.inf, places / (2 * STEPS)), labels, np.array(list(counts.values())))


def calibrate_samples(samples: Mapping[str, Sample], target: Target, with_own_threshold: Collection[str] = ()) -> Calibration:
    """Suggest a threshold for each domain with enough traces, and one for the rest. There must be at least one domain.

    A domain in ``with_own_threshold`` that has too few traces keeps its threshold, and its traces do not contribute to that of
    the other domains.
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
    if not suggestion:
        return Cohort(sample.traces, lack="out_of_reach")
    share, low, high = suggestion.accepted
    if target.of == "accept" and not low <= target.share <= high and abs(share - target.share) > _FAR:
        return Cohort(sample.traces, None, "too_alike", nearest_shares(sample, target))
    return Cohort(sample.traces, suggestion)


def with_thresholds(calibration: Calibration, scoring: ScoringSettings) -> ScoringSettings:
    """Return settings with the suggested thresholds. A bound of review may then be above its threshold."""
    domains = dict(scoring.thresholds)
    for domain, cohort in calibration.domains.items():
        if cohort.suggestion:
            domains[domain] = cohort.suggestion.threshold
        elif cohort.lack in ("out_of_reach", "too_alike"):
            # Otherwise it would get the threshold of the rest, which misses the target too.
            domains.setdefault(domain, scoring.threshold)
    fallback = calibration.other_domains.suggestion
    threshold = fallback.threshold if fallback else scoring.threshold
    return scoring.model_copy(update={"threshold": threshold, "thresholds": dict(sorted(domains.items()))})
