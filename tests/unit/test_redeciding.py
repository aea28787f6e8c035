"""What other thresholds or weights would have decided, and ``kp-scorer re-decide``, which says so."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.analysis.flips import Flips, flips_by_domain, redecided
from kp_scorer.cli.main import commands
from kp_scorer.offline import score_traces
from kp_scorer.scoring import Policy
from kp_scorer.settings import load_settings

from tests.support.traces import sample_traces

DECISIONS: Final = list(score_traces(sample_traces(), load_settings({"embedding.embedder": "none"})))
OTHER_WEIGHTS: Final = "{ complexity = 0.0, novelty = 0.0, tool_diversity = 0.0, outcome_confidence = 1.0 }"


@given(st.floats(0, 1), st.none() | st.floats(0, 1))
def test_flips_are_the_differences_between_the_outcomes(threshold: float, review: float | None) -> None:
    policy = Policy(threshold=threshold, review=review)
    pairs = redecided(DECISIONS, policy)
    assert [pair.before for pair in pairs] == DECISIONS
    by_domain = flips_by_domain(pairs)
    assert list(by_domain) == sorted({decision.domain for decision in DECISIONS})
    for domain, flips in by_domain.items():
        of_domain = [pair for pair in pairs if pair.before.domain == domain]
        flipped = Counter(policy.bounds(domain).outcome(pair.before.score) for pair in of_domain if pair.is_flip)
        assert (flips.to_accepted, flips.to_review, flips.to_rejected) == tuple(
            flipped[outcome] for outcome in ("accepted", "review", "rejected")
        )
        assert flips.traces == len(of_domain)
        assert flips.accepted_before == sum(pair.before.outcome == "accepted" for pair in of_domain)
        flipped_from = Counter(pair.before.outcome for pair in of_domain if pair.is_flip)
        between = sum(pair.is_flip and "accepted" not in (pair.before.outcome, pair.after.outcome) for pair in of_domain)
        assert flips.by_acceptance == (flipped["accepted"], flipped_from["accepted"], between)


def test_flips_add_up() -> None:
    assert Flips(1, 2, 3, 4, 5, 6) + Flips(10, 20, 30, 40, 50, 60) == Flips(11, 22, 33, 44, 55, 66)


@pytest.fixture
def decisions(tmp_path: Path) -> Path:
    """A file of decisions."""
    file = tmp_path / "decisions.jsonl"
    file.write_text("".join(f"{decision.model_dump_json()}\n" for decision in DECISIONS))
    return file


def run(decisions: Path, toml: str, *arguments: str) -> Result:
    file = decisions.with_name("thresholds.toml")
    file.write_text(toml)
    return CliRunner().invoke(commands, ["re-decide", str(decisions), "--thresholds", str(file), *arguments])


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_flips_are_printed_with_what_was_and_what_would_be(decisions: Path) -> None:
    before = decisions.read_bytes()
    result = run(decisions, "[scoring.thresholds]\ncode = 0.1\n")
    found = rows(result)
    expected = [decision for decision in DECISIONS if decision.domain == "code" and decision.outcome == "rejected"]
    assert [row["trace_id"] for row in found] == [decision.trace_id for decision in expected]
    assert found[0] == {
        "trace_id": expected[0].trace_id,
        "domain": "code",
        "outcome_before": "rejected",
        "outcome_after": "accepted",
        "score_before": expected[0].score,
        "score_after": expected[0].score,
        "threshold_before": 0.75,
        "threshold_after": 0.1,
    }
    assert f"{len(found)} of {len(DECISIONS)} decisions flip" in result.stderr
    assert decisions.read_bytes() == before


def test_the_same_thresholds_flip_nothing(decisions: Path) -> None:
    result = run(decisions, "[scoring]\nthreshold = 0.75\n")
    assert rows(result) == []
    assert f"0 of {len(DECISIONS)} decisions flip" in result.stderr


def test_other_weights_give_other_scores_and_that_is_said(decisions: Path) -> None:
    result = run(decisions, f"[scoring.profiles]\ncode = {OTHER_WEIGHTS}\n")
    of_code = [decision for decision in DECISIONS if decision.domain == "code"]
    assert f"{len(of_code)} have other weights than they were decided with" in result.stderr
    assert {row["domain"] for row in rows(result)} == {"code"}


def test_what_the_file_does_not_name_is_as_the_settings_have_it(decisions: Path) -> None:
    toml = "[scoring.thresholds]\ncode = 0.1\n"
    found = rows(run(decisions, toml, "--set", "scoring.threshold=1"))
    assert {row["threshold_after"] for row in found if row["domain"] == "code"} == {0.1}
    assert {row["threshold_after"] for row in found if row["domain"] != "code"} == {1}


def test_what_would_win_over_the_file_for_a_worker_is_said_and_does_not_win_here(
    decisions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLD", "0.9")
    monkeypatch.setenv("KP_SCORING_CAP_STEP_TERM", "true")
    flags = ("--set", 'scoring.thresholds={"code": 0.8}', "--set", "scoring.submitted_thresholds=false")
    result = run(decisions, "[scoring]\nthreshold = 0.0\n[scoring.thresholds]\ncode = 0.0\n", *flags)
    assert {row["threshold_after"] for row in rows(result)} == {0}
    tried = decisions.with_name("thresholds.toml")
    said = f"for a worker KP_SCORING_THRESHOLD and --set scoring.thresholds would win over {tried}"
    assert said in result.stderr.splitlines()
    result = run(decisions, "[scoring]\nreview = 0.1\n", *flags)
    assert "would win over" not in result.stderr


def test_table_counts_by_domain_and_fits_a_terminal(decisions: Path) -> None:
    with_long = decisions.with_name("long.jsonl")
    long = DECISIONS[0].model_copy(update={"trace_id": "kp:trace:long", "domain": "d\x1b[2J[b]" + "o" * 190})
    with_long.write_text(decisions.read_text() + long.model_dump_json() + "\n")
    result = run(with_long, "[scoring]\nthreshold = 0.5\nreview = 0.3\n")
    table = [line for line in result.stderr.splitlines() if "%" in line or "flips" in line]
    assert max(map(len, table)) <= 80
    assert "\x1b" not in result.stderr
    assert "d\\u001b[2J[b]" in result.stderr
    pairs = redecided([*DECISIONS, long], Policy(threshold=0.5, review=0.3))
    flips = sum(flips_by_domain(pairs).values(), Flips())
    (of_all,) = (line.split() for line in table if line.startswith("(all)"))
    assert of_all[1] == str(len(DECISIONS) + 1)
    assert of_all[4:] == [str(figure) for figure in (flips.total, flips.to_accepted, flips.to_review, flips.to_rejected)]


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[scoring.thresholds]\ncode = 2\n", "scoring.thresholds.code: Input should be less than or equal to 1"),
        ("[scoring]\ntreshold = 0.5\n", "scoring.treshold: no setting has this name"),
        ("[scoring]\nreview = 0.9\n", "review: expected at most the threshold of 0.75"),
        ("threshold = 0.5\n", "scoring: expected a section of this name"),
        ("[scoring\n", "thresholds.toml: "),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(decisions: Path, toml: str, said: str) -> None:
    result = run(decisions, toml)
    assert result.exit_code != 0
    assert said in str(result.exception)


def test_lines_that_are_no_decisions_are_named_and_the_others_decided_again(decisions: Path) -> None:
    decisions.write_text(decisions.read_text() + "{}\n")
    result = run(decisions, "[scoring]\nthreshold = 0.0\n")
    assert result.exit_code == 1
    assert f"line {len(DECISIONS) + 1}: " in result.stderr
    assert len(result.stdout.splitlines()) == sum(decision.outcome == "rejected" for decision in DECISIONS)
