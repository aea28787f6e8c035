"""Commands gather the decisions to look at from files of traces, files of decisions, and the output of other commands."""

import gzip
import time
from pathlib import Path

import click
import pytest
from click.testing import Result
from kp_scorer.cli.candidates import rows_in
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


class ExitingCommand(click.Command):
    """A command that exits with the code that its function returns, as those of ``kp-scorer`` do."""

    def invoke(self, ctx: click.Context) -> None:
        ctx.exit(int(super().invoke(ctx) or 0))


def gather(*arguments: str | Path, stdin: bytes = b"") -> tuple[Result, Gathered]:
    """Run a command that gathers decisions; return its result and what it gathered."""
    results = [Gathered("nothing")]

    @click.command(cls=ExitingCommand)
    @gathering_options
    def command(gathered: Gathered, settings: Settings) -> None:
        gathered.traces = list(gathered.traces)
        results.append(gathered)

    return invoked(command, *arguments, stdin=stdin), results[-1]


def decided() -> list[Payload]:
    return [decision.model_dump(mode="json") for decision in score_traces(PAYLOADS, load_settings())]


def decisions_in(gathered: Gathered) -> list[Decision]:
    return [each.decision for each in gathered.traces]


def test_traces_are_scored(tmp_path: Path) -> None:
    file = jsonl_file(tmp_path / "rows.jsonl", *PAYLOADS[:3], {"not": "a trace"}, *PAYLOADS[3:], PAYLOADS[0])
    result, gathered = gather(file)
    assert result.exit_code == 1
    ids = [payload["id"] for payload in PAYLOADS]
    assert [decision.trace_id for decision in decisions_in(gathered)] == ids
    assert [each.trace.id for each in gathered.traces if each.trace] == ids
    assert gathered.refused == 1


@pytest.mark.parametrize("name", ["decisions.jsonl", "decisions.jsonl.gz", "-"])
def test_each_decision_is_read_once(tmp_path: Path, name: str) -> None:
    rows = decided()
    waited = [{"trace_id": row["trace_id"], "state": "decided", "decision": row} for row in rows]
    content = json_lines(*rows, {"trace_id": "kp:trace:9", "state": "pending"}, *waited)
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    result, gathered = gather(name, stdin=content) if name == "-" else gather(file)
    assert result.exit_code == 1
    assert [decision.model_dump(mode="json") for decision in decisions_in(gathered)] == rows
    assert {each.trace for each in gathered.traces} == {None}
    assert gathered.refused == 1
    assert "line 6: expected a decision, as one JSON object" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["some.jsonl", "--stored"]])
def test_exactly_one_source_is_required(arguments: list[str]) -> None:
    result, _ = gather(*arguments)
    assert result.exit_code == 2
    assert "either FILE" in result.stderr


def test_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(gzip.compress(json_lines(*decided()))[:200])
    result, _ = gather(file)
    assert result.exit_code == 2
    assert "it cannot be read" in result.stderr


def test_later_decision_on_a_trace_counts(tmp_path: Path) -> None:
    first = decided()[0]
    again = first | {"decided_at": "2999-01-01T00:00:00.000+00:00", "outcome": "review"}
    _, gathered = gather(jsonl_file(tmp_path / "rows.jsonl", again, first, again))
    assert [decision.outcome for decision in decisions_in(gathered)] == ["review"]


def test_a_namespace_chooses_among_decisions(tmp_path: Path) -> None:
    ids = ["kp:trace:1", "kp:trace:team-a:1", "kp:trace:team-b:1", "kp:trace:team-a:2"]
    file = jsonl_file(tmp_path / "rows.jsonl", *(minimal_payload(trace_id=trace_id) for trace_id in ids))
    for names, chosen in ((["team-a"], ids[1::2]), (["team-a", "team-b"], ids[1:]), ([""], ids[:1])):
        result, gathered = gather(file, *(part for name in names for part in ("--namespace", name)))
        assert (result.exit_code, [decision.trace_id for decision in decisions_in(gathered)]) == (0, chosen)
    result, _ = gather(file, "--namespace", "team-c")
    assert result.exit_code == 1
    assert "with --namespace 'team-c'" in str(result.exception)


def test_an_agent_chooses_among_decisions(tmp_path: Path) -> None:
    payloads = [changed(payload, "metadata.agent_id", f"agent {number % 2}") for number, payload in enumerate(PAYLOADS)]
    file = jsonl_file(tmp_path / "rows.jsonl", *payloads)
    assert gather(file, "--agent", "")[0].exit_code == 1
    jsonl_file(file, *payloads, minimal_payload(trace_id="kp:trace:nobody"))
    for agent, chosen in (("agent 1", ["kp:trace:1", "kp:trace:3"]), ("", ["kp:trace:nobody"])):
        result, gathered = gather(file, "--agent", agent)
        assert (result.exit_code, [decision.trace_id for decision in decisions_in(gathered)]) == (0, chosen)


def test_a_domain_and_a_time_choose_among_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    rows = [row | {"decided_at": f"2026-11-{day}T12:00:00.000+00:00"} for day, row in enumerate(decided(), 10)]
    rows[0]["domain"] = rows[3]["domain"] = "law"
    file = jsonl_file(tmp_path / "rows.jsonl", *rows)
    law = ["--domain", "law"]
    for options, chosen in (
        (law, [0, 3]),
        ([*law, "--domain", rows[1]["domain"]], [0, 1, 2, 3, 4]),
        (["--since", "2026-11-13"], [3, 4]),
        (["--since", "99999d"], [0, 1, 2, 3, 4]),
        (["--since", "2026-11-10T12:00:00", *law], [0, 3]),
        (["--since", "2026-11-10T12:00:01", *law], [3]),
    ):
        result, gathered = gather(file, *options)
        ids = [rows[number]["trace_id"] for number in chosen]
        assert (result.exit_code, [decision.trace_id for decision in decisions_in(gathered)]) == (0, ids)
    result, _ = gather(file, "--since", "2026-11-14T12:00:01")
    assert (result.exit_code, "with --since '2026-11-14 12:00:01'" in str(result.exception)) == (1, True)
    assert gather(file, "--since", "yesterday")[0].exit_code == 2


@pytest.mark.parametrize("line", ["{}", "5", "[" * 60_000], ids=["an object", "a number", "deep nesting"])
def test_line_of_kept_traces_without_an_id_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "kept.jsonl"
    file.write_text(line)
    with pytest.raises(click.BadParameter, match=r"kept\.jsonl, line 1: expected an id"):
        list(rows_in([file]))
