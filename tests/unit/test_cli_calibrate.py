"""``kp-scorer calibrate``: what it reads, what it writes, and that what it writes works."""

import json
import tomllib
from pathlib import Path
from typing import Final

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.analysis.calibration import calibrate, samples_of
from kp_scorer.analysis.target import Target
from kp_scorer.cli.labels import read_labels
from kp_scorer.cli.main import commands
from kp_scorer.cli.thresholds_file import Thresholds, as_toml, head_of
from kp_scorer.decision import Decision
from kp_scorer.settings import load_settings

from tests.support.builders import Payload, decision_on, minimal_payload

PLAIN: Final = Decision.model_validate_json(decision_on("kp:trace:plain"))
DOMAINS: Final = {"code": 300, "customer service": 200, "d[b]\u0301": 30, "x": 40}
"""How many traces of each; the last two have too few."""


def decided() -> list[Decision]:
    rng = np.random.default_rng(1)
    return [
        PLAIN.model_copy(update={"trace_id": f"kp:trace:{of_domain}:{number}", "domain": domain, "score": float(score)})
        for of_domain, (domain, count) in enumerate(DOMAINS.items())
        for number, score in enumerate(rng.beta(4, 4, count))
    ]


DECISIONS: Final = decided()
GOOD: Final = {decision.trace_id: decision.score > 0.5 for decision in DECISIONS}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of decisions."""
    path = tmp_path / "decisions.jsonl"
    path.write_text("".join(f"{decision.model_dump_json()}\n" for decision in DECISIONS))
    return path


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """A file that says which of them were good."""
    path = tmp_path / "labels.csv"
    path.write_text("good,trace_id\n" + "".join(f"{str(good).lower()},{trace_id}\n" for trace_id, good in GOOD.items()))
    return path


def without_good_ones_in_the_first_domain(labels: str) -> str:
    return "".join(line.replace("true", "no") if ":trace:0:" in line else line for line in labels.splitlines(keepends=True))


def written_to(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(commands, ["calibrate", *map(str, arguments)])


def test_settings_that_it_writes_accept_the_share_asked_for(file: Path, tmp_path: Path) -> None:
    output = tmp_path / "thresholds.toml"
    result = run(file, "--accept", "20%", "--output", output)
    assert (result.exit_code, result.stdout) == (0, ""), result.output
    policy = load_settings(config=output).scoring.policy()
    for domain, count in DOMAINS.items():
        accepted = [one.score >= policy.bounds(domain).threshold for one in DECISIONS if one.domain == domain]
        assert domain not in policy.thresholds or sum(accepted) == pytest.approx(0.2 * count)
    assert set(policy.thresholds) == {"code", "customer service"}
    few = [one.score >= policy.threshold for one in DECISIONS if one.domain not in policy.thresholds]
    assert sum(few) == 0.2 * len(few)


def test_without_output_settings_go_to_stdout_and_all_else_to_stderr(file: Path) -> None:
    result = run(file, "--accept", "0.2")
    assert result.exit_code == 0
    written = tomllib.loads(result.stdout)["scoring"]
    assert written["thresholds"].keys() == {"code", "customer service"}
    assert "2 with fewer than 62 traces: they get one threshold, of theirs together" in result.stderr
    assert "within 2 points of 20% in 19 of 20 cases takes 1,537 traces a domain" in result.stderr
    assert "tried on 30% of each domain's traces" in result.stderr


def test_the_same_input_gives_the_same_output(file: Path) -> None:
    assert run(file, "--accept", "20%").output == run(file, "--accept", "20%").output


def test_labels_give_thresholds_for_a_precision(file: Path, labels: Path) -> None:
    result = run(file, "--precision", "80%", "--labels", labels)
    assert result.exit_code == 0, result.output
    thresholds = tomllib.loads(result.stdout)["scoring"]["thresholds"]
    for domain, threshold in thresholds.items():
        good = [GOOD[one.trace_id] for one in DECISIONS if one.domain == domain and one.score >= threshold]
        assert 0.8 <= sum(good) / len(good) < 0.83
    assert "of these good" in result.stdout


def test_traces_say_themselves_whether_they_were_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "none")
    rng = np.random.default_rng(2)
    traces = [
        minimal_payload(trace_id=f"kp:trace:{number}", confidence=round(float(share), 3), success=bool(number % 3))
        for number, share in enumerate(rng.random(150))
    ]
    path = tmp_path / "traces.jsonl"
    path.write_text(_lines(traces))
    result = run(path, "--precision", "90%")
    assert result.exit_code == 0, result.output
    threshold = tomllib.loads(result.stdout)["scoring"]["threshold"]
    decisions = tmp_path / "decisions.jsonl"
    decisions.write_text(CliRunner().invoke(commands, ["score", str(path)]).stdout)
    scores = {row["trace_id"]: row["score"] for row in map(json.loads, decisions.read_text().splitlines())}
    good = [trace["metadata"]["success"] for trace in traces if scores[trace["id"]] >= threshold]
    assert 0.9 <= sum(good) / len(good) < 0.95
    without = run(decisions, "--precision", "90%")
    assert without.exit_code == 2
    assert "no trace is known to be good or not" in without.stderr


def test_tables_fit_a_terminal_and_nothing_in_them_acts_on_it(tmp_path: Path, labels: Path) -> None:
    hostile = "d\x1b[2J\n[bold]" + "o" * 190
    path = tmp_path / "hostile.jsonl"
    more = [one.model_copy(update={"domain": hostile}) if one.domain == "code" else one for one in DECISIONS]
    path.write_text("".join(f"{decision.model_dump_json()}\n" for decision in more))
    labels.write_text(without_good_ones_in_the_first_domain(labels.read_text()))
    result = run(path, "--precision", "80%", "--labels", labels)
    assert result.exit_code == 0, result.output
    begin = ("domain ", "d\\u001b[2J\\u000…", "x ", "(all others) ")
    tables = [line for line in result.stderr.splitlines() if line.startswith(begin)]
    assert len(tables) == 6
    assert max(map(len, tables)) <= 80
    assert "\x1b" not in result.output
    assert not any(line.startswith("[bold]") for line in result.output.splitlines())
    assert tomllib.loads(result.stdout)["scoring"]["thresholds"].keys() == {hostile, "customer service"}


def test_what_nothing_is_suggested_for_stays_as_it_is_set(file: Path, labels: Path) -> None:
    own = ("--set", 'scoring.thresholds={"x": 0.61, "elsewhere": 0.62}', "--set", "scoring.threshold=0.7")
    written = tomllib.loads(run(file, "--accept", "20%", *own).stdout)["scoring"]
    assert (written["thresholds"]["x"], written["thresholds"]["elsewhere"]) == (0.61, 0.62)
    labels.write_text(labels.read_text().replace("true", "false"))
    result = run(file, "--precision", "80%", "--labels", labels, *own)
    assert result.exit_code == 1
    assert "nothing to suggest: no threshold with 28 labelled traces above it has 80% good ones" in result.stderr
    assert result.stdout == ""


def test_a_small_domain_with_a_threshold_of_its_own_stays_at_it_and_has_no_part_in_the_others(file: Path) -> None:
    of_x = [one for one in DECISIONS if one.domain == "x"]
    small = [one.model_copy(update={"trace_id": f"{one.trace_id}:y", "domain": "y\x1b"}) for one in of_x]
    without = run(file, "--accept", "20%")
    file.write_text("".join(f"{decision.model_dump_json()}\n" for decision in [*DECISIONS, *small]))
    result = run(file, "--accept", "20%", "--set", 'scoring.thresholds={"y\\u001b": 0.9}')
    assert result.exit_code == 0, result.output
    assert "2 with fewer than 62 traces: they get one threshold, of theirs together" in result.stderr
    assert "y\\u001b: fewer than 62 traces are too few for 20%; it stays at 0.9" in result.stderr
    written = tomllib.loads(result.stdout)["scoring"]
    assert written["thresholds"]["y\x1b"] == 0.9
    assert written["threshold"] == tomllib.loads(without.stdout)["scoring"]["threshold"]
    assert "# All domains without one of their own together, 70 traces" in result.stdout


def test_variables_that_would_win_over_what_it_writes_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_SCORING_THRESHOLD", "0.9")
    result = run(file, "--accept", "20%")
    assert "for a worker KP_SCORING_THRESHOLD would win over these thresholds" in result.stderr


def test_decisions_of_an_alias_count_for_its_domain(file: Path, tmp_path: Path) -> None:
    config = tmp_path / "mine.toml"
    config.write_text('[scoring.aliases]\n"customer service" = "code"\n')
    result = run(file, "--accept", "20%", "--config", config)
    assert tomllib.loads(result.stdout)["scoring"]["thresholds"].keys() == {"code"}
    # They go with the aliases.
    load_settings(config=written_to(tmp_path / "both.toml", result.stdout + config.read_text()))


def test_a_domain_without_the_precision_keeps_its_threshold_and_that_is_said(file: Path, labels: Path) -> None:
    labels.write_text(without_good_ones_in_the_first_domain(labels.read_text()))
    result = run(file, "--precision", "60%", "--labels", labels, "--set", "scoring.threshold=0.7")
    assert result.exit_code == 0, result.output
    written = tomllib.loads(result.stdout)["scoring"]
    assert written["thresholds"]["code"] == 0.7
    assert written["thresholds"]["customer service"] != 0.7
    assert "code: no threshold with 41 labelled traces above it has 60% good ones; it stays at 0.7" in result.stderr


def test_ties_that_keep_a_share_off_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tied.jsonl"
    scores = [0.1] * 60 + [0.3] * 50 + [0.5] * 10
    tied = [PLAIN.model_copy(update={"trace_id": f"kp:trace:{n}", "score": score}) for n, score in enumerate(scores)]
    path.write_text("".join(f"{decision.model_dump_json()}\n" for decision in tied))
    result = run(path, "--accept", "20%")
    assert "8.3% is as near to 20% as it gets: too many of its traces have one score" in result.stderr
    assert tomllib.loads(result.stdout)["scoring"]["threshold"] == 0.4


def test_too_few_traces_are_told_nothing(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f"{decision.model_dump_json()}\n" for decision in DECISIONS[:61]))
    result = run(path, "--accept", "20%")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "nothing to suggest: fewer than 62 traces are too few for 20%" in result.stderr


def test_every_review_above_a_new_threshold_is_named_also_in_the_file(file: Path) -> None:
    own = ("--set", "scoring.review=0.7", "--set", 'scoring.reviews={"a\\nb": 0.72}')
    result = run(file, "--accept", "60%", *own)
    for said in (result.stderr.splitlines(), [line.removeprefix("# ") for line in result.stdout.splitlines()]):
        clashes = [line.partition(": expected at most the threshold")[0] for line in said if "change this too" in line]
        named = ["review", "reviews.code", "reviews.customer service", "reviews.a\\u000ab"]
        assert clashes == [f"change this too: scoring.{name}" for name in named]
    assert tomllib.loads(result.stdout)["scoring"].keys() == {"threshold", "thresholds"}


@pytest.mark.parametrize("way", ["--config", "KP_CONFIG", "--set"])
def test_the_file_is_not_to_take_the_place_of_settings_that_say_more(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    assert "# Name this file with --config or KP_CONFIG, or take" in run(file, "--accept", "20%").stdout
    assert "# Name this file" in run(file, "--accept", "20%", "--set", "scoring.threshold=0.6").stdout
    config = written_to(tmp_path / "mine.toml", "[log]\nlevel = 'error'\n")
    if way == "KP_CONFIG":
        monkeypatch.setenv(way, str(config))
    ways = {"--config": ["--config", str(config)], "KP_CONFIG": [], "--set": ["--set", "scoring.review=0.1"]}
    flags = ways[way]
    written = run(file, "--accept", "20%", *flags).stdout
    assert "# Take the section over into your own" in written
    assert "Name this file" not in written


def test_a_file_that_is_there_is_left_alone(file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[broker]\n")
    result = run(file, "--accept", "20%", "--output", mine)
    assert result.exit_code == 2
    assert "is there already" in result.stderr
    assert mine.read_text() == "[broker]\n"


@pytest.mark.parametrize("arguments", [[], ["--accept", "20%", "--precision", "90%"]])
def test_there_is_one_target(file: Path, arguments: list[str]) -> None:
    result = run(file, *arguments)
    assert result.exit_code == 2
    assert "expected either --accept or --precision" in result.stderr


@pytest.mark.parametrize(
    "share", ["20", "0", "0%", "100%", "1", "-5%", "half", "nan", "inf", "1e-320", "0.09%", "99.91%", "0.9999999999999999"]
)
def test_a_share_is_neither_nothing_nor_all(file: Path, share: str) -> None:
    result = run(file, "--accept", share)
    assert result.exit_code == 2
    assert "expected a share between 0.1% and 99.9%, such as 20% or 0.2" in result.stderr


@pytest.mark.parametrize("share", ["0.1%", "0.001", "99.9%", "0.999"])
def test_the_least_and_the_largest_share_are_taken(file: Path, share: str) -> None:
    result = run(file, "--accept", share)
    assert result.exit_code == 1
    assert "nothing to suggest: fewer than 10000 traces are too few" in result.stderr


def test_how_many_traces_have_a_label_is_said_unless_all_have(file: Path, labels: Path) -> None:
    assert "have a label" not in run(file, "--accept", "20%", "--labels", labels).stderr
    assert "have a label" not in run(file, "--accept", "20%").stderr
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[:3]))
    assert f"2 of {len(DECISIONS)} traces have a label" in run(file, "--accept", "20%", "--labels", labels).stderr


def test_labels_of_other_traces_are_of_no_use(file: Path, tmp_path: Path) -> None:
    (tmp_path / "others.jsonl").write_text('{"trace_id": "kp:trace:other", "good": true}\n')
    result = run(file, "--accept", "20%", "--labels", tmp_path / "others.jsonl")
    assert result.exit_code == 2
    assert "no trace is known to be good or not" in result.stderr


def test_lines_that_are_no_decisions_are_named_and_the_others_count(file: Path) -> None:
    file.write_text(file.read_text() + "{}\n")
    result = run(file, "--accept", "20%")
    assert result.exit_code == 1
    assert f"line {len(DECISIONS) + 1}: " in result.stderr
    assert tomllib.loads(result.stdout)["scoring"]["threshold"]


@pytest.mark.parametrize(
    "text",
    [
        '{"trace_id": "kp:trace:1", "good": true}\n\n{"good": false, "trace_id": "kp:trace:2", "by": "me"}\n',
        "trace_id,good\nkp:trace:1,true\nkp:trace:2,false\n",
        '\ufeffgood,note,trace_id\r\nYes,"a, b",kp:trace:1\r\n0,,kp:trace:2\r\n1,,kp:trace:1\r\n',
    ],
)
def test_labels_are_json_lines_or_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels").write_bytes(text.encode())
    assert read_labels(tmp_path / "labels") == {"kp:trace:1": True, "kp:trace:2": False}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"trace_id": "kp:trace:1", "good": 1}', "line 1: good: expected true or false"),
        ('{"trace_id": "kp:trace:1", "good": true}\n{"good": true}', "line 2: trace_id: expected a text"),
        ('{"trace_id": "kp:trace:1", "good": true}\n[]', "line 2: expected a JSON object"),
        ("trace_id,good\nkp:trace:1,maybe\n", "line 2: good: expected one of true, yes, 1, false, no, 0"),
        ("trace_id,good\nkp:trace:1\n", "line 2: good: expected one of"),
        ("id,good\nkp:trace:1,true\n", "line 1: trace_id: expected columns of this name, or JSON Lines"),
        ("", "line 1: good and trace_id: expected columns"),
        ("trace_id,good\na,true\nb,true\na,false\n", "line 4: good: this trace has the other label on an earlier line"),
    ],
)
def test_a_label_that_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "labels").write_text(text)
    with pytest.raises(click.BadParameter, match=said):
        read_labels(tmp_path / "labels")


def test_a_file_of_labels_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match="absent: No such file"):
        read_labels(tmp_path / "absent")
    (tmp_path / "latin").write_bytes("trace_id,good\nkp:é,true\n".encode("latin-1"))
    with pytest.raises(click.BadParameter, match="latin: expected UTF-8"):
        read_labels(tmp_path / "latin")


NAMES: Final = st.text(st.characters(exclude_categories=["Cs"]))
THRESHOLDS: Final = st.integers(0, 10_000).map(lambda step: step / 10_000)
FOUND: Final = calibrate(samples_of(DECISIONS, {}, {}), Target("accept", 0.2))


@given(st.dictionaries(NAMES, THRESHOLDS))
def test_toml_says_what_is_meant_whatever_domains_are_called(domains: dict[str, float]) -> None:
    head = list(head_of(Target("accept", 0.2), is_whole=True))
    written = tomllib.loads(as_toml(Thresholds(0.5, domains), FOUND, head))
    assert written == {"scoring": {"threshold": 0.5} | ({"thresholds": domains} if domains else {})}


def _lines(rows: list[Payload]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)
