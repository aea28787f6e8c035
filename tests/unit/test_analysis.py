"""What is said of a set of decisions adds up."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.analysis.acceptance import THRESHOLDS, accepted_at, lowest_threshold
from kp_scorer.analysis.closest_calls import closest_calls, gap
from kp_scorer.analysis.distribution import BINS, histogram
from kp_scorer.analysis.domains import by_domain
from kp_scorer.analysis.flips import Flips
from kp_scorer.analysis.near_duplicates import NEAR, near_duplicates
from kp_scorer.analysis.novelty_course import novelty_course
from kp_scorer.analysis.scores import scores_of
from kp_scorer.analysis.tempo import throughput
from kp_scorer.analysis.whole import analyse
from kp_scorer.decision import Decision, Novelty
from kp_scorer.scoring import Policy, decide_again

from tests.support.decisions import decision, decisions

fractions = st.lists(st.floats(0, 1), min_size=1)


@given(decisions(), st.integers(1, 5))
def test_every_decision_is_in_one_domain(found: list[Decision], most: int) -> None:
    domains = by_domain(found, most)
    assert sorted(each.trace_id for domain in domains for each in domain.decisions) == sorted(each.trace_id for each in found)
    assert len(domains) <= most + 1
    alone = [domain for domain in domains if not domain.smaller]
    assert all(each.domain == domain.name for domain in alone for each in domain.decisions)
    assert [len(domain.decisions) for domain in alone] == sorted((len(domain.decisions) for domain in alone), reverse=True)
    assert len(alone) + sum(domain.smaller for domain in domains) == len({each.domain for each in found})


@given(fractions)
def test_bins_hold_every_value_once(values: list[float]) -> None:
    counts = histogram(values)
    assert len(counts) == BINS
    assert sum(counts) == len(values)


@pytest.mark.parametrize(("value", "place"), [(0.0, 0), (0.1, 2), (0.7, 14), (0.75, 15), (0.7499, 14), (1.0, 19)])
def test_a_value_between_two_bins_is_in_the_upper_one(value: float, place: int) -> None:
    assert histogram([value])[place] == 1


@given(fractions)
def test_higher_thresholds_accept_no_more(scores: list[float]) -> None:
    accepted = accepted_at(scores)
    assert accepted[0] == len(scores)
    assert all(lower >= higher for lower, higher in pairwise(accepted))
    for threshold, count in zip(THRESHOLDS, accepted, strict=True):
        assert count == sum(score >= threshold for score in scores)


@given(fractions, st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
def test_lowest_threshold_for_a_share_accepts_no_more(scores: list[float], share: float) -> None:
    found = lowest_threshold(accepted_at(scores), share)
    enough = [each for each in THRESHOLDS if sum(score >= each for score in scores) <= share * len(scores)]
    assert found == (enough[0] if enough else None)


@given(decisions())
def test_near_duplicates_are_each_in_one_group(found: list[Decision]) -> None:
    groups = [{member.trace_id for member in group.members} for group in near_duplicates(found)]
    assert all(len(group) > 1 for group in groups)
    assert sum(map(len, groups)) == len(set().union(*groups))
    assert sorted(map(len, groups), reverse=True) == [len(group) for group in groups]
    for each in found:
        repeated = [each.novelty.nearest.trace_id] if each.novelty.nearest and each.novelty.nearest.similarity >= NEAR else []
        repeated += [each.novelty.duplicate_of] if each.novelty.duplicate_of else []
        for other in set(repeated) - {each.trace_id}:
            assert any({each.trace_id, other} <= group for group in groups)


def test_a_group_goes_from_one_trace_to_the_next_and_names_those_that_are_not_here() -> None:
    chain = [decision("c", nearest=("b", 0.95)), decision("b", nearest=("a", 0.99)), decision("d", duplicate_of="c")]
    apart = [decision("e", nearest=("a", 0.9499))]
    (group,) = near_duplicates([*chain, *apart])
    assert {member.trace_id: member.decision for member in group.members} == {
        "a": None,
        **{each.trace_id: each for each in chain},
    }


@given(decisions())
def test_closest_calls_are_the_closest_of_each_side(found: list[Decision]) -> None:
    calls = closest_calls(found, 3)
    for side, is_accepted in ((calls.accepted, True), (calls.missed, False)):
        gaps = sorted(gap(each) for each in found if (each.outcome == "accepted") == is_accepted)
        assert [gap(each) for each in side] == gaps[:3]


@pytest.mark.parametrize("count", [1, 5, 100, 601, 2_000])
def test_stretches_of_novelty_cover_all_traces_and_points_are_of_the_traces(count: int) -> None:
    found = [decision(str(number), novelty=number / count) for number in range(count)]
    course = novelty_course(found)
    assert course.stretches[0].first == 1
    assert course.stretches[-1].last == count
    assert all(after.first == before.last + 1 for before, after in pairwise(course.stretches))
    assert all(each.p25 <= each.p50 <= each.p75 for each in course.stretches)
    assert all(point.novelty == (point.place - 1) / count for point in course.points)
    assert len(course.points) <= 600


def test_novelty_has_no_course_without_an_embedder() -> None:
    assert novelty_course([decision(novelty=0.5).model_copy(update={"novelty": Novelty(source="no_embedder")})]) == ((), ())


@given(st.lists(st.datetimes(timezones=st.timezones()).map(lambda time: time.isoformat()) | st.just("soon"), max_size=20))
def test_every_readable_time_counts_once_in_no_more_spans_than_can_be_shown(times: list[str]) -> None:
    found = throughput([decision(decided_at=time) for time in times])
    readable = [time for time in times if time != "soon" and 1970 < int(time[:4]) < 9_000]
    assert (sum(found.counts) if found else 0) == len(readable)
    assert len(found.counts if found else ()) <= 101


@given(decisions(), st.sampled_from([Policy(threshold=0.4), Policy(threshold=0.75, review=0.3)]))
def test_the_whole_is_the_sum_of_its_domains(found: list[Decision], shadow: Policy) -> None:
    analysis = analyse(found, {}, shadow)
    total, domains = analysis.total, analysis.domains
    for outcome, count in total.scores.outcomes.items():
        assert count == sum(of.scores.outcomes[outcome] for of in domains) == sum(total.scores.histograms[outcome])
    for name, fired in total.overrides.items():
        assert fired == sum(of.overrides[name] for of in domains)
    assert list(total.accepted_at) == [sum(counts) for counts in zip(*(of.accepted_at for of in domains), strict=True)]
    assert total.flips.total == sum(decide_again(each, shadow).outcome != each.outcome for each in found)
    assert total.flips == sum((of.flips for of in domains), Flips())


def test_a_domain_has_the_threshold_that_most_of_its_traces_met() -> None:
    (domain,) = by_domain([decision("a"), decision("b"), decision("c", threshold=0.4)])
    assert (scores_of(domain).threshold, scores_of(domain).other_thresholds) == (0.75, 1)
