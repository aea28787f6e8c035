"""Thresholds as settings: suggested by decisions, and tried on them."""

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from kp_scorer.analysis.calibration import Calibration, Target, samples_of
from kp_scorer.analysis.calibration import calibrate as calibrated
from kp_scorer.decision import Decision
from kp_scorer.errors import SettingsError
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.sections import ScoringSettings


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
    scoring = with_thresholds(calibrated(samples, target, settings.scoring.thresholds), settings.scoring)
    if clashes := list(scoring.reviews_above()):
        raise SettingsError("; ".join(f"scoring.{clash}" for clash in clashes))
    return settings.model_copy(update={"scoring": scoring})


def re_decide(decisions: Iterable[Decision], settings: Settings | None = None) -> list[Decision]:
    """Decide again by the thresholds, weights, guards on novelty and aliases of other settings; nothing is embedded or stored.

    What depends on the traces stays as it was decided: ``scoring.cap_step_term`` and ``scoring.max_confidence`` change nothing.
    """
    policy = (settings or load_settings()).scoring
    return [decide_again(decision, policy) for decision in decisions]


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
