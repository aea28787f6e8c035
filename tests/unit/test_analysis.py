"""The figures of a report add up, and a week of decisions is compared with the week before."""

import math
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decision import Decision
from kp_scorer.report.drift import BINS as DRIFT_BINS
from kp_scorer.report.drift import FEWEST, MUCH, bins_of, drift, stability_index, time_of
from kp_scorer.report.summary import (
    THRESHOLDS,
    accepted_at,
    analyse,
    by_name,
    closest_calls,
    gap,
    histogram,
    is_near_duplicate,
    lowest_threshold,
    novelty_course,
)
from kp_scorer.report.text import COLUMNS, text

from tests.support.builders import decision, decisions

fractions = st.lists(st.floats(0, 1), min_size=1)


@given(decisions(), st.integers(1, 5))
def test_every_decision_is_in_one_domain(sample: list[Decision], most: int) -> None:
    domains = by_name(sample, lambda decision: decision.domain, most)
    assert sorted(each.trace_id for domain in domains for each in domain.decisions) == sorted(each.trace_id for each in sample)
    assert len(domains) <= most + 1
    alone = [domain for domain in domains if not domain.smaller]
    assert all(each.domain == domain.name for domain in alone for each in domain.decisions)
    assert [len(domain.decisions) for domain in alone] == sorted((len(domain.decisions) for domain in alone), reverse=True)
    assert len(alone) + sum(domain.smaller for domain in domains) == len({each.domain for each in sample})


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (0.1, 2), (0.7, 14), (0.75, 15), (0.7499, 14), (1.0, 19)])
def test_a_value_between_two_bins_is_in_the_upper_one(value: float, place: int) -> None:
    assert histogram([value])[place] == 1


