"""Suggested thresholds: where they can lie, how they act on unseen traces, and which domains share one."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.report import suggestion as suggestion_module
from kp_scorer.report.calibration import calibrate_samples, samples_of
from kp_scorer.report.intervals import Floats, Z, counted_share
from kp_scorer.report.suggestion import BAD, GOOD, UNLABELLED, Integers, Sample, Suggestion, Target, cuts, suggest

from tests.support.builders import decision

A_FIFTH: Final = Target("accept", 0.2)
HALF_GOOD: Final = Target("precision", 0.5)
NINE_OF_TEN: Final = Target("precision", 0.9)

SCORES: Final = st.lists(
    st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.5, 0.50003, 0.5001, 0.75, 1.0]), min_size=1, max_size=60
)
GRID: Final = [step / 10_000 for step in range(10_001)]

Draw = Callable[[np.random.Generator, int], Floats]

DRAWS: Final[dict[str, Draw]] = {
    "one hump": lambda rng, count: rng.beta(4, 5, count),
    "successes and failures": lambda rng, count: np.where(
        rng.random(count) < 0.45, rng.beta(8, 22, count), rng.beta(22, 20, count)
    ),
    "a fifth are single thoughts": lambda rng, count: np.where(rng.random(count) < 0.2, 0.1, rng.beta(6, 5, count)),
    "few different scores": lambda rng, count: np.round(rng.beta(4, 5, count), 2) * 0.9 + 0.05,
    "mostly low": lambda rng, count: rng.beta(1.2, 8, count),
}
"""Functions that draw scores, by the distribution that they draw from."""


def unlabelled(scores: Any) -> Sample:
    array = np.asarray(scores, dtype=np.float64)
    return labelled(array, np.full(array.size, UNLABELLED))


def labelled(scores: Floats, labels: Integers) -> Sample:
    """Return a sample in which each pair of score and label belongs to one trace."""
    return Sample(scores, labels, np.ones_like(labels))


def suggest_at_once(sample: Sample, target: Target) -> Suggestion | None:
    """Suggest a threshold quickly, with a single one of the resamples from which its intervals are computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suggestion_module, "_RESAMPLES", 1)
        return suggest(sample, target)


def threshold_for(sample: Sample, target: Target) -> float | None:
    suggestion = suggest_at_once(sample, target)
    return suggestion.threshold if suggestion else None


def accepted(scores: Floats, threshold: float) -> float:
    """Return the share of scores that a policy with this threshold accepts."""
    return float((scores >= threshold).mean())


@given(SCORES)
def test_cuts_separate_all_scores_more_than_two_steps_apart_at_four_decimals(scores: list[float]) -> None:
    thresholds = cuts(np.array(scores))
    counts = [sum(score >= threshold for score in scores) for threshold in thresholds]
    assert thresholds[0] == 0
    assert counts[0] == len(scores)
    assert counts[-1] > 0
    assert all(lower > higher for lower, higher in pairwise(counts))
    for threshold in thresholds[1:].tolist():
        assert threshold == round(threshold, 4)
        assert min(abs(score - threshold) for score in scores) > 1e-9
    for low, high in pairwise(sorted(scores)):
        assert high - low < 2.1e-4 or any(low < threshold < high for threshold in thresholds)


@pytest.mark.parametrize(
    ("scores", "thresholds"),
    [
        ([0.1, 0.1, 0.1], [0.0]),
        ([0.2, 0.4], [0.0, 0.3]),
        ([0.35625, 0.35625000000000007, 0.5], [0.0, 0.428]),
        ([0.3, 0.3003], [0.0, 0.3001]),
        ([0.5, 0.50005], [0.0]),
        ([0.0, 1.0], [0.0, 0.5]),
    ],
)
def test_a_threshold_has_as_few_decimals_as_it_needs(scores: list[float], thresholds: list[float]) -> None:
    assert cuts(np.array(scores)).tolist() == thresholds


@given(SCORES, st.floats(0.01, 0.99))
def test_no_other_threshold_accepts_a_share_nearer_to_the_target(scores: list[float], share: float) -> None:
    threshold = threshold_for(unlabelled(scores), Target("accept", share))
    assert threshold is not None
    off = np.abs(np.array(scores)[:, np.newaxis] - GRID)
    shares = (np.array(scores)[:, np.newaxis] >= GRID).mean(0)
    possible = shares[(off.min(0) > 1e-9) & (shares > 0)]
    assert abs(accepted(np.array(scores), threshold) - share) <= np.abs(np.append(possible, 1.0) - share).min() + 1e-9


