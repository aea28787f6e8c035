"""Thresholds by domain: who gets one, who shares one, and what is held back."""

from typing import Final

import numpy as np
import pytest
from kp_scorer.analysis.calibration import HELD_BACK, calibrate, samples_of
from kp_scorer.analysis.target import Target
from kp_scorer.analysis.threshold import BAD, GOOD, UNLABELLED, Sample, threshold_for
from kp_scorer.offline import score_traces
from kp_scorer.settings import load_settings

from tests.support.builders import minimal_payload
from tests.support.paths import REFERENCE_TRACES

A_FIFTH: Final = Target("accept", 0.2)
HALF_GOOD: Final = Target("precision", 0.5)


def sample(count: int, seed: int = 0, *, at: float = 0.5, label: int = UNLABELLED) -> Sample:
    """Scores about ``at``, all with the same label."""
    return Sample(np.random.default_rng(seed).normal(at, 0.05, count).clip(0, 1), np.full(count, label))


def share(found: Sample, threshold: float) -> float:
    return float((found.scores >= threshold).mean())


def test_decisions_become_samples_by_domain_with_labels_by_trace() -> None:
    said = [("kp:trace:1", "a", 1.0), ("kp:trace:2", "b", 0.5), ("kp:trace:3", "a", 0.0)]
    traces = [minimal_payload(trace_id=trace_id, domain=domain, confidence=sure) for trace_id, domain, sure in said]
    decisions = list(score_traces(traces, load_settings({"embedding.embedder": "none"})))
    found = samples_of(decisions, {"kp:trace:1": True, "kp:trace:2": False, "kp:trace:9": True}, {})
    assert found["a"].scores.tolist() == [decisions[0].score, decisions[2].score]
    assert found["a"].labels.tolist() == [GOOD, UNLABELLED]
    assert found["b"].labels.tolist() == [BAD]


def test_a_decision_counts_for_what_its_domain_is_taken_for_now_or_was_then() -> None:
    domains = ["fin", "ledgers", "kept", "plain"]
    traces = [minimal_payload(trace_id=f"kp:trace:{number}", domain=domain) for number, domain in enumerate(domains)]
    then = {"ledgers": "code", "kept": "code"}
    settings = load_settings({"embedding.embedder": "none", "scoring.aliases": then})
    decisions = list(score_traces(traces, settings))
    assert set(samples_of(decisions, {}, {})) == {"fin", "code", "plain"}
    found = samples_of(decisions, {}, {"fin": "finance", "ledgers": "finance"})
    assert {domain: len(one.scores) for domain, one in found.items()} == {"finance": 2, "code": 1, "plain": 1}
    assert set(samples_of(decisions, {}, {"code": "finance"})) == {"fin", "finance", "plain"}


def test_small_domains_that_keep_their_threshold_have_no_part_in_that_of_the_others() -> None:
    samples = {"large": sample(300), "x": sample(40, 2), "y": sample(30, 3), "kept": sample(50, 4, at=0.9)}
    found = calibrate(samples, A_FIFTH, {"kept", "large", "absent"})
    assert (found.rest.traces, found.rest_is_all) == (70, False)
    assert (found.domains["kept"].suggestion, found.domains["kept"].lack) == (None, "too_few")
    assert found.domains["large"].suggestion


def test_domains_with_enough_traces_get_their_own_and_the_others_share_one() -> None:
    large = {"low": sample(300, at=0.3), "high": sample(300, 1, at=0.7)}
    samples = large | {"x": sample(40, 2, at=0.5), "y": sample(30, 3, at=0.6)}
    found = calibrate(samples, A_FIFTH)
    assert list(found.domains) == ["high", "low", "x", "y"]
    for domain in large:
        cohort = found.domains[domain]
        assert cohort.suggestion
        assert cohort.suggestion.threshold == threshold_for(samples[domain], A_FIFTH)
        assert share(samples[domain], cohort.suggestion.threshold) == pytest.approx(0.2)
    assert [(found.domains[domain].suggestion, found.domains[domain].lack) for domain in "xy"] == [(None, "too_few")] * 2
    assert (found.rest.traces, found.rest_is_all) == (70, False)
    assert found.rest.suggestion
    both = Sample(*(np.concatenate([getattr(samples[domain], part) for domain in "xy"]) for part in ("scores", "labels")))
    assert share(both, found.rest.suggestion.threshold) == pytest.approx(0.2)


