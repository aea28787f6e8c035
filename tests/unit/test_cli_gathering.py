"""Decisions to look at together, from files of traces, of decisions, and of what other commands print."""

import gzip
import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from kp_scorer.cli.gathering import Gathered, gathering_options
from kp_scorer.offline import score_traces
from kp_scorer.settings import Settings, load_settings

from tests.support.builders import Payload, minimal_payload

PAYLOADS = [minimal_payload(trace_id=f"kp:trace:{number}") for number in range(5)]


@pytest.fixture(autouse=True)
def no_embedder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KP_EMBEDDING_EMBEDDER", "none")


@pytest.fixture
def seen() -> list[Gathered]:
    """What the command below was given."""
    return []


@pytest.fixture
def gather(seen: list[Gathered]) -> click.Command:
    @click.command()
    @gathering_options
    def command(gathered: Gathered, settings: Settings) -> None:
        seen.append(gathered)

    return command


def run(command: click.Command, *arguments: str, given: bytes | None = None) -> Result:
    return CliRunner().invoke(command, arguments, input=given)


def lines(rows: list[Payload]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def decided() -> list[Payload]:
    return [decision.model_dump(mode="json") for decision in score_traces(PAYLOADS, load_settings())]


def test_traces_are_scored_and_kept(gather: click.Command, seen: list[Gathered], tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_bytes(lines([*PAYLOADS[:3], {"not": "a trace"}, *PAYLOADS[3:], PAYLOADS[0]]))
    assert run(gather, str(file)).exit_code == 0
    (gathered,) = seen
    ids = [payload["id"] for payload in PAYLOADS]
    assert [decision.trace_id for decision in gathered.decisions] == ids
    assert list(gathered.traces) == ids
    assert gathered.refused == 1


@pytest.mark.parametrize("name", ["decisions.jsonl", "decisions.jsonl.gz", "-"])
def test_decisions_are_read_each_once(gather: click.Command, seen: list[Gathered], tmp_path: Path, name: str) -> None:
    rows = decided()
    waited = [{"trace_id": row["trace_id"], "state": "decided", "decision": row} for row in rows]
    given = lines([*rows, {"trace_id": "kp:trace:9", "state": "pending"}, *waited])
    file = tmp_path / name
    file.write_bytes(gzip.compress(given) if name.endswith("gz") else given)
    result = run(gather, name, given=given) if name == "-" else run(gather, str(file))
    assert result.exit_code == 0
    (gathered,) = seen
    assert [decision.model_dump(mode="json") for decision in gathered.decisions] == rows
    assert not gathered.traces
    assert gathered.refused == 1
    assert "line 6: domain: Field required" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["some.jsonl", "--stored"]])
def test_there_is_one_source(gather: click.Command, arguments: list[str]) -> None:
    result = run(gather, *arguments)
    assert result.exit_code == 2
    assert "either FILE" in result.stderr


@pytest.mark.parametrize("rows", [PAYLOADS, None])
def test_a_file_that_is_cut_off_is_refused(gather: click.Command, tmp_path: Path, rows: list[Payload] | None) -> None:
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(gzip.compress(lines(rows or decided()))[:200])
    result = run(gather, str(file))
    assert result.exit_code == 2
    assert "it cannot be read" in result.stderr


def test_of_two_decisions_on_a_trace_the_later_one_counts(gather: click.Command, seen: list[Gathered], tmp_path: Path) -> None:
    first = decided()[0]
    again = first | {"decided_at": "2999-01-01T00:00:00.000+00:00", "outcome": "review"}
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(lines([again, first, again]))
    run(gather, str(file))
    assert [decision.outcome for decision in seen[0].decisions] == ["review"]
