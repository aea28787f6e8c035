"""The HTTP server on a real Redis: how it answers requests, and what becomes of the spans."""

import gzip
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import redis
from google.protobuf.json_format import ParseDict
from kp_scorer.errors import SettingsError
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter, DeadLettering
from kp_scorer.store.keys import Keys
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import command
from tests.support.documents import code_with
from tests.support.http_server import SUPPLIED, HttpServer, attributes, chat_span, export_of, in_protobuf, new_run, open_server
from tests.support.processes import PATIENCE_S, at_work, forked, free_port, wait_until
from tests.support.prometheus import Samples, exposition, samples_of
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples

JSON, PROTOBUF = "application/json", "application/x-protobuf"
LARGEST_BODY = Limits(message_bytes=2**23)
TOKEN = "a-token-of-this-test"


@pytest.fixture(scope="module")
def served(redis_url: str) -> Settings:
    """The settings of a running worker and server. Nobody empties their database, so tests use ids of their own."""
    return settings_at(redis_url.removesuffix("/0") + "/3")


@pytest.fixture(scope="module")
def server(served: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    logs = tmp_path_factory.mktemp("served")
    with at_work(served, logs), open_server(served, logs / "server.log") as server:
        yield server


def test_the_example_of_the_page_prints_its_decision(server: HttpServer) -> None:
    program = [sys.executable, "-c", code_with("OTLPSpanExporter(")]
    variables = os.environ | {"KP_SERVER": server.url}
    done = subprocess.run(program, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    decision = json.loads(done.stdout)["decision"]
    assert (decision["domain"], decision["agent_id"]) == ("code", "tide-agent")


def test_spans_become_one_trace_whatever_form_they_come_in(server: HttpServer, served: Settings, keys: Keys) -> None:
    as_json, packed = new_run(), new_run()
    root = chat_span(as_json, kp__success="false", kp__confidence=0.25)
    assert (
        server.export(chat_span(as_json, root["spanId"], said="I look."), kp__domain="code", service__name="tides").json == {}
    )
    assert server.export(root, kp__domain="finance", kp__confidence=1).json == {}
    exported = in_protobuf(export_of(chat_span(packed), kp__domain="code"))
    answer = server.ask("POST", "/v1/traces", gzip.compress(exported), content_type=PROTOBUF, content_encoding="GZip")
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, PROTOBUF, b"")

    decision = server.status(as_json)["decision"]
    assert (decision["domain"], decision["agent_id"], decision["visibility"]) == ("finance", "tides", "private")
    # The confidence and the success that the root states win over those of its resource.
    assert decision["dimensions"]["outcome_confidence"] == pytest.approx(0.25 * 0.3)
    assert server.status(packed)["decision"]["domain"] == "code"
    with redis.Redis.from_url(served.redis.url) as client:
        wait_until(lambda: client.zcard(keys.runs) == 0)
        assert not client.exists(keys.runs_bytes)
        assert client.hstrlen(keys.run(as_json), root["spanId"]) == 0
    with Store.open(served) as store:
        assert store.runs.agent_span(decision["trace_id"]) == root["spanId"]


@pytest.mark.parametrize("place", ["span", "resource"])
def test_a_text_that_is_not_utf_8_costs_no_other_run(server: HttpServer, place: str) -> None:
    # An agent cut a text within a character, and a collector sends its spans together with those of another agent.
    good, damaged, word = new_run(), new_run(), "Hochwasser"
    spoiled = {"said": word} if place == "span" else {}
    resource = {"process.command_line": word} if place == "resource" else {}
    raw = in_protobuf(export_of(chat_span(damaged, **spoiled), **resource)).replace(word.encode(), b"\xc3" * len(word))
    answer = server.ask("POST", "/v1/traces", in_protobuf(export_of(chat_span(good))) + raw, content_type=PROTOBUF)
    assert ExportTraceServiceResponse.FromString(answer.body).partial_success.rejected_spans == 1
    assert server.status(good)["state"] == "decided"
    detail = server.status(damaged)["detail"]
    assert detail.startswith("$: expected spans that can be decoded, at most 5000 and 16777216 bytes, and service.name")


def test_spans_of_many_runs_that_are_rejected_take_one_line_of_the_log(server: HttpServer) -> None:
    runs, word = [new_run() for _ in range(30)], "Hochwasser"
    body = b"".join(in_protobuf(export_of(chat_span(run_id, said=word))) for run_id in runs)
    server.ask("POST", "/v1/traces", body.replace(word.encode(), b"\xc3" * len(word)), content_type=PROTOBUF)
    events = partial(server.process.events, "spans_rejected")
    (line,) = wait_until(lambda: [each for each in events() if each["otel_trace_id"] in runs])
    assert (line["count"], line["runs"]) == (30, 30)


def test_spans_that_are_sent_again_change_nothing_and_late_ones_are_refused(server: HttpServer) -> None:
    run_id = new_run()
    root = chat_span(run_id)
    for _ in range(2):
        assert server.export(root).json == {}
    before = server.status(run_id)
    assert server.export(root).json == {}
    partly = server.export(root, chat_span(run_id, root["spanId"])).json["partialSuccess"]
    assert partly == {"rejectedSpans": "1", "errorMessage": "spans after their run was submitted or forgotten"}
    assert server.status(run_id) == before


@pytest.mark.parametrize("is_at_once", [True, False])
def test_a_span_that_is_exported_when_it_begins_and_when_it_ends_counts_as_it_ended(
    server: HttpServer, is_at_once: bool
) -> None:
    ended = chat_span(new_run(), kp__success=False)
    begun = ended | {"endTimeUnixNano": "0", "attributes": attributes(gen_ai__operation__name="chat")}
    for spans in ([begun, ended, begun],) if is_at_once else ([begun], [ended], [begun]):
        assert server.export(*spans).json == {}
    assert server.status(ended["traceId"])["decision"]["stated"]["success"] is False


def test_runs_are_submitted_through_rabbitmq(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log") as server:
        run_id = new_run()
        assert server.export(chat_span(run_id)).json == {}
        assert server.status(run_id)["state"] == "decided"


def test_a_run_that_makes_no_trace_is_dead_with_its_spans_and_the_reason(server: HttpServer, served: Settings) -> None:
    unsaid, misread, twice = new_run(), new_run(), new_run()
    answer_alone = [pair for pair in chat_span(unsaid)["attributes"] if pair["key"] != "gen_ai.input.messages"]
    server.export({**chat_span(unsaid), "attributes": answer_alone})
    server.export(chat_span(misread, kp__confidence="very"))
    trace = fresh_samples(1)[0] | {"id": f"kp:trace:otel:{twice}"}
    assert server.ask("POST", "/traces", trace).status == 202
    server.export(chat_span(twice))
    assert server.status(unsaid)["reason"] == "invalid"
    detail = server.status(misread)["detail"]
    assert detail == "kp.confidence: Input should be a valid number, unable to parse string as a number"
    assert server.status(twice)["state"] == "decided"
    reasons = {unsaid: "invalid", misread: "invalid", twice: "conflict"}
    with Store.open(served) as store:

        def letters() -> dict[str, DeadLetter]:
            named = {letter.trace_id[-32:]: letter for letter in store.dead_letters.read()}
            return {run_id: named[run_id] for run_id in reasons if run_id in named}

        wait_until(lambda: len(letters()) == 3)
        assert {run_id: letter.reason for run_id, letter in letters().items()} == reasons
        export = json.loads(store.dead_letters.payload(letters()[misread].letter_id))
    assert export["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["traceId"] == misread


def test_a_dead_run_is_replayed_with_the_settings_of_its_time(settings: Settings, tmp_path: Path) -> None:
    run_id, root, late = new_run(), "00000000000000aa", "00000000000000bb"
    spans = [chat_span(run_id) | {"spanId": root}, chat_span(run_id, root, said="I look.")]
    with at_work(settings, tmp_path):
        with open_server(settings, tmp_path / "server.log", queues__message_bytes=400) as server:
            server.export(*spans)
            assert server.status(run_id)["reason"] == "invalid"
            # The status comes from the dead letter, which is stored before its run is marked.
            wait_until(lambda: "partialSuccess" in server.export(*spans).json)
            for again in (spans, [chat_span(run_id, root) | {"spanId": late}]):
                rejected = server.export(*again).json["partialSuccess"]
                assert rejected == {
                    "rejectedSpans": str(len(again)),
                    "errorMessage": "a run that is a dead letter: replay that",
                }
        with open_server(settings, tmp_path / "mended.log") as server:
            # The command, too, waits until a run has been quiet before it is due.
            replayed = command(
                with_changed(settings, **SUPPLIED), "dead-letter", "replay", "--trace-id", f"kp:trace:otel:{run_id}"
            )
            assert json.loads(replayed.stdout)["state"] == "pending"
            assert server.status(run_id)["decision"]["outcome"]
            with Store.open(settings) as store:
                assert list(store.dead_letters.read()) == []


def test_a_run_that_was_cut_is_not_replayed(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTANTS", "ServeSettings.run_spans=1")
    with open_server(settings, tmp_path / "server.log") as server:
        run_id = new_run()
        assert "partialSuccess" in server.export(chat_span(run_id), chat_span(run_id, "00000000000000aa")).json
        assert server.export(chat_span(run_id)).json["partialSuccess"]["rejectedSpans"] == "1"
        assert server.status(run_id)["reason"] == "invalid"
        replayed = command(settings, "dead-letter", "replay")
    assert (replayed.exit_code, json.loads(replayed.stdout)["state"]) == (1, "dead")
    assert "expected a whole run" in replayed.stderr


def test_forget_removes_the_spans_of_an_open_run(settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    with open_server(settings, tmp_path / "server.log", serve__quiet_s=3) as server:
        run_id, second = new_run(), new_run()
        for each in (run_id, second):
            assert server.export(chat_span(each, "00000000000000aa", said="a secret")).json == {}
        forgotten = json.loads(command(settings, "forget", f"kp:trace:otel:{run_id}").stdout)
        assert forgotten == {"trace_id": f"kp:trace:otel:{run_id}", "vectors": 0, "records": 0, "dead_letters": 0, "runs": 1}
        assert server.export(chat_span(run_id)).json["partialSuccess"]["rejectedSpans"] == "1"
        wait_until(lambda: server.process.events("run_submitted"))
        assert [event["trace_id"] for event in server.process.events("run_submitted")] == [f"kp:trace:otel:{second}"]
    assert b"secret" not in b"".join(redis_client.dump(key) or b"" for key in redis_client.scan_iter("kp:run:*"))


def test_forget_notes_what_it_cannot_search_for_a_trace(settings: Settings, store: Store, redis_client: redis.Redis) -> None:
    assert "name no trace" not in command(settings, "forget", "a").stderr
    for payload in (b"junk", b"more"):
        store.dead_letters.dead_letter(payload, DeadLettering("malformed", "message: expected JSON"))
    redis_client.rpush("traces.oversized", "a large one")
    stderr = command(settings, "forget", "a").stderr
    assert "2 dead letters name no trace" in stderr
    assert "1 messages too large for a worker are in the list traces.oversized" in stderr


def test_each_run_without_a_stored_span_is_a_dead_letter_of_its_own(server: HttpServer) -> None:
    runs = [new_run(), new_run()]
    for run_id in runs:
        assert "partialSuccess" in server.export(chat_span(run_id, said="x" * 1_048_576)).json
    assert [server.status(run_id)["reason"] for run_id in runs] == ["invalid", "invalid"]


def test_ids_of_zeros_are_invalid(server: HttpServer) -> None:
    span = chat_span(new_run())
    partly = server.export({**span, "traceId": "0" * 32}, {**span, "spanId": "0" * 16}).json["partialSuccess"]
    assert partly == {"rejectedSpans": "2", "errorMessage": "spans without ids"}


def test_fields_that_neither_spans_nor_settings_state_are_assumed_and_logged(settings: Settings, tmp_path: Path) -> None:
    unset = {"serve__confidence": None, "serve__success": None}
    failed = {"status": {"code": 2}}
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log", **unset) as server:
        run_id, certain, rootless, broken = (new_run() for _ in range(4))
        server.export(chat_span(rootless, "00000000000000aa"))
        server.export(chat_span(run_id))
        server.export(chat_span(certain, kp__confidence=1, kp__success="true"))
        root = chat_span(broken) | failed | {"attributes": [], "spanId": "00000000000000aa"}
        server.export(chat_span(broken, "00000000000000aa"), root)
        outcomes = [
            server.status(each)["decision"]["dimensions"]["outcome_confidence"] for each in (run_id, rootless, certain, broken)
        ]
        assert outcomes == pytest.approx([0.5, 0.5, 1.0, 0.5 * 0.3])
        submitted = {
            event["trace_id"].rpartition(":")[2]: event.get("assumed") for event in server.process.logged("run_submitted", 4)
        }
    assert submitted == {run_id: "confidence, success", rootless: "confidence, success", certain: None, broken: "confidence"}


def call_span(run_id: str, parent: str, thought: str = "I look.") -> dict[str, Any]:
    """Return a span in which a model calls a tool."""
    parts = [{"type": "text", "content": thought}, {"type": "tool_call", "id": "c1", "name": "tide_table", "arguments": {}}]
    output = attributes(gen_ai__output__messages=json.dumps([{"role": "assistant", "parts": parts}]))
    span = chat_span(run_id, parent)
    return span | {"attributes": [pair for pair in span["attributes"] if pair["key"] != output[0]["key"]] + output}


def _has_passed(since_s: float, duration_s: float) -> bool:
    return time.monotonic() - since_s > duration_s


def test_a_run_waits_for_the_work_that_it_has_begun(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root ends at once. The rest of the run comes after a longer pause than a complete run needs to be submitted."""
    monkeypatch.setenv("CONSTANTS", "ServeSettings.open_s=3.0")
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log") as server:
        run_id, cut = new_run(), new_run()
        root, job = ({**chat_span(run_id), "attributes": [], "spanId": each * 8} for each in ("aa", "bb"))
        server.export(root)
        server.export(call_span(cut, "cc" * 8))
        runs = f"{server.url}/traces/kp:trace:otel:{run_id}"
        for late in (
            call_span(run_id, job["spanId"]),
            chat_span(run_id, job["spanId"]),
            job | {"parentSpanId": root["spanId"]},
        ):
            # Stay quiet for twice as long as a complete run needs to be submitted.
            quiet_since = time.monotonic()
            wait_until(partial(_has_passed, quiet_since, 2 * SUPPLIED["serve__quiet_s"]))
            assert server.ask("GET", runs).status == 404
            assert server.export(late).json == {}
        decision = server.status(run_id)["decision"]
        assert decision["dimensions"]["complexity"] > 0
        # A run also waits if its last call has neither a text nor a result, even if its root has ended.
        unanswered = new_run()
        around = chat_span(unanswered) | {"attributes": [], "endTimeUnixNano": str(time.time_ns() + 10**10)}
        for spans in ([around, call_span(unanswered, around["spanId"], thought="")], [chat_span(unanswered, around["spanId"])]):
            for span in spans:
                assert server.export(span).json == {}
            quiet_since = time.monotonic()
            wait_until(partial(_has_passed, quiet_since, 2 * SUPPLIED["serve__quiet_s"]))
        assert server.status(unanswered)["state"] == "decided"
        # A run that lacks spans is decided without them in the end.
        assert server.status(cut)["state"] == "decided"
        assert sorted(event["spans"] for event in server.process.logged("run_submitted", 3)) == [1, 3, 4]


def test_run_without_success_waits_for_its_outcome(settings: Settings, store: Store, tmp_path: Path) -> None:
    waits: dict[str, Any] = {"serve__success": None, "serve__outcome_wait_s": 3_600.0}
    early, stating, waiting = (new_run() for _ in range(3))
    root = chat_span(waiting)
    often = with_changed(settings, ledger__resend_after_s=2.0)
    with at_work(often, tmp_path) as (worker, client), open_server(settings, tmp_path / "server.log", **waits) as server:
        server.ask("POST", f"/traces/kp:trace:otel:{early}/outcome", {"success": False})
        wait_until(lambda: worker.events("outcome_waits"))
        server.export(chat_span(early), chat_span(stating, kp__success="true"), root)
        assert server.status(early)["decision"]["stated"] == {"success": False, "confidence": 0.8, "recoveries": 0}
        assert server.status(stating)["decision"]["stated"]["success"]
        # More spans may arrive while the run waits for its outcome.
        server.export(chat_span(waiting, root["spanId"]))
        quiet_since = time.monotonic()
        wait_until(partial(_has_passed, quiet_since, 3 * SUPPLIED["serve__quiet_s"]))
        assert store.runs.held()[0] == 1
        assert server.ask("GET", f"/traces/kp:trace:otel:{waiting}").status == 404
        outcome_id = client.submit_outcome(f"kp:trace:otel:{waiting}", success=False, confidence=0.5)
        revision = client.wait(outcome_id, PATIENCE_S)
        (decided,) = store.ledger.decided([f"kp:trace:otel:{waiting}"])
        assert [event["spans"] for event in server.process.logged("run_submitted", 3)] == [1, 1, 2]
    assert decided
    assert decided.first
    assert decided.first.dimensions.outcome_confidence == pytest.approx(0.5 * 0.3)
    assert (revision.revision, revision.outcome, revision.score) == (2, decided.first.outcome, decided.first.score)
    assert store.ledger.counts() == (5, 0, 5, 0)


def test_run_whose_outcome_does_not_come_is_decided_as_if_it_had_succeeded(settings: Settings, tmp_path: Path) -> None:
    waits: dict[str, Any] = {"serve__success": None, "serve__outcome_wait_s": 1.0}
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log", **waits) as server:
        began, run_id = time.monotonic(), new_run()
        server.export(chat_span(run_id))
        assert server.status(run_id)["decision"]["stated"]["success"]
        assert time.monotonic() - began > 1.0 + SUPPLIED["serve__quiet_s"]


def test_runs_of_no_agent_without_content_or_that_others_continue_are_left_out(settings: Settings, tmp_path: Path) -> None:
    port = free_port()
    metered = with_changed(settings, metrics__port=port - 1)
    with open_server(metered, tmp_path / "server.log") as server:
        health, mute, lone = (chat_span(new_run()) for _ in range(3))
        server.export(health | {"attributes": []})
        for run in (mute, mute | {"traceId": new_run()}):
            server.export(run | {"attributes": run["attributes"][:1]}, service__name="tides")
        server.export(call_span(lone["traceId"], ""))

        def left_out() -> dict[str, float]:
            values = samples_of(exposition(f"http://127.0.0.1:{port}/metrics"))
            names = ("no_agent", "no_content", "unfinished")
            return {name: values[f'kp_scorer_serve_runs_left_out_total{{reason="{name}"}}'] for name in names}

        wait_until(lambda: left_out() == {"no_agent": 1, "no_content": 2, "unfinished": 1})
        (event,) = server.process.logged("run_left_out")
        assert "in tides does not record: set OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT" in event["detail"]
    with Store.open(settings) as store:
        assert list(store.dead_letters.read()) == []


def test_run_that_two_instrumentations_record_under_ids_of_their_own_is_one(settings: Settings, tmp_path: Path) -> None:
    first = chat_span(new_run(), kp__domain="code")
    second = first | {"traceId": new_run(), "spanId": "cc" * 8}
    later = second | {"traceId": new_run(), "startTimeUnixNano": first["endTimeUnixNano"]}
    later |= {"endTimeUnixNano": str(int(first["endTimeUnixNano"]) + 1)}
    with at_work(settings, tmp_path), open_server(settings, tmp_path / "server.log") as server:
        for number, span in enumerate((first, second, later, first | {"traceId": new_run()})):
            export = export_of(span, service__name="tides")
            export["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": "other" if span is second else "some"}
            server.ask("POST", "/v1/traces", export)
            if number != 1:
                # A run at another time, or by the same instrumentation, counts as a run of its own even if its content is the
                # same.
                assert server.status(span["traceId"])["state"] == "decided"
        (event,) = wait_until(lambda: server.process.events("run_left_out"))
        assert (event["otel_trace_id"], event["reason"]) == (second["traceId"], "repeated")
        assert first["traceId"] in event["detail"]


@pytest.mark.parametrize("form", ["application/json", PROTOBUF])
def test_logs_are_read_for_events_of_agents_and_metrics_are_dropped(server: HttpServer, form: str) -> None:
    run = chat_span(new_run()) | {"attributes": attributes(gen_ai__operation__name="chat")}
    scope = {"scope": {"name": "opentelemetry.instrumentation.langchain"}}
    records = [
        {"eventName": name, "body": {"kvlistValue": {"values": attributes(**body)}}, "timeUnixNano": run["startTimeUnixNano"]}
        for name, body in {
            "gen_ai.user.message": {"content": "When is high water?"},
            "gen_ai.choice": {"message": json.dumps({"content": "At 04:12."})},
            "http.request": {"content": "GET"},
        }.items()
    ]
    logs = {"resourceLogs": [{"scopeLogs": [scope | {"logRecords": records}]}]}
    message = ParseDict(logs, ExportLogsServiceRequest())
    for record, fields in zip(message.resource_logs[0].scope_logs[0].log_records, records, strict=True):
        record.trace_id, record.span_id = bytes.fromhex(run["traceId"]), bytes.fromhex(run["spanId"])
        fields |= {"traceId": run["traceId"], "spanId": run["spanId"]}
    body: object = logs if form == "application/json" else message.SerializeToString()
    for _ in range(2):
        answer = server.ask("POST", "/v1/logs", body, content_type=form)
        assert (answer.status, answer.body) == (200, b"{}" if form == "application/json" else b"")
    assert server.export(run).json == {}
    assert server.status(run["traceId"])["state"] == "decided"
    assert server.ask("POST", "/v1/metrics", b"\x0a\x00" if form == PROTOBUF else {}, content_type=form).status == 200


def test_paths_of_exporters_may_have_a_prefix_or_a_slash_and_refusals_are_logged_once_a_minute(server: HttpServer) -> None:
    for path in ("/v1/traces/", "/api/public/otel/v1/traces"):
        assert server.ask("POST", path, export_of(chat_span(new_run()))).json == {}
    for _ in range(2):
        assert server.ask("POST", "/v2/traces").status == 404
        assert server.ask("POST", "/v1/traces", content_type="text/plain").status == 415
        assert server.ask("POST", "/v1/traces", bytes(8_400_000)).status == 413
        assert server.ask("POST", "/v1/logs", b"[").status == 400
        assert server.ask("POST", "/traces", b"[").status == 400
        assert server.ask("GET", "/traces/kp:trace:unknown").status == 404
    refused = [(event["status"], event["peer"], event["path"]) for event in server.process.logged("request_refused", 4)]
    of_exports = [(415, "127.0.0.1", "/v1/traces"), (413, "127.0.0.1", "/v1/traces"), (400, "127.0.0.1", "/v1/logs")]
    assert refused == [(404, "127.0.0.1", "/v2/traces"), *of_exports]


def test_traces_come_alone_in_an_array_or_on_lines(server: HttpServer) -> None:
    one, two, three, four = fresh_samples(4)
    (row,) = server.ask("POST", "/traces", one).json["traces"]
    del row["outcome_key"]
    assert row == {"number": 1, "state": "pending", "trace_id": one["id"]}
    assert server.ask("POST", "/traces", [two, three]).status == 202
    lines = b"\n".join([json.dumps(four).encode(), b"", b"{", json.dumps(one | {"steps": []}).encode()])
    mixed = server.ask("POST", "/traces", lines, content_type="application/x-ndjson")
    first, broken, empty = mixed.json["traces"]
    assert (mixed.status, first["state"], broken["state"], empty["state"]) == (207, "pending", "invalid", "invalid")
    assert [problem["field"] for row in (broken, empty) for problem in row["problems"]] == ["$", "steps"]
    conflict = server.ask("POST", "/traces", one | {"task": {"objective": "another"}})
    assert (conflict.status, conflict.json["traces"][0]["state"]) == (422, "conflict")
    paths = [f"/traces/{trace['id']}" for trace in (one, two, three, four)]
    wait_until(lambda: {server.ask("GET", path).json["state"] for path in paths} == {"decided"})
    assert server.ask("GET", "/traces/kp:trace:unknown").status == server.ask("GET", "/traces/other").status == 404
    assert server.ask("POST", "/traces/", one).status == 405
    assert "/v1/traces" in server.ask("GET", "/openapi.json").json["paths"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_all_addresses_of_ipv6_include_those_of_ipv4(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    everywhere = {"serve__host": "::", "serve__tokens": str(file), "serve__behind_proxy": True}
    with open_server(settings, tmp_path / "server.log", **everywhere) as server:
        assert urlopen(f"http://[::1]:{server.port}/livez").status == 200
        assert server.ask("GET", "/livez").status == 200


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(server: HttpServer) -> None:
    beginning = b"POST /traces HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nContent-Length: 7\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(beginning + chunked + b"GET /livez HTTP/1.1\r\nHost: server\r\n\r\n")
        answer = b"".join(iter(partial(connection.recv, 4_096), b""))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1


def test_requests_spans_and_runs_of_the_server_are_counted(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    # The server shows its metrics on the port after that of a worker.
    port = free_port()
    metered = with_changed(settings, metrics__port=port - 1, serve__tokens=str(tokens))
    monkeypatch.setenv("CONSTANTS", "ServeSettings.run_spans=2 ServeSettings.runs=4 serve.submitter._SHOW_EVERY_S=0.2")
    with open_server(metered, tmp_path / "server.log", serve__quiet_s=4.0) as server:
        asked = {"authorization": f"Bearer {TOKEN}"}
        first_run, second_run = new_run(), new_run()
        for run_id, count in ((first_run, 2), (second_run, 3)):
            export = export_of(*(chat_span(run_id) for _ in range(count)))
            assert server.ask("POST", "/v1/traces", export, **asked).status == 200
        trace = fresh_samples(1)[0]
        assert server.ask("POST", "/traces", [trace, trace | {"task": {"objective": "another"}}, {}], **asked).status == 207
        assert server.ask("GET", "/traces/kp:trace:unknown", **asked).status == 404
        assert server.ask("GET", "/traces/kp:trace:unknown").status == 401
        assert server.ask("GET", "/a-secret-path").status == 404

        def counted() -> Samples:
            text = exposition(f"http://127.0.0.1:{port}/metrics")
            assert "secret" not in text
            return {name.removeprefix("kp_scorer_serve_"): value for name, value in samples_of(text).items()}

        wait_until(lambda: counted()["runs_open"] == 2)
        exposed = counted()
        assert exposed["held_bytes"] > 100
        assert exposed["room_used_ratio"] == 0.5
        assert exposed["ready"] == 1
        requests = {name: value for name, value in exposed.items() if name.startswith("requests_total")}
        route = "/traces/{trace_id}"
        assert requests == {
            'requests_total{route="/v1/traces",status="200"}': 2,
            'requests_total{route="/traces",status="207"}': 1,
            f'requests_total{{route="{route}",status="404"}}': 1,
            f'requests_total{{route="{route}",status="401"}}': 1,
            'requests_total{route="other",status="404"}': 1,
        }
        assert exposed['request_seconds_count{route="/v1/traces"}'] == 2
        spans = {outcome: exposed[f'spans_total{{outcome="{outcome}"}}'] for outcome in ("stored", "too_large", "full")}
        assert spans == {"stored": 2, "too_large": 3, "full": 0}
        states = {outcome: exposed[f'traces_total{{outcome="{outcome}"}}'] for outcome in ("pending", "conflict", "invalid")}
        assert states == {"pending": 1, "conflict": 1, "invalid": 1}
        wait_until(lambda: counted()["runs_submitted_total"] == 1)
        wait_until(lambda: counted()['dead_letters_total{reason="invalid"}'] == 1)
        assert urlopen(f"http://127.0.0.1:{port}/readyz").status == 200


def test_lines_of_a_log_on_a_full_disk_are_counted(settings: Settings) -> None:
    measured = with_changed(settings, serve__port=free_port(), serve__grpc_port=0, metrics__port=free_port())
    url = f"http://127.0.0.1:{measured.metrics.of_serve().port}/metrics"

    def dropped() -> float:
        with suppress(URLError):
            return samples_of(exposition(url))["kp_scorer_serve_log_lines_dropped_total"]
        return 0.0

    with (
        Path("/dev/full").open("wb") as full,
        forked("kp_scorer.cli", "serve", variables=as_environment(measured), stderr=full),
    ):
        wait_until(dropped)


def test_requests_whose_peers_have_given_up_wait_for_no_turn(server: HttpServer, served: Settings, keys: Keys) -> None:
    runs = [new_run() for _ in range(20)]
    with redis.Redis.from_url(served.redis.url) as client:
        client.client_pause(10_000, all=False)
        for run_id in runs:
            body = json.dumps(export_of(chat_span(run_id))).encode()
            headers = f"Host: server\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}"
            with socket.create_connection(("127.0.0.1", server.port)) as peer:
                peer.sendall(f"POST /v1/traces HTTP/1.1\r\n{headers}\r\n\r\n".encode() + body)
        # Once the server answers, it has noticed that the peers are gone.
        assert server.ask("GET", "/livez").status == 200
        client.client_unpause()
        assert server.export(chat_span(new_run())).status == 200
        # The first request was already being worked on.
        assert sum(client.exists(keys.run(run_id)) for run_id in runs) <= 1


def test_no_room_is_429_and_frees_itself(settings: Settings, tmp_path: Path) -> None:
    # Tests in ``tests/hostile`` show that a run over the limit gets the same answer.
    with open_server(settings, tmp_path / "server.log", serve__quiet_s=1.0, serve__total_bytes=1_300) as server:
        first, second = new_run(), new_run()
        root = chat_span(first)
        assert server.export(chat_span(first, root["spanId"])).status == 200
        full = server.export(chat_span(second))
        assert (full.status, full.headers["retry-after"], full.json) == (429, "2", {"message": "no room now, try again"})
        assert server.export(chat_span(second)).status == 429
        (logged,) = server.process.logged("request_put_off")
        assert logged["detail"] == "runs: no room until some are submitted"
        assert server.export(root).status == 200
        wait_until(lambda: server.export(chat_span(second)).status == 200)


def test_a_full_redis_is_429_and_an_absent_one_503(
    alone: tuple[Settings, redis.Redis], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, client = alone
    monkeypatch.setenv("CONSTANTS", "serve.submitter._AWAY_S=1")
    with open_server(with_changed(settings, broker__timeout_s=1.0), tmp_path / "server.log") as server:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 1)
        exported, submitted = server.export(chat_span(new_run())), server.ask("POST", "/traces", fresh_samples(1)[0])
        assert (exported.status, submitted.status, submitted.headers["retry-after"]) == (429, 429, "2")
        client.config_set("maxmemory", 0)
        assert server.export(chat_span(new_run())).status == 200
        client.shutdown(nosave=True)
        answer = server.ask("POST", "/v1/traces", in_protobuf(export_of(chat_span(new_run()))), content_type=PROTOBUF)
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
        status = ExportTraceServiceResponse.FromString(b"\x0a" + bytes([len(answer.body)]) + answer.body)
        assert status.partial_success.error_message == "not reachable now, try again"
        wait_until(lambda: server.ask("GET", "/readyz").status == 503)
        assert server.ask("GET", "/livez").status == 200


def test_an_export_of_many_runs_takes_few_round_trips(alone: tuple[Settings, redis.Redis], tmp_path: Path) -> None:
    settings, client = alone
    with open_server(settings, tmp_path / "server.log", serve__quiet_s=60.0) as server:
        # The first one loads the script.
        assert server.export(chat_span(new_run())).json == {}
        before = client.info("stats")["total_reads_processed"]
        assert server.export(*(chat_span(new_run()) | {"attributes": []} for _ in range(400))).json == {}
        assert client.info("stats")["total_reads_processed"] - before < 200


def test_packages_that_are_not_installed_are_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    for name in [name for name in sys.modules if name.startswith("kp_scorer.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    error = command(settings, "serve").exception
    assert isinstance(error, SettingsError)
    assert str(error) == "serve: there is no fastapi: install kp-scorer[serve]"
