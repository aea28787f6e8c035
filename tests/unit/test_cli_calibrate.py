"""``kp-scorer calibrate`` writes thresholds that work, and ``re-decide`` tries them on decisions."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

import click
import kp_scorer
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.commands.calibrate import as_toml
from kp_scorer.cli.main import commands
from kp_scorer.cli.options import read_labels
from kp_scorer.decision import Decision, GateResult
from kp_scorer.errors import SettingsError
from kp_scorer.offline import score_traces
from kp_scorer.report.calibration import Calibration, calibrate_samples, samples_of
from kp_scorer.report.suggestion import Target
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import ScoringSettings

from tests.support.builders import decision, minimal_payload
from tests.support.commands import jsonl_file
from tests.support.traces import rows_in, sample_traces

DOMAINS: Final = {"code": 300, "customer service": 200, "d[b]\u0301": 30, "x": 40}
"""The number of traces in each domain. The last two have too few for thresholds of their own."""


def decided() -> list[Decision]:
    rng = np.random.default_rng(1)
    return [
        decision(f"kp:trace:{of_domain}:{number}", domain=domain, score=float(score))
        for of_domain, (domain, count) in enumerate(DOMAINS.items())
        for number, score in enumerate(rng.beta(4, 4, count))
    ]


DECISIONS: Final = decided()
GOOD: Final = {decision.trace_id: decision.score > 0.5 for decision in DECISIONS}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "decisions.jsonl", *DECISIONS)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """A file with the labels of ``GOOD``."""
    rows = [{"trace_id": trace_id, "good": bool(good)} for trace_id, good in GOOD.items()]
    return jsonl_file(tmp_path / "labels.jsonl", *rows)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["calibrate", *map(str, arguments)])


def test_scores_too_alike_for_the_share_get_no_threshold(tmp_path: Path) -> None:
    equal = [decision(f"kp:trace:{number}", domain="code", score=0.4) for number in range(100)]
    output = tmp_path / "thresholds.toml"
    result = run(jsonl_file(tmp_path / "equal.jsonl", *equal), "--accept", "20%", "--output", output)
    assert (result.exit_code, output.exists()) == (1, False)
    assert "scores are too alike to accept 20%: the nearest thresholds accept 0.0% and 100.0%" in result.stderr


def test_written_settings_accept_the_target_share(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "thresholds.toml"
    result = run(file, "--accept", "0.2", "--output", output)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    assert "domains with fewer than 62 traces: 2; they get one threshold, of theirs together" in result.stderr
    assert "within 2 points of 20% in 19 of 20 cases takes 1,537 traces a domain" in result.stderr
    assert "have a label" not in result.stderr
    policy = load_settings(config=output).scoring
    for domain, count in DOMAINS.items():
        accepted = [each.score >= policy.bounds(domain).threshold for each in DECISIONS if each.domain == domain]
        assert domain not in policy.thresholds or sum(accepted) == pytest.approx(0.2 * count)
    assert set(policy.thresholds) == {"code", "customer service"}
    few = [each.score >= policy.threshold for each in DECISIONS if each.domain not in policy.thresholds]
    assert sum(few) == 0.2 * len(few)


def test_labels_give_thresholds_for_a_precision(file: Path, labels: Path) -> None:
    result = run(file, "--precision", "80%", "--labels", labels)
    assert result.exit_code == 0, result.output
    assert "# Copy the section into your own file of settings, or name this one with --config" in result.stdout
    thresholds = tomllib.loads(result.stdout)["scoring"]["thresholds"]
    for domain, threshold in thresholds.items():
        good = [GOOD[each.trace_id] for each in DECISIONS if each.domain == domain and each.score >= threshold]
        assert 0.8 <= sum(good) / len(good) < 0.83
    assert "of these good" in result.stdout
    assert "say of themselves" not in result.stdout
    assert "have a label" not in result.stderr


def test_success_of_traces_labels_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "none")
    traces = [
        minimal_payload(trace_id=f"kp:trace:{number}", confidence=round(float(share), 3), success=bool(number % 3))
        for number, share in enumerate(np.random.default_rng(2).random(150))
    ]
    path = jsonl_file(tmp_path / "traces.jsonl", *traces)
    result = run(path, "--precision", "90%")
    assert result.exit_code == 0, result.output
    assert "# a trace counts as good if it says so itself (metadata.success)" in result.stdout
    threshold = tomllib.loads(result.stdout)["scoring"]["threshold"]
    scored = CliRunner().invoke(commands, ["score", str(path)]).stdout
    scores = {row["trace_id"]: row["score"] for row in rows_in(scored)}
    good = [trace["metadata"]["success"] for trace in traces if scores[trace["id"]] >= threshold]
    assert 0.9 <= sum(good) / len(good) < 0.95
    without = run(jsonl_file(tmp_path / "decisions.jsonl", *rows_in(scored)), "--precision", "90%")
    assert without.exit_code == 2
    assert "no trace has a label" in without.stderr


def test_labels_compare_the_score_with_a_set_at_the_same_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "words")
    # The highest scores belong to failures, which are labelled as bad.
    failures = [minimal_payload(trace_id=f"kp:trace:f{n}", objective=f"Task {n % 5}", success=False) for n in range(60)]
    successes = [
        minimal_payload(trace_id=f"kp:trace:s{n}", objective=f"Task {n % 5}", confidence=0.1 + n / 1_000) for n in range(40)
    ]
    traces = jsonl_file(tmp_path / "traces.jsonl", *failures, *successes)
    rows = [{"trace_id": trace["id"], "good": trace["metadata"]["success"]} for trace in (*failures, *successes)]
    done = run(traces, "--accept", "5%", "--labels", jsonl_file(tmp_path / "labels.jsonl", *rows))
    (note,) = (line for line in done.stderr.splitlines() if line.startswith("at 5% of the traces: by score "))
    assert "by `kp-scorer keep --best 5%` 5 of 5 with a label are good, of 5 different tasks" in note, done.output


def test_a_threshold_that_a_gate_ignores_is_suggested_with_a_note(file: Path) -> None:
    gate = GateResult(adds=0.5, bar=0.7, share=0.1, eligible=True, nearest=None, as_of="0-0")
    gated = jsonl_file(file.with_name("gated.jsonl"), *(each.model_copy(update={"gate": gate}) for each in DECISIONS))
    for path, is_noted in ((file, False), (gated, True)):
        result = run(path, "--accept", "20%")
        assert ("# a gate decided, so a threshold has no effect" in result.stdout) is is_noted, result.output


def test_domains_are_escaped(tmp_path: Path, labels: Path) -> None:
    hostile = "d\x1b[2J\n[bold]" + "o" * 190
    more = [each.model_copy(update={"domain": hostile}) if each.domain == "code" else each for each in DECISIONS]
    path = jsonl_file(tmp_path / "decisions.jsonl", *more)
    # No trace of the first domain is good.
    labels.write_text(re.sub("(:trace:0:.*)true", r"\1false", labels.read_text()))
    result = run(path, "--precision", "80%", "--labels", labels)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert not any(line.startswith("[bold]") for line in result.output.splitlines())
    assert tomllib.loads(result.stdout)["scoring"]["thresholds"].keys() == {hostile, "customer service"}


def test_settings_without_a_suggestion_stay(file: Path, labels: Path) -> None:
    own = ("--set", 'scoring.thresholds={"x": 0.61, "elsewhere": 0.62}', "--set", "scoring.threshold=0.7")
    written = tomllib.loads(run(file, "--accept", "20%", *own).stdout)["scoring"]
    assert (written["thresholds"]["x"], written["thresholds"]["elsewhere"]) == (0.61, 0.62)
    labels.write_text(labels.read_text().replace("true", "false"))
    result = run(file, "--precision", "80%", "--labels", labels, *own)
    assert result.exit_code == 1
    assert "nothing to suggest: no threshold with 28 labelled traces above it has 80% good ones" in result.stderr
    assert result.stdout == ""


def test_small_domain_keeps_its_own_threshold(file: Path) -> None:
    of_x = [each for each in DECISIONS if each.domain == "x"]
    small = [each.model_copy(update={"trace_id": f"{each.trace_id}:y", "domain": "y"}) for each in of_x]
    without = run(file, "--accept", "20%")
    jsonl_file(file, *DECISIONS, *small)
    result = run(file, "--accept", "20%", "--set", 'scoring.thresholds={"y": 0.9}')
    assert result.exit_code == 0, result.output
    assert "domains with fewer than 62 traces: 2; they get one threshold, of theirs together" in result.stderr
    assert "y: fewer than 62 traces are too few for 20%; it stays at 0.9" in result.stderr
    written = tomllib.loads(result.stdout)["scoring"]
    assert written["thresholds"]["y"] == 0.9
    assert written["threshold"] == tomllib.loads(without.stdout)["scoring"]["threshold"]
    assert "# All domains without one of their own together, 70 traces" in result.stdout


def test_a_chosen_domain_leaves_the_threshold_of_all_others_as_it_is(file: Path) -> None:
    done = run(file, "--accept", "20%", "--domain", "code", "--set", "scoring.threshold=0.61")
    assert done.exit_code == 0, done.output
    scoring = tomllib.loads(done.stdout)["scoring"]
    assert (scoring["threshold"], list(scoring["thresholds"])) == (0.61, ["code"])
    assert run(file, "--accept", "20%", "--domain", "x").exit_code == 1, "40 traces are too few"


def test_alias_counts_for_its_domain(file: Path, tmp_path: Path) -> None:
    (config := tmp_path / "mine.toml").write_text('[scoring.aliases]\n"customer service" = "code"\n')
    result = run(file, "--accept", "20%", "--config", config)
    assert tomllib.loads(result.stdout)["scoring"]["thresholds"].keys() == {"code"}
    # The suggested thresholds can be loaded together with the aliases.
    config.write_text(result.stdout + config.read_text())
    load_settings(config=config)


def test_reviews_above_a_new_threshold_are_named(file: Path) -> None:
    own = ("--set", "scoring.review=0.7", "--set", 'scoring.reviews={"a b": 0.72}')
    result = run(file, "--accept", "60%", *own)
    for lines in (result.stderr.splitlines(), [line.removeprefix("# ") for line in result.stdout.splitlines()]):
        clashes = [line.partition(": expected at most the threshold")[0] for line in lines if "change this too" in line]
        named = ["review", "reviews.code", "reviews.customer service", "reviews.a b"]
        assert clashes == [f"change this too: scoring.{name}" for name in named]
    assert tomllib.loads(result.stdout)["scoring"].keys() == {"threshold", "thresholds"}


SHARES: Final = ("20", "0", "100%", "half", "nan", "0.09%", "99.91%")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected either --accept or --precision"),
        (["--accept", "20%", "--precision", "90%"], "expected either --accept or --precision"),
        *((["--accept", share], "expected a share between 0.1% and 99.9%, such as 20% or 0.2") for share in SHARES),
    ],
)
def test_exactly_one_target_between_its_bounds_is_required(file: Path, arguments: list[str], message: str) -> None:
    result = run(file, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"trace_id": "kp:trace:1", "good": 1}', "line 1: good: Input should be a valid boolean"),
        ('{"trace_id": "kp:trace:1", "good": "yes"}', "line 1: good: Input should be a valid boolean"),
        ('{"trace_id": "kp:trace:1", "good": true}\n{"good": true}', "line 2: trace_id: Field required"),
        ('{"trace_id": "kp:trace:1", "good": true}\n[]', "line 2: expected a JSON object"),
        ("trace_id,good\nkp:trace:1,true\n", "line 1: expected a JSON object"),
    ],
)
def test_wrong_label_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "labels").write_text(text)
    with pytest.raises(click.BadParameter, match=message):
        read_labels(None, None, str(tmp_path / "labels"))


def test_labels_that_contradict_each_other_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"trace_id": "kp:trace:1", "good": good} for good in (True, True, False)]
    assert read_labels(None, None, str(jsonl_file(tmp_path / "labels", *rows))) == {"kp:trace:1": False}
    assert "1 labels contradict an earlier one of the same trace: the latest counts" in capsys.readouterr().err


NAMES: Final = st.text(st.characters(exclude_categories=["Cs"]))
THRESHOLDS: Final = st.integers(0, 10_000).map(lambda step: step / 10_000)


@cache
def calibration() -> Calibration:
    return calibrate_samples(samples_of(((each, None) for each in DECISIONS), {}), Target("accept", 0.2))


@given(st.dictionaries(NAMES, THRESHOLDS))
def test_toml_round_trips_any_domain_name(domains: dict[str, float]) -> None:
    scoring = ScoringSettings.model_construct(threshold=0.5, thresholds=domains)
    written = tomllib.loads(as_toml(scoring, calibration(), Target("accept", 0.2), ["change this too: a"]))
    assert written == {"scoring": {"threshold": 0.5} | ({"thresholds": domains} if domains else {})}


def test_producers_are_named_so_that_none_passes_for_another(tmp_path: Path, labels: Path) -> None:
    agents = ["none 82.2%, trusted 17", None, "none", "\u200bnone"]
    named = [each.model_copy(update={"agent_id": agents[number % 4]}) for number, each in enumerate(DECISIONS)]
    result = run(jsonl_file(tmp_path / "decisions.jsonl", *named), "--accept", "20%")
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("traces by --agent"))
    for name in ('"none 82.2%, trusted 17" ', '"" ', '"none" ', '"\\u200bnone" '):
        assert name in line


SAMPLES: Final = list(score_traces(sample_traces(), load_settings({"embedding.embedder": "none"})))
OTHER_WEIGHTS: Final = "{ complexity = 0.0, novelty = 0.0, tool_diversity = 0.0, outcome_confidence = 1.0 }"


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "decisions.jsonl", *SAMPLES)


def decided_again(samples: Path, toml: str) -> Result:
    file = samples.with_name("thresholds.toml")
    file.write_text(toml)
    return CliRunner().invoke(commands, ["re-decide", str(samples), "--thresholds", str(file)])


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return rows_in(result.stdout)


def test_flips_are_printed_with_both_outcomes(samples: Path) -> None:
    before = samples.read_bytes()
    result = decided_again(samples, "[scoring.thresholds]\ncode = 0.1\n")
    flipped = rows(result)
    expected = [decision for decision in SAMPLES if decision.domain == "code" and decision.outcome == "rejected"]
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
    assert f"{len(flipped)} of {len(SAMPLES)} decisions flip (" in result.stderr
    of_code = [decision for decision in SAMPLES if decision.domain == "code"]
    assert f"code: {len(flipped)} of {len(of_code)} decisions flip (" in result.stderr
    accepted = sum(decision.outcome == "accepted" for decision in SAMPLES)
    shares = (accepted / len(SAMPLES), (accepted + len(flipped)) / len(SAMPLES))
    assert "accepted before and after: {:.1%}, {:.1%}".format(*shares) in result.stderr
    assert samples.read_bytes() == before


def test_redecide_reports_decisions_with_other_weights(samples: Path) -> None:
    result = decided_again(samples, f"[scoring.profiles]\ncode = {OTHER_WEIGHTS}\n")
    of_code = [decision for decision in SAMPLES if decision.domain == "code"]
    assert f"{len(of_code)} have other weights than they were decided with" in result.stderr
    assert {row["domain"] for row in rows(result)} == {"code"}


def test_a_ceiling_of_confidence_needs_the_traces(samples: Path) -> None:
    result = decided_again(samples, "[scoring]\nmax_confidence = 0.1\n")
    assert rows(result) == []
    assert f"{len(SAMPLES)} were decided by another scoring.max_confidence" in result.stderr


def test_a_notebook_calibrates_and_decides_again_without_a_subprocess() -> None:
    settings = load_settings({"embedding.embedder": "none", "scoring.threshold": 0.9})
    scored = [decision.model_copy(update={"trace_id": f"{decision.trace_id}{copy}"}) for decision in SAMPLES for copy in "abcd"]
    calibrated = kp_scorer.calibrate(scored, accept=0.3, settings=settings)
    assert calibrated.embedding == settings.embedding
    assert calibrated.scoring.threshold < 0.9
    again = kp_scorer.re_decide(scored, calibrated)
    share = sum(decision.outcome == "accepted" for decision in again) / len(again)
    assert 0.2 <= share <= 0.4
    assert [decision.trace_id for decision in again] == [decision.trace_id for decision in scored]
    # Label the traces by their scores.
    good = {decision.trace_id: decision.score > 0.6 for decision in scored}
    assert kp_scorer.calibrate(scored, precision=0.9, good=good, settings=settings).scoring.threshold > 0.5


def test_a_calibration_without_one_target_is_refused() -> None:
    for accept, precision in ((None, None), (0.2, 0.5), (20.0, None)):
        with pytest.raises(ValueError, match="a share between 0 and 1"):
            kp_scorer.calibrate(SAMPLES, accept=accept, precision=precision)
    reviewed = load_settings({"scoring.review": 0.74})
    with pytest.raises(SettingsError, match=r"scoring\.review: expected at most"):
        kp_scorer.calibrate(SAMPLES * 4, accept=0.5, settings=reviewed)