LABELLED: Final = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 1, 1, UNLABELLED])), min_size=1, max_size=120)


@given(LABELLED, st.sampled_from([0.5, 0.7, 0.9]))
def test_no_lower_threshold_reaches_the_precision(pairs: list[tuple[int, int]], share: float) -> None:
    scores, labels = np.array([score / 40 for score, _ in pairs]), np.array([label for _, label in pairs])
    target = Target("precision", share)

    def has_it(at: float) -> bool:
        labelled = labels[(scores >= at) & (labels != UNLABELLED)]
        return labelled.size >= target.least_accepted and bool(labelled.mean() >= share - 1e-12)

    threshold = threshold_for(Sample(scores, labels, np.ones_like(labels)), target)
    lowest = next((place / 40 for place in range(41) if has_it(place / 40)), None)
    assert (threshold is None) == (lowest is None)
    if threshold is not None and lowest is not None:
        assert has_it(threshold)
        assert threshold <= lowest


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("traces", [200, 1537])
def test_unseen_traces_are_accepted_as_often_as_the_sample_size_allows(draw: Draw, traces: int) -> None:
    # With n traces, the accepted share of unseen traces varies by sqrt(p (1-p) / n) about the target, however the threshold is
    # chosen. At 20% it is within 2 points for 52% of all samples of 200, 74% of 500 and 95% of 1,537.
    rng = np.random.default_rng(traces)
    unseen = draw(rng, 100_000)
    thresholds = [threshold_for(unlabelled(draw(rng, traces)), A_FIFTH) for _ in range(200)]
    off = np.array([accepted(unseen, threshold) - 0.2 for threshold in thresholds if threshold is not None])
    within = math.erf(0.02 / math.sqrt(2 * 0.2 * 0.8 / traces))
    assert abs(off.mean()) < 0.006
    assert (np.abs(off) <= 0.02).mean() > within - 3.5 * math.sqrt(within * (1 - within) / 200) - 0.01


@pytest.mark.parametrize("name", ["successes and failures", "a fifth are single thoughts"])
def test_intervals_hold_for_unseen_traces(name: str) -> None:
    draw, rng = DRAWS[name], np.random.default_rng(3)
    unseen = draw(rng, 100_000)
    is_within = []
    for _ in range(20):
        suggestion = suggest(unlabelled(draw(rng, 200)), A_FIFTH)
        assert suggestion
        is_within.append(suggestion.accepted.low <= accepted(unseen, suggestion.threshold) <= suggestion.accepted.high)
        assert suggestion.low <= suggestion.threshold <= suggestion.high
        assert 0.07 < suggestion.accepted.high - suggestion.accepted.low < 0.16
    assert fmean(is_within) >= 0.85


def test_a_precision_and_its_interval_hold_on_unseen_traces() -> None:
    rng = np.random.default_rng(4)

    def draw(count: int) -> Sample:
        scores = rng.beta(4, 4, count)
        return labelled(scores, (rng.random(count) < 1 / (1 + np.exp(-20 * (scores - 0.45)))).astype(np.int64))

    unseen, is_within, precisions = draw(100_000), [], []
    for _ in range(15):
        suggestion = suggest(draw(400), NINE_OF_TEN)
        assert suggestion
        assert suggestion.precision
        precisions.append(float(unseen.labels[unseen.scores >= suggestion.threshold].mean()))
        is_within.append(suggestion.precision.low <= precisions[-1] <= suggestion.precision.high)
    assert abs(fmean(precisions) - 0.9) < 0.015
    assert fmean(is_within) >= 0.8


def test_precision_of_good_traces_alone_is_not_certain() -> None:
    suggestion = suggest(labelled(np.linspace(0.2, 0.8, 100), np.ones(100, np.int64)), A_FIFTH)
    assert suggestion
    assert suggestion.precision
    assert (suggestion.precision.value, suggestion.precision.high) == (1.0, 1.0)
    assert suggestion.precision.low < 0.9


