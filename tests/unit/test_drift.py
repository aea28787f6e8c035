"""A week of decisions against the week before: the stability index, and what a report shows of it."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from kp_scorer.analysis.drift import BINS, FEWEST, MUCH, bins_of, drift, stability_index, time_of
from kp_scorer.analysis.summary import analyse
from kp_scorer.decision import Decision
from kp_scorer.report.text import COLUMNS, text

from tests.support.builders import decision, decisions

END: Final = datetime(2026, 6, 30, tzinfo=UTC)


def decided(count: int, days_ago: float, **fields: Any) -> list[Decision]:
    at = (END - timedelta(days=days_ago)).isoformat()
    return [decision(f"kp:trace:{days_ago}:{number}", decided_at=at, **fields) for number in range(count)]


@given(decisions())
def test_a_decision_is_in_one_bin_of_each_kind(sample: list[Decision]) -> None:
    kinds = list(dict.fromkeys(name for name, _ in BINS))
    for each in sample:
        bins = list(bins_of(each))
        assert [name for name, _ in bins] == kinds
        assert set(bins) <= set(BINS)


@pytest.mark.parametrize(
    ("score", "tenth"), [(0.0, "0.0"), (0.0999, "0.0"), (0.1, "0.1"), (0.75, "0.7"), (0.9, "0.9"), (1.0, "0.9")]
)
def test_a_value_between_two_bins_is_in_the_upper_one(score: float, tenth: str) -> None:
    assert ("score", tenth) in bins_of(decision(score=score))


def test_the_index_is_that_of_the_shares_with_half_a_trace_in_each_bin_that_is_used() -> None:
    earlier, newest = {("score", "0.2"): 6, ("score", "0.3"): 2}, {("score", "0.3"): 3, ("novelty", "0.3"): 9}
    p, q = (0.5 / 4, 3.5 / 4), (6.5 / 9, 2.5 / 9)
    expected = sum((new - old) * math.log(new / old) for new, old in zip(p, q, strict=True))
    assert stability_index(earlier, newest, "score") == pytest.approx(expected, rel=1e-12)
    assert stability_index(newest, earlier, "score") == pytest.approx(expected, rel=1e-12)


def test_of_one_distribution_the_index_is_0_however_different_the_weeks_are_in_size() -> None:
    assert stability_index({("score", "0.5"): 300}, {("score", "0.5"): 90_000}, "score") == 0


def test_chance_alone_moves_the_index_of_the_fewest_traces_by_less_than_is_much() -> None:
    random, tenths = np.random.default_rng(3), [name for name in BINS if name[0] == "score"]
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
    lines = text(analyse(sample, 0), "here", 0, {}).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    rows = [line.split() for line in lines[lines.index("Score of code changed most in a week: 12.75") :]]
    assert ["code", "300", "300", "0%", "100%"] in rows
    assert ["code", *4 * ["0.00"], "12.75", "12.75"] in rows
    assert [row[0] for row in rows if row[0] in ("all", "code", "law")] == ["all", "code", "all", "code"]


def test_a_report_of_one_week_compares_nothing_and_one_of_few_traces_says_how_many_it_takes() -> None:
    assert "week" not in text(analyse(decided(2 * FEWEST, 1), 0), "here", 0, {})
    report = text(analyse([*decided(2 * FEWEST, 1), *decided(1, 9)], 0), "here", 0, {})
    assert "Too few traces to compare two weeks" in report
    assert f"at least {FEWEST} traces" in " ".join(report.split())
