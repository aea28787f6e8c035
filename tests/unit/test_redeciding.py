"""``kp-scorer re-decide``: what other thresholds or weights would have decided."""

from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from kp_scorer import SettingsError, calibrate, re_decide
from kp_scorer.cli.main import commands
from kp_scorer.offline import score_traces
from kp_scorer.settings import load_settings

from tests.support.commands import jsonl_file
from tests.support.traces import rows_in, sample_traces

DECISIONS: Final = list(score_traces(sample_traces(), load_settings({"embedding.embedder": "none"})))
OTHER_WEIGHTS: Final = "{ complexity = 0.0, novelty = 0.0, tool_diversity = 0.0, outcome_confidence = 1.0 }"


@pytest.fixture
def decisions(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "decisions.jsonl", *DECISIONS)


def run(decisions: Path, toml: str) -> Result:
    file = decisions.with_name("thresholds.toml")
    file.write_text(toml)
    return CliRunner().invoke(commands, ["re-decide", str(decisions), "--thresholds", str(file)])


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return rows_in(result.stdout)


def test_flips_are_printed_with_both_outcomes(decisions: Path) -> None:
    before = decisions.read_bytes()
    result = run(decisions, "[scoring.thresholds]\ncode = 0.1\n")
    flipped = rows(result)
    expected = [decision for decision in DECISIONS if decision.domain == "code" and decision.outcome == "rejected"]
    assert [row["trace_id"] for row in flipped] == [decision.trace_id for decision in expected]
    assert flipped[0] == {
        "trace_id": expected[0].trace_id,
        "domain": "code",
        "outcome_before": "rejected",
        "outcome_after": "accepted",
        "score_before": expected[0].score,
        "score_after": expected[0].score,
        "threshold_before": 0.75,
        "threshold_after": 0.1,
    }
    assert f"{len(flipped)} of {len(DECISIONS)} decisions flip" in result.stderr
    accepted = sum(decision.outcome == "accepted" for decision in DECISIONS)
    shares = (accepted / len(DECISIONS), (accepted + len(flipped)) / len(DECISIONS))
    assert "accepted before and after: {:.1%}, {:.1%}".format(*shares) in result.stderr
    assert decisions.read_bytes() == before


def test_redecide_reports_decisions_with_other_weights(decisions: Path) -> None:
    result = run(decisions, f"[scoring.profiles]\ncode = {OTHER_WEIGHTS}\n")
    of_code = [decision for decision in DECISIONS if decision.domain == "code"]
    assert f"{len(of_code)} have other weights than they were decided with" in result.stderr
    assert {row["domain"] for row in rows(result)} == {"code"}


def test_a_ceiling_of_confidence_needs_the_traces(decisions: Path) -> None:
    result = run(decisions, "[scoring]\nmax_confidence = 0.1\n")
    assert rows(result) == []
    assert f"{len(DECISIONS)} were decided by another scoring.max_confidence" in result.stderr


def test_a_notebook_calibrates_and_decides_again_without_a_subprocess() -> None:
    settings = load_settings({"embedding.embedder": "none", "scoring.threshold": 0.9})
    scored = [
        decision.model_copy(update={"trace_id": f"{decision.trace_id}{copy}"}) for decision in DECISIONS for copy in "abcd"
    ]
    calibrated = calibrate(scored, accept=0.3, settings=settings)
    assert calibrated.embedding == settings.embedding
    assert calibrated.scoring.threshold < 0.9
    again = re_decide(scored, calibrated)
    share = sum(decision.outcome == "accepted" for decision in again) / len(again)
    assert 0.2 <= share <= 0.4
    assert [decision.trace_id for decision in again] == [decision.trace_id for decision in scored]
    # By its labels.
    good = {decision.trace_id: decision.score > 0.6 for decision in scored}
    assert calibrate(scored, precision=0.9, good=good, settings=settings).scoring.threshold > 0.5


def test_a_calibration_without_one_target_is_refused() -> None:
    for accept, precision in ((None, None), (0.2, 0.5), (20.0, None)):
        with pytest.raises(ValueError, match="a share between 0 and 1"):
            calibrate(DECISIONS, accept=accept, precision=precision)
    reviewed = load_settings({"scoring.review": 0.74})
    with pytest.raises(SettingsError, match=r"scoring\.review: expected at most"):
        calibrate(DECISIONS * 4, accept=0.5, settings=reviewed)
