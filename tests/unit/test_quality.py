"""The quality of the gate is estimated from a labelled sample, with intervals that hold, and printed by the command."""

import math
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from click.testing import CliRunner, Result
from kp_scorer.cli.main import commands
from kp_scorer.decision import CheckResult, Decision, GateResult, Guard
from kp_scorer.errors import ScorerError
from kp_scorer.report.intervals import counted_share, weighted_share
from kp_scorer.report.quality import LEAST_LABELS, Judged, Quality, qualities

from tests.support.builders import decision
from tests.support.commands import jsonl_file
from tests.support.traces import rows_in

RUNS: Final = 400


def sampled(count: int, domain: str = "code", probability: float | None = 0.5, first: int = 0) -> list[Decision]:
    """Return decisions with scores from 0 to 0.95, a quarter of them accepted."""
    scores = [number % 20 / 20 for number in range(count)]
    return [
        decision(f"kp:trace:{domain}-{first + number}", score=score, domain=domain, sampled=probability)
        for number, score in enumerate(scores)
    ]


def labels_of(decisions: list[Decision]) -> dict[str, bool]:
    """Return labels that call scores from 0.5 on good, except for 0.8, which is above the gate's threshold."""
    return {each.trace_id: 0.5 <= each.score != 0.8 for each in decisions}


def test_with_equal_probabilities_shares_are_counted() -> None:
    is_part = np.array([True] * 7 + [False] * 3)
    for probability in (0.01, 1.0):
        share, counted = weighted_share(is_part, np.full(10, probability)), counted_share(7, 10)
        assert share is not None
        assert counted is not None
        assert tuple(share) == pytest.approx(tuple(counted))
    assert weighted_share(is_part[:0], np.full(0, 0.5)) is None
    certain = weighted_share(np.array([True] * 5), np.full(5, 0.5))
    assert certain is not None
    assert (certain.value, certain.high) == (1, 1)
    assert 0.5 < certain.low < 0.7


def test_each_trace_counts_for_the_traces_that_it_stands_for() -> None:
    # Ten traces stand for 100 each and are not in the part; ten stand for 10 each and are in it.
    is_part, probabilities = np.repeat([False, True], 10), np.repeat([0.01, 0.1], 10)
    share = weighted_share(is_part, probabilities)
    assert share is not None
    assert share.value == pytest.approx(10 / 110)
    assert share.low < share.value < share.high
    # Neither the order of traces nor a common factor of all probabilities matters.
    mixed = np.random.default_rng(1).permutation(20)
    assert weighted_share(is_part[mixed], probabilities[mixed] / 3) == pytest.approx(share)


@pytest.mark.parametrize("labels", [50, 200, 1_000])
@pytest.mark.parametrize("after", [0.01, 0.03])
@pytest.mark.parametrize("good_after", [0.5, 0.7])
def test_intervals_hold_in_19_of_20_samples(labels: int, after: float, good_after: float) -> None:
    rng, probabilities, good_shares = np.random.default_rng(3), np.array([0.01, after]), np.array([0.5, good_after])
    precisions, recalls = [], []
    accepted_of_good, accepted_of_bad = 0.5, 0.2
    share = good_shares.mean()
    precision = share * accepted_of_good / (share * accepted_of_good + (1 - share) * accepted_of_bad)
    for _ in range(RUNS):
        half = np.repeat([0, 1], np.maximum(1, rng.poisson(labels * probabilities / probabilities.sum())))
        good = rng.random(half.size) < good_shares[half]
        accepted = rng.random(half.size) < np.where(good, accepted_of_good, accepted_of_bad)
        estimate = Judged(accepted.astype(float), accepted, good, probabilities[half]).estimate()
        assert estimate.precision
        assert estimate.recall
        precisions.append(estimate.precision.low <= precision <= estimate.precision.high)
        recalls.append(estimate.recall.low <= accepted_of_good <= estimate.recall.high)
    # Allow for three standard deviations, given this number of runs.
    off = 3 * math.sqrt(0.95 * 0.05 / RUNS)
    assert 0.93 - off / 2 <= np.mean(precisions) <= 0.97 + off / 2
    assert 0.93 - off / 2 <= np.mean(recalls) <= 0.97 + off / 2


def test_the_gate_and_other_thresholds_are_estimated_from_the_labelled_sample_alone() -> None:
    decisions = sampled(100)
    others = [*sampled(60, probability=None, first=200), *sampled(40, first=300)]
    labels = labels_of([*decisions, *others[:60]])
    (quality,) = qualities([(each, labels.get(each.trace_id)) for each in (*decisions, *others)], {})
    assert (quality.domains, quality.labels) == (("code",), 100)
    gate, *tried = quality.estimates
    assert gate.threshold is None
    assert [round(each.threshold or 0, 2) for each in tried] == [round(step / 20, 2) for step in range(1, 20)]
    # The gate accepts 5 of 20 scores, and 4 of these are good; in all, 9 are good.
    for each in (gate, tried[14]):
        assert each.accepted
        assert each.precision
        assert each.recall
        assert [each.accepted.value, each.precision.value, each.recall.value] == pytest.approx([0.25, 0.8, 4 / 9])
    lowest = tried[0]
    assert lowest.recall
    assert (lowest.threshold, lowest.recall.value) == (0.05, 1)


