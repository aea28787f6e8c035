"""Decisions to look at together, from files of traces, of decisions, and of what other commands print."""

import gzip
from pathlib import Path

import click
import pytest
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.decision import Decision
from kp_scorer.offline import score_traces
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import Payload, changed, minimal_payload
from tests.support.commands import invoked, json_lines, jsonl_file

PAYLOADS = [minimal_payload(trace_id=f"kp:trace:{number}") for number in range(5)]


@pytest.fixture(autouse=True)
def no_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "none")


@pytest.fixture
def results() -> list[Gathered]:
    """What the command below was given."""
    return []


@pytest.fixture
def gather(results: list[Gathered]) -> click.Command:
    @click.command()
    @gathering_options
    def command(gathered: Gathered, settings: Settings) -> None:
        gathered.traces = list(gathered.traces)
        results.append(gathered)

    return command


def decided() -> list[Payload]:
    return [decision.model_dump(mode="json") for decision in score_traces(PAYLOADS, load_settings())]


def decisions_in(gathered: Gathered) -> list[Decision]:
    return [each.decision for each in gathered.traces]


def test_traces_are_scored(gather: click.Command, results: list[Gathered], tmp_path: Path) -> None:
    file = jsonl_file(tmp_path / "rows.jsonl", *PAYLOADS[:3], {"not": "a trace"}, *PAYLOADS[3:], PAYLOADS[0])
    assert invoked(gather, file).exit_code == 1
    (gathered,) = results
    ids = [payload["id"] for payload in PAYLOADS]
    assert [decision.trace_id for decision in decisions_in(gathered)] == ids
    assert [each.trace.id for each in gathered.traces if each.trace] == ids
    assert gathered.refused == 1


@pytest.mark.parametrize("name", ["decisions.jsonl", "decisions.jsonl.gz", "-"])
def test_each_decision_is_read_once(gather: click.Command, results: list[Gathered], tmp_path: Path, name: str) -> None:
    rows = decided()
    waited = [{"trace_id": row["trace_id"], "state": "decided", "decision": row} for row in rows]
    content = json_lines(*rows, {"trace_id": "kp:trace:9", "state": "pending"}, *waited)
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    result = invoked(gather, name, stdin=content) if name == "-" else invoked(gather, file)
    assert result.exit_code == 1
    (gathered,) = results
    assert [decision.model_dump(mode="json") for decision in decisions_in(gathered)] == rows
    assert {each.trace for each in gathered.traces} == {None}
    assert gathered.refused == 1
    assert "line 6: expected a decision, as one JSON object" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["some.jsonl", "--stored"]])
def test_exactly_one_source_is_required(gather: click.Command, arguments: list[str]) -> None:
    result = invoked(gather, *arguments)
    assert result.exit_code == 2
    assert "either FILE" in result.stderr


@pytest.mark.parametrize("rows", [PAYLOADS, None])
def test_truncated_gzip_file_is_refused(gather: click.Command, tmp_path: Path, rows: list[Payload] | None) -> None:
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(*(rows or decided())))[:200])
    result = invoked(gather, file)
    assert result.exit_code == 2
    assert "it cannot be read" in result.stderr


def test_later_decision_on_a_trace_counts(gather: click.Command, results: list[Gathered], tmp_path: Path) -> None:
    first = decided()[0]
    again = first | {"decided_at": "2999-01-01T00:00:00.000+00:00", "outcome": "review"}
    invoked(gather, jsonl_file(tmp_path / "rows.jsonl", again, first, again))
    assert [decision.outcome for decision in decisions_in(results[0])] == ["review"]


def test_a_namespace_chooses_among_decisions(gather: click.Command, results: list[Gathered], tmp_path: Path) -> None:
    ids = ["kp:trace:1", "kp:trace:team-a:1", "kp:trace:team-b:1", "kp:trace:team-a:2"]
    file = jsonl_file(tmp_path / "rows.jsonl", *(minimal_payload(trace_id=trace_id) for trace_id in ids))
    for chosen in (["team-a"], ["team-a", "team-b"]):
        options = [part for name in chosen for part in ("--namespace", name)]
        assert invoked(gather, file, *options).exit_code == 0
        expected = [trace_id for trace_id in ids if any(f":{name}:" in trace_id for name in chosen)]
        assert [decision.trace_id for decision in decisions_in(results[-1])] == expected
    result = invoked(gather, file, "--namespace", "team-c")
    assert result.exit_code == 1
    assert "with --namespace 'team-c'" in str(result.exception)
    assert invoked(gather, file, "--namespace", "").exit_code == 0
    assert [decision.trace_id for decision in decisions_in(results[-1])] == ["kp:trace:1"]


def test_an_agent_chooses_among_decisions(gather: click.Command, results: list[Gathered], tmp_path: Path) -> None:
    payloads = [changed(payload, "metadata.agent_id", f"agent {number % 2}") for number, payload in enumerate(PAYLOADS)]
    file = jsonl_file(tmp_path / "rows.jsonl", *payloads)
    assert invoked(gather, file, "--agent", "agent 1").exit_code == 0
    assert [decision.trace_id for decision in decisions_in(results[-1])] == ["kp:trace:1", "kp:trace:3"]
    assert invoked(gather, file, "--agent", "").exit_code == 1
    jsonl_file(file, *payloads, minimal_payload(trace_id="kp:trace:nobody"))
    assert invoked(gather, file, "--agent", "").exit_code == 0
    assert [decision.trace_id for decision in decisions_in(results[-1])] == ["kp:trace:nobody"]