@given(fractions, st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
def test_lowest_threshold_for_a_share_accepts_no_more(scores: list[float], share: float) -> None:
    lowest = lowest_threshold(accepted_at(scores), share * len(scores))
    enough = [each for each in THRESHOLDS if sum(score >= each for score in scores) <= share * len(scores)]
    assert lowest == (enough[0] if enough else None)


def test_near_duplicates_are_alike_or_of_the_same_content() -> None:
    alike = [decision("b", nearest=("a", 0.95)), decision("d", duplicate_of="c")]
    apart = [decision("e", nearest=("a", 0.9499)), decision("f")]
    assert [is_near_duplicate(each) for each in (*alike, *apart)] == [True, True, False, False]


@given(decisions())
def test_closest_calls_are_the_closest_of_each_side(sample: list[Decision]) -> None:
    for side, is_accepted in zip(closest_calls(sample, 3), (True, False), strict=True):
        gaps = sorted(gap(each) for each in sample if (each.outcome == "accepted") == is_accepted)
        assert [gap(each) for each in side] == gaps[:3]


@pytest.mark.parametrize("count", [1, 5, 100, 601, 2_000])
def test_stretches_of_novelty_cover_all_traces_and_points_are_traces(count: int) -> None:
    sample = [decision(str(number), novelty=number / count) for number in range(count)]
    course = novelty_course(sample)
    assert course.stretches[0].first == 1
    assert course.stretches[-1].last == count
    assert all(after.first == before.last + 1 for before, after in pairwise(course.stretches))
    assert all(novelty == (place - 1) / count for place, novelty in course.points)
    assert len(course.points) <= 600


@given(decisions())
def test_totals_are_the_sums_of_the_domains(sample: list[Decision]) -> None:
    analysis = analyse(sample, 0)
    total, domains = analysis.total, analysis.domains
    for outcome, count in total.outcomes.items():
        assert count == sum(of.outcomes[outcome] for of in domains) == sum(total.histograms[outcome])
    assert list(total.accepted_at) == [sum(counts) for counts in zip(*(of.accepted_at for of in domains), strict=True)]


def test_examples_are_spread_over_the_scores_and_origins_are_counted() -> None:
    scores = [number / 100 for number in range(100)]
    days = {score: f"2026-01-0{1 + (score > 0.8)}T00:00:00Z" for score in scores}
    sample = [
        decision(f"kp:trace:{each}", score=each, agent_id=f"agent {each > 0.5}", decided_at=days[each]) for each in scores
    ]
    analysis = analyse(sample, 0)
    assert [each.score for each in analysis.examples["accepted"]] == [0.99, 0.93, 0.87, 0.81, 0.75]
    assert [each.score for each in analysis.examples["rejected"]][::4] == [0.74, 0.0]
    rows = [line.split() for line in text(analysis, "here", 0).splitlines()]
    assert ["2026-01-01", "81", "6", "7.4%", "0.40"] in rows
    assert ["agent", "False", "51", "0", "0%", "0.25"] in rows


END: Final = datetime(2026, 6, 30, tzinfo=UTC)


def decided(count: int, days_ago: float, **fields: Any) -> list[Decision]:
    at = (END - timedelta(days=days_ago)).isoformat()
    return [decision(f"kp:trace:{days_ago}:{number}", decided_at=at, **fields) for number in range(count)]


@given(decisions())
def test_a_decision_is_in_one_bin_of_each_kind(sample: list[Decision]) -> None:
    kinds = list(dict.fromkeys(name for name, _ in DRIFT_BINS))
    for each in sample:
        bins = list(bins_of(each))
        assert [name for name, _ in bins] == kinds
        assert set(bins) <= set(DRIFT_BINS)


def test_the_index_is_that_of_the_shares_with_half_a_trace_in_each_bin_that_is_used() -> None:
    earlier, newest = {("score", "0.2"): 6, ("score", "0.3"): 2}, {("score", "0.3"): 3, ("novelty", "0.3"): 9}
    p, q = (0.5 / 4, 3.5 / 4), (6.5 / 9, 2.5 / 9)
    expected = sum((new - old) * math.log(new / old) for new, old in zip(p, q, strict=True))
    assert stability_index(earlier, newest, "score") == pytest.approx(expected, rel=1e-12)
    assert stability_index(newest, earlier, "score") == pytest.approx(expected, rel=1e-12)


def test_chance_alone_moves_the_index_of_the_fewest_traces_by_less_than_is_much() -> None:
    random, tenths = np.random.default_rng(3), [name for name in DRIFT_BINS if name[0] == "score"]
    weeks = random.multinomial(FEWEST, [0.1] * 10, (2, 2_000)).tolist()
    pairs = [[dict(zip(tenths, week, strict=True)) for week in pair] for pair in zip(*weeks, strict=True)]
    assert max(stability_index(earlier, newest, "score") for earlier, newest in pairs) < MUCH


def test_weeks_end_with_the_newest_decision_whatever_zone_its_time_is_in() -> None:
    sample = [*decided(1, 0), *decided(2, 6.9), *decided(4, 7), *decided(8, 13.9), *decided(16, 14)]
    later = END.astimezone().isoformat()
    compared = drift([*sample, decision("kp:trace:later", decided_at=later, score=0.9)], max(map(time_of, sample)))
    assert compared.traces == (12, 4)
    assert compared.accepted == (0, 1)
    assert compared.indices == {}, "there are too few"


def test_a_report_shows_weeks_of_enough_traces_by_domain() -> None:
    sample = [
        *decided(FEWEST, 8, domain="code", score=0.3),
        *decided(FEWEST, 1, domain="code", score=0.8),
        *decided(FEWEST, 9, domain="law"),
        *decided(FEWEST - 1, 0, domain="law"),
    ]
    lines = text(analyse(sample, 0), "here", 0).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    rows = [line.split() for line in lines[lines.index("Score of code changed most in a week: 12.75") :]]
    assert ["code", "300", "300", "0%", "100%"] in rows
    assert ["code", *4 * ["0.00"], "12.75", "12.75"] in rows
    assert [row[0] for row in rows if row[0] in ("all", "code", "law")] == ["all", "code", "all", "code"]