def test_no_threshold_accepts_what_was_rejected_whatever_its_score() -> None:
    guard = Guard(name="copies", fired=True)
    barred = [
        decision("kp:trace:copy", score=0.9, outcome="rejected", guards=(guard,), sampled=0.5),
        decision(
            "kp:trace:checked",
            score=0.9,
            outcome="review",
            checks=(CheckResult(name="own", version="1", outcome="review"),),
            sampled=0.5,
        ),
    ]
    decisions = [*sampled(60), *barred]
    (quality,) = qualities([(each, True) for each in decisions], {})
    assert all(each.accepted and each.accepted.value <= 60 / 62 for each in quality.estimates)


def test_the_score_is_compared_with_a_gate_that_decided_otherwise() -> None:
    gates = [GateResult(adds=adds, bar=0.5, eligible=True, as_of="0-0") for adds in (0.0, 1.0)]
    decisions = [
        decision(f"kp:trace:{number}-{high}", score=0.2 + 0.6 * high, outcome=outcome, gate=gate, sampled=0.5)
        for number in range(40)
        for high, outcome, gate in ((True, "rejected", gates[0]), (False, "accepted", gates[1]))
    ]
    # Label the traces that the gate accepts as good, and those that the score would accept as bad.
    (quality,) = qualities([(each, each.outcome == "accepted") for each in decisions], {})
    by_gate, *_, by_score = quality.estimates
    shares = [share.value for share in (by_gate.accepted, by_gate.precision, by_score.accepted, by_score.precision) if share]
    assert shares == pytest.approx([0.5, 1, 0.5, 0])


def test_domains_with_few_labels_are_together_behind_the_others() -> None:
    decisions = [*sampled(60, "code"), *sampled(80, "fin"), *sampled(20, "law"), *sampled(10, "art")]
    estimated = qualities(zip(decisions, labels_of(decisions).values(), strict=True), {"fin": "finance"})
    assert [(quality.domains, quality.labels) for quality in estimated] == [
        (("finance", "code", "law", "art"), 170),
        (("finance",), 80),
        (("code",), 60),
        (("law", "art"), 30),
    ]
    assert LEAST_LABELS == 50
    assert qualities([(each, None) for each in decisions], {}) == []
    few: list[Quality] = qualities([(each, True) for each in decisions[-30:]], {})
    assert [quality.labels for quality in few] == [30]
    # No trace is good, so none can be missed.
    (none_good,) = qualities([(each, False) for each in decisions[:20]], {})
    assert none_good.estimates[0].recall is None


def run(folder: Path, decisions: list[Decision], labels: dict[str, bool]) -> Result:
    rows = [{"trace_id": trace_id, "good": good} for trace_id, good in labels.items()]
    file, labelled = jsonl_file(folder / "decisions.jsonl", *decisions), jsonl_file(folder / "labels.jsonl", *rows)
    return CliRunner().invoke(commands, ["quality", str(file), "--labels", str(labelled)])


def test_the_command_prints_a_line_for_the_gate_and_for_each_threshold(tmp_path: Path) -> None:
    decisions = [*sampled(100), *sampled(60, "finance"), *sampled(10, "law"), *sampled(30, probability=None, first=200)]
    result = run(tmp_path, decisions, labels_of(decisions))
    assert result.exit_code == 0
    assert "170 of 200 decisions with a label are sampled (review.sample)" in result.stderr
    rows = rows_in(result.stdout)
    gates = [row for row in rows if row["threshold"] is None]
    assert [(row["domain"], row["domains"], row["labels"]) for row in gates] == [
        (None, 3, 170),
        ("code", 1, 100),
        ("finance", 1, 60),
        ("law", 1, 10),
    ]
    assert gates[1]["precision"] == pytest.approx({"value": 0.8, "low": 0.6087, "high": 0.9114}, abs=1e-4)
    assert set(rows[0]) == {"domain", "domains", "labels", "threshold", "accepted", "precision", "recall"}


@pytest.mark.parametrize("probability", [None, 0.5])
def test_without_labels_it_says_what_is_missing(tmp_path: Path, probability: float | None) -> None:
    result = run(tmp_path, sampled(20, probability=probability), {})
    assert isinstance(result.exception, ScorerError)
    assert str(result.exception).startswith("there are no decisions with a label in ")


def test_labels_of_a_file_count_as_they_are_if_no_decision_in_it_is_sampled(tmp_path: Path) -> None:
    decisions = sampled(100, probability=None)
    labels = labels_of(decisions)
    result = run(tmp_path, decisions, labels)
    assert "none of 100 decisions with a label is sampled (review.sample): the figures are of these alone" in result.stderr
    accepted = [each for each in decisions if each.outcome == "accepted"]
    precision = sum(labels[each.trace_id] for each in accepted) / len(accepted)
    gate = rows_in(result.stdout)[0]
    assert (gate["labels"], gate["precision"]["value"]) == (100, pytest.approx(precision, abs=1e-4))


def test_few_labels_are_named_as_few(tmp_path: Path) -> None:
    decisions = sampled(20)
    assert "intervals are checked from 50 labels on" in run(tmp_path, decisions, labels_of(decisions)).stderr