@given(st.integers(0, 400), st.integers(1, 400))
def test_interval_of_a_counted_share_is_wilsons_and_within_0_and_1(part: int, more: int) -> None:
    assert counted_share(0, 0) is None
    share = counted_share(part, part + more)
    assert share
    assert 0 <= share.low <= share.value <= share.high <= 1
    # By the definition of Wilson's interval, the counted share is Z standard errors away from each end.
    if share.low > 0:
        total = part + more
        assert (share.value - share.low) / math.sqrt(share.low * (1 - share.low) / total) == pytest.approx(Z, rel=1e-6)


def sample(count: int, seed: int = 0, *, at: float = 0.5, label: int = UNLABELLED) -> Sample:
    """Return a sample of scores about ``at`` that all have the same label."""
    return labelled(np.random.default_rng(seed).normal(at, 0.05, count).clip(0, 1), np.full(count, label))


def test_decisions_become_samples_by_domain_with_labels_by_trace() -> None:
    decisions = [decision(domain=domain, score=score) for domain, score in (("a", 0.7), ("b", 0.5), ("a", 0.30004))]
    samples = samples_of(zip(decisions, [True, False, None], strict=True), {})
    assert samples["a"].scores.tolist() == pytest.approx([0.7, 0.3], abs=5e-5)
    assert samples["a"].labels.tolist() == [GOOD, UNLABELLED]
    assert samples["b"].labels.tolist() == [BAD]
    again = samples_of(zip(decisions * 3, [True, False, None] * 3, strict=True), {})["a"]
    assert (again.counts.tolist(), again.traces, again.labelled) == ([3, 3], 6, 3)


def test_only_labels_of_sampled_traces_count_if_any_of_those_has_one() -> None:
    decisions = [decision(domain="a", score=number / 4, sampled=0.01 if number % 2 else None) for number in range(4)]
    assert samples_of(zip(decisions, [True, False, True, None], strict=True), {})["a"].labelled == 1
    assert samples_of(zip(decisions, [True, None, True, None], strict=True), {})["a"].labelled == 2


@given(st.lists(st.floats(0, 1) | st.integers(0, 10_000).map(lambda step: step / 10_000), min_size=70, max_size=90))
def test_counted_scores_lead_to_the_same_suggestion_as_each_by_itself(scores: list[float]) -> None:
    decisions = [decision(score=score) for score in scores]
    counted = samples_of(((each, None) for each in decisions), {})["code"]
    assert suggest_at_once(counted, A_FIFTH) == suggest_at_once(unlabelled(scores), A_FIFTH)


def test_samples_resolve_current_aliases_before_those_of_the_decision() -> None:
    domains = {"fin": None, "ledgers": "code", "own": "code", "plain": None}
    pairs = [(decision(domain=domain, taken_for=taken_for), None) for domain, taken_for in domains.items()]
    assert set(samples_of(pairs, {})) == {"fin", "code", "plain"}
    samples = samples_of(pairs, {"fin": "finance", "ledgers": "finance"})
    assert {domain: sample.traces for domain, sample in samples.items()} == {"finance": 2, "code": 1, "plain": 1}
    assert set(samples_of(pairs, {"code": "finance"})) == {"fin", "finance", "plain"}


@pytest.mark.parametrize("small", [0, 20])
def test_other_domains_are_all_if_the_small_ones_are_too_few_together(small: int) -> None:
    samples = {"large": sample(300)} | ({"small": sample(small, 1)} if small else {})
    calibration = calibrate_samples(samples, A_FIFTH)
    assert (calibration.other_domains.traces, calibration.other_domains_are_all) == (300 + small, True)
    assert calibration.other_domains.suggestion


def test_only_labelled_traces_count_for_a_precision() -> None:
    unknown, good = sample(500), sample(HALF_GOOD.least_traces, 1, label=GOOD)
    both = labelled(np.concatenate([unknown.scores, good.scores]), np.concatenate([unknown.labels, good.labels]))
    calibration = calibrate_samples({"unknown": unknown, "some": both}, HALF_GOOD)
    assert calibration.domains["unknown"].lack == "too_few"
    # All traces are good, so all may be accepted.
    assert calibration.domains["some"].suggestion
    assert calibration.domains["some"].suggestion.threshold == 0