@pytest.mark.parametrize("small", [0, 20])
def test_where_the_small_domains_are_too_few_together_the_rest_is_all(small: int) -> None:
    samples = {"large": sample(300)} | ({"small": sample(small, 1)} if small else {})
    found = calibrate(samples, A_FIFTH)
    assert (found.rest.traces, found.rest_is_all) == (300 + small, True)
    assert found.rest.suggestion


def test_where_all_together_are_too_few_nothing_is_suggested() -> None:
    found = calibrate({"a": sample(30), "b": sample(31)}, A_FIFTH)
    assert not any(cohort.suggestion or cohort.held_back for cohort in [*found.domains.values(), found.rest])
    assert found.rest.lack == "too_few"


def test_only_labelled_traces_count_for_a_precision() -> None:
    unknown, good = sample(500), sample(HALF_GOOD.least_traces, 1, label=GOOD)
    both = Sample(np.concatenate([unknown.scores, good.scores]), np.concatenate([unknown.labels, good.labels]))
    found = calibrate({"unknown": unknown, "some": both}, HALF_GOOD)
    assert found.domains["unknown"].lack == "too_few"
    assert found.domains["some"].labelled == HALF_GOOD.least_traces
    # All are good, so all may be accepted.
    assert found.domains["some"].suggestion
    assert found.domains["some"].suggestion.threshold == 0


def test_a_precision_that_no_threshold_has_is_out_of_reach() -> None:
    found = calibrate({"bad": sample(300, label=BAD)}, HALF_GOOD)
    assert (found.domains["bad"].suggestion, found.domains["bad"].lack) == (None, "out_of_reach")


def test_what_is_held_back_is_a_part_of_each_domain_and_is_accepted_by_a_threshold_made_without_it() -> None:
    samples = {"a": sample(1_000, label=GOOD), "b": sample(500, 1)}
    found = calibrate(samples, A_FIFTH)
    held = {domain: cohort.held_back for domain, cohort in found.domains.items()}
    assert held["a"]
    assert held["b"]
    assert (held["a"].traces, held["b"].traces) == (round(1_000 * HELD_BACK), round(500 * HELD_BACK))
    assert held["a"].accepted
    assert held["a"].accepted.low < 0.2 < held["a"].accepted.high
    assert held["a"].precision
    assert held["a"].precision.value == 1
    assert held["b"].precision is None
    assert found.rest.held_back
    assert found.rest.held_back.traces == held["a"].traces + held["b"].traces


def test_a_threshold_that_suits_only_its_own_traces_is_found_out() -> None:
    # Which traces are good is a matter of chance, so a threshold above which more of them are has it by luck.
    rng = np.random.default_rng(0)
    scores = rng.random(400)
    found = calibrate({"noise": Sample(scores, (rng.random(400) < 0.5).astype(np.int64))}, Target("precision", 0.55))
    noise = found.domains["noise"]
    assert noise.suggestion
    assert noise.suggestion.precision
    assert noise.suggestion.precision.value >= 0.55
    assert noise.suggestion.precision.low < 0.5
    assert noise.held_back
    assert noise.held_back.precision
    assert noise.held_back.precision.value < 0.55


@pytest.mark.skipif(not REFERENCE_TRACES.is_dir(), reason=f"there are no real traces in {REFERENCE_TRACES}")
def test_half_of_the_real_traces_says_how_many_of_the_other_half_are_accepted(expected_scores: dict[str, float]) -> None:
    scores, rng = np.array(list(expected_scores.values())), np.random.default_rng(7)
    off = []
    for _ in range(300):
        one, other = np.split(rng.permutation(scores), [len(scores) // 2])
        threshold = threshold_for(Sample(one, np.full(len(one), UNLABELLED)), A_FIFTH)
        assert threshold is not None
        off.append(float((other >= threshold).mean()) - 0.2)
    assert abs(np.mean(off)) < 0.01
