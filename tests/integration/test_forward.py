"""``kp-scorer forward`` delivers each decision, or the spans of its run, to a receiver at least once, whoever is killed.

It keeps what the receiver refuses.
"""

import base64
import hmac
import json
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
from google.protobuf.json_format import ParseDict
from kp_scorer.cli.main import commands
from kp_scorer.client import forwarding, run_export
from kp_scorer.decision import Decision, RevisedBy
from kp_scorer.limits import Limits
from kp_scorer.serve.exports import spans_in
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.runs import ClaimedRun, ReceivedSpan
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.integration.test_reading_decisions import publish
from tests.support.builders import decided, make_trace
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.collector import answering
from tests.support.commands import invoked
from tests.support.disks import nearly_full_disk
from tests.support.forking import Process
from tests.support.http_server import attributes, chat_span, export_of, in_protobuf, new_run
from tests.support.processes import ending_within, forked, free_port, wait_until
from tests.support.proxy import Proxy
from tests.support.tls import Authority
from tests.support.traces import rows_in

PROTOBUF = "application/x-protobuf"
KEPT = {"serve__quiet_s": 0.001, "serve__keep_spans_s": 60.0}
SECRET = b"a secret of this test"
VARIABLES = {
    "WEBHOOK_SECRET": f"whsec_{base64.b64encode(SECRET).decode()}",
    "LANGFUSE_PUBLIC_KEY": "pk-lf-1",
    "LANGFUSE_SECRET_KEY": "sk-lf-1",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20x,,",
}


def decisions(count: int) -> list[Decision]:
    return [decided(make_trace(trace_id=f"kp:trace:{number}")) for number in range(count)]


class Receiving:
    """A receiver: its address, a process that can be opened, and what it has received."""

    def __init__(self, folder: Path) -> None:
        self.port, self.file = free_port(), folder / "received.jsonl"
        self.url = f"http://127.0.0.1:{self.port}"

    def process(self, status: int = 200, answer: bytes = b"") -> AbstractContextManager[Any]:
        arguments = str(self.port), str(self.file), str(status), answer.hex()
        return forked("tests.support.receiver", *arguments)

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def receiving(tmp_path: Path) -> Receiving:
    return Receiving(tmp_path)


def following(settings: Settings, receiver: str, url: str, *arguments: str, **options: Any) -> AbstractContextManager[Process]:
    """Run ``kp-scorer forward --follow`` in a process of its own during the block."""
    command = ("kp_scorer.cli", "forward", "--to", receiver, "--url", url, "--follow", *arguments)
    return forked(*command, variables=as_environment(settings) | VARIABLES, **options)


def test_each_decision_arrives_signed_whoever_is_killed(on_broker: SettingsWith, receiving: Receiving) -> None:
    settings, made = on_broker(broker__visibility_timeout_s=3), decisions(40)
    assert all(publish(settings, made))
    forwarding = partial(following, settings, "webhook", f"{receiving.url}/kp")

    def has(count: int) -> Callable[[], bool]:
        return lambda: len({json.loads(row["body"])["trace_id"] for row in receiving.rows()}) >= count

    with forwarding() as first:
        with receiving.process() as receiver:
            wait_until(has(5))
            receiver.kill()
        with receiving.process():
            wait_until(has(15))
            first.kill()
            with forwarding():
                wait_until(has(40))
    for row in receiving.rows():
        head = f"{row['webhook-id']}.{row['webhook-timestamp']}.".encode()
        signature = base64.b64encode(hmac.digest(SECRET, head + row["body"].encode(), "sha256")).decode()
        assert (row["path"], row["webhook-signature"]) == ("/kp", f"v1,{signature}")
        assert Decision.model_validate_json(row["body"]) in made


def test_revisions_are_handed_on_apart(settings: Settings, receiving: Receiving) -> None:
    first = decided(make_trace(trace_id="kp:trace:late"))
    publish(settings, [first, first.model_copy(update={"revision": 2, "revised_by": RevisedBy(id="tests", success=False)})])
    with receiving.process():
        assert "forwarded 1 decisions" in forward(settings, "langfuse", receiving.url).stderr
        assert "forwarded 1 decisions" in forward(settings, "langfuse", receiving.url, "--outcome", "revised").stderr
    assert len({json.loads(row["body"])["id"] for row in receiving.rows()}) == 1


def forward(
    settings: Settings, receiver: str, url: str, *arguments: str | Path, variables: Mapping[str, str] = VARIABLES
) -> Any:
    variables = {**as_environment(settings), **variables}
    return invoked(commands, "forward", "--to", receiver, "--url", url, *arguments, env=variables)


def test_langfuse_gets_one_score_for_each_trace(settings: Settings, receiving: Receiving) -> None:
    publish(settings, [decided(make_trace(trace_id="kp:trace:langfuse:run%20one"))])
    with receiving.process():
        done = forward(settings, "langfuse", receiving.url)
    assert "forwarded 1 decisions" in done.stderr, done.output
    (row,) = receiving.rows()
    score = json.loads(row["body"])
    assert (row["path"], base64.b64decode(row["authorization"].split()[1])) == ("/api/public/scores", b"pk-lf-1:sk-lf-1")
    assert (score["traceId"], score["name"], score["comment"]) == ("run one", "kp-scorer", "rejected")
    assert score["dataType"] == "NUMERIC"


def test_an_event_is_under_the_span_of_the_agent(settings: Settings, store: Store, receiving: Receiving) -> None:
    run_id, span_id = uuid4().hex, uuid4().hex[:16]
    store.runs.store(run_id, [ReceivedSpan(span_id, b"{}")])
    store.runs.close(ClaimedRun(run_id, False, [b"{}"], 0, False), span_id)
    store.runs.finish(run_id, "submitted")
    decision = decided(make_trace(trace_id=f"kp:trace:otel:{run_id}"))
    publish(settings, [decision, decided(make_trace(trace_id="kp:trace:own"))])
    with receiving.process():
        assert "forwarded 2 decisions" in forward(settings, "otlp", receiving.url).stderr
    of_agent, alone = (json.loads(row["body"]) for row in receiving.rows())
    assert [(row["path"], row["authorization"]) for row in receiving.rows()] == [("/v1/logs", "Bearer x")] * 2
    record = of_agent["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert (record.pop("traceId"), record.pop("spanId")) == (run_id, span_id)
    parsed = ParseDict(of_agent, ExportLogsServiceRequest()).resource_logs[0].scope_logs[0].log_records[0]
    values = {each.key: each.value for each in parsed.attributes}
    assert parsed.event_name == "gen_ai.evaluation.result"
    assert values["gen_ai.evaluation.score.value"].double_value == decision.score
    assert values["gen_ai.evaluation.score.label"].string_value == decision.outcome
    assert "traceId" not in json.dumps(alone)


def test_decisions_that_a_receiver_refuses_are_kept_in_a_file(settings: Settings, receiving: Receiving, tmp_path: Path) -> None:
    made, refused = decisions(2), tmp_path / "refused.jsonl"
    publish(settings, made)
    with receiving.process(422):
        done = forward(settings, "webhook", receiving.url, "--dead-letters", refused)
    rows = [json.loads(line) for line in refused.read_text().splitlines()]
    assert [Decision.model_validate(row["decision"]) for row in rows] == made, done.output
    assert {(row["to"], row["reason"]) for row in rows} == {("webhook", "status 422")}
    assert "forwarded 0 decisions" in forward(settings, "webhook", receiving.url).stderr


def test_a_decision_whose_line_a_full_disk_cut_off_is_kept_on_a_line_of_its_own(
    settings: Settings, receiving: Receiving, tmp_path: Path
) -> None:
    made, refused = decisions(2), tmp_path / "refused.jsonl"
    publish(settings, made)
    with receiving.process(422):
        with nearly_full_disk():
            done = forward(settings, "webhook", receiving.url, "--dead-letters", refused)
        assert (done.exit_code, "refused.jsonl: File too large" in done.stderr) == (2, True), done.output
        cut_off = refused.read_text()
        assert len(cut_off) == 1_000
        forward(settings, "webhook", receiving.url, "--dead-letters", refused)
    first, *lines = refused.read_text().splitlines()
    assert first == cut_off
    assert [json.loads(line)["decision"]["trace_id"] for line in lines] == [each.trace_id for each in made]


@pytest.mark.parametrize("status", [307, 401, 404])
def test_forwarding_ends_if_the_receiver_refuses_everything_and_nothing_is_lost(
    status: int, settings: Settings, receiving: Receiving
) -> None:
    publish(settings, decisions(1))
    with receiving.process(status):
        done = forward(settings, "webhook", receiving.url)
    assert f"status {status}" in str(done.exception)
    assert len(receiving.rows()) == 1


def test_the_log_says_why_a_receiver_does_not_answer(settings: Settings, tmp_path: Path) -> None:
    publish(settings, decisions(1))
    server, log = Authority(tmp_path / "authority").server("DNS:localhost"), tmp_path / "forward.log"
    with (
        Proxy(f"https://127.0.0.1:{free_port()}", server) as proxy,
        log.open("wb") as lines,
        following(settings, "webhook", proxy.url, stderr=lines),
    ):
        wait_until(lambda: "certificate verify failed" in log.read_text())


@pytest.mark.parametrize("slow_part", [b"X: y\r\n" * 20 + b"\r\n", b"\r\n" + b" " * 100], ids=["headers", "body"])
def test_an_answer_that_trickles_in_is_awaited_no_longer_than_a_silent_one(
    slow_part: bytes, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = []

    def trickle(request: BaseHTTPRequestHandler, body: bytes) -> None:
        bodies.append(body)
        request.wfile.write(b"HTTP/1.1 200 OK\r\n" + (slow_part if len(bodies) > 1 else b""))
        for byte in slow_part * (len(bodies) == 1):
            request.wfile.write(bytes([byte]))
            time.sleep(0.2)

    monkeypatch.setattr(forwarding, "_TIMEOUT_S", 1.0)
    publish(settings, decisions(1))
    with answering(trickle) as url, ending_within(10.0):
        done = forward(settings, "webhook", url)
    assert ("forwarded 1 decisions" in done.stderr, len(bodies)) == (True, 2), done.output


@pytest.mark.parametrize("url", ["file:///etc/passwd", "http://user:secret@host", "http://[secret", ""])
def test_an_address_is_checked_and_not_quoted(url: str, settings: Settings) -> None:
    problem = str(forward(settings, "webhook", url).exception)
    assert "--url: expected" in problem
    assert "secret" not in problem


@pytest.mark.parametrize("secret", ["whsec_", "whsec_$", "whsec_é", "whsec_a", "whsec_\udcff"])
def test_a_secret_without_a_key_signs_nothing(secret: str, settings: Settings, receiving: Receiving) -> None:
    publish(settings, decisions(1))
    with receiving.process():
        done = forward(settings, "webhook", receiving.url, variables={"WEBHOOK_SECRET": secret})
    assert "WEBHOOK_SECRET: expected base64 after whsec_" in str(done.exception)
    assert receiving.rows() == []


def test_secrets_may_have_any_bytes(settings: Settings, receiving: Receiving) -> None:
    publish(settings, decisions(2))
    odd = dict.fromkeys(("WEBHOOK_SECRET", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"), "\udcff")
    with receiving.process():
        forward(settings, "webhook", receiving.url, variables=odd)
        publish(settings, decisions(1))
        forward(settings, "langfuse", receiving.url, variables=odd)
    *signed, scored = receiving.rows()
    for row in signed:
        head = f"{row['webhook-id']}.{row['webhook-timestamp']}.".encode()
        signature = base64.b64encode(hmac.digest(b"\xff", head + row["body"].encode(), "sha256")).decode()
        assert row["webhook-signature"] == f"v1,{signature}"
    assert base64.b64decode(scored["authorization"].split()[1]) == b"\xff:\xff"


def collect(settings: Settings, run_id: str, *bodies: bytes | Mapping[str, Any]) -> None:
    """Store exports of a run as `serve` does, and submit the run once it is complete."""
    with Store.open(with_changed(settings, **KEPT)) as store:
        for body in bodies:
            raw, form = (body, PROTOBUF) if isinstance(body, bytes) else (json.dumps(body).encode(), "application/json")
            ((_, spans),) = spans_in(raw, form, Limits(), keeps_source=True)[0].items()
            assert store.runs.store(run_id, spans) == ("stored", 0)
        claimed = wait_until(store.runs.claim)
        assert claimed
        assert store.runs.close(claimed, "")
        assert store.runs.finish(run_id, "submitted")


def decision_on(run_id: str, outcome: str = "accepted") -> Decision:
    return decided(make_trace(trace_id=f"kp:trace:otel:{run_id}")).model_copy(update={"outcome": outcome})


def parts_of(export: bytes) -> list[tuple[Any, Any, Any]]:
    """Return the resource, the scope and the span for each span of an export."""
    return [
        (of_resource.resource, of_scope.scope, span)
        for of_resource in ExportTraceServiceRequest.FromString(export).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def spans_received(receiving: Receiving) -> list[Any]:
    assert {(row["path"], row["content-type"]) for row in receiving.rows()} <= {("/v1/traces", PROTOBUF)}
    return [span for row in receiving.rows() for *_, span in parts_of(row["body"].encode("latin-1"))]


def weight_of(span: Any) -> int:
    return next((pair.value.int_value for pair in span.attributes if pair.key == "SampleRate"), 1)


def test_an_accepted_run_is_forwarded_once_whole_and_unchanged(settings: Settings, receiving: Receiving) -> None:
    run_id, rejected_id = new_run(), new_run()
    linked = {"traceId": rejected_id.upper(), "spanId": "AB" * 8, "attributes": attributes(why="asked")}
    event = {"timeUnixNano": "5", "name": "said", "attributes": [{"key": "n", "value": {"intValue": "7"}}]}
    root = chat_span(run_id.upper()) | {"kind": 3, "status": {"code": 2}, "traceState": "vendor=1", "flags": 257}
    root |= {"spanId": root["spanId"].upper(), "links": [linked], "events": [event]}
    first = export_of(root, service__name="tides", kp__domain="code", deployment__environment__name="test")
    first["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": "tracer", "version": "1.2", "attributes": attributes(a="b")}
    child = chat_span(run_id, root["spanId"])
    second = in_protobuf(export_of(child, service__name="tools", process__command="x" * 5_000))
    collect(settings, run_id, first, second, first)
    collect(settings, rejected_id, export_of(chat_span(rejected_id)))
    publish(settings, [decision_on(run_id), decision_on(rejected_id, "rejected"), decided(make_trace(trace_id="kp:trace:own"))])
    with receiving.process():
        assert "forwarded 1 runs" in forward(settings, "otlp-spans", receiving.url).stderr
    (row,) = receiving.rows()
    # Of a large resource, only the name and the attributes that the scorer reads are kept.
    sent = parts_of(in_protobuf(first)) + parts_of(in_protobuf(export_of(child, service__name="tools")))
    link = sent[0][2].links[0]
    link.trace_id, link.span_id = bytes.fromhex(rejected_id), bytes.fromhex("ab" * 8)
    assert sorted(parts_of(row["body"].encode("latin-1")), key=lambda parts: len(parts[2].parent_span_id)) == sent


@pytest.mark.parametrize("form", ["application/json", PROTOBUF])
def test_many_small_spans_of_a_large_resource_take_little_memory_and_have_its_name(form: str) -> None:
    run_id = new_run()
    spans = [{"traceId": run_id, "spanId": f"{number:016x}", "parentSpanId": ""} for number in range(1, 10_001)]
    export = export_of(*spans, service__name="tides", process__command="x" * 3_900)
    export["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": "tracer", "version": "1" * 3_900}
    body = in_protobuf(export) if form == PROTOBUF else json.dumps(export).encode()
    received = spans_in(body, form, Limits(message_bytes=2**23, values=300_000), keeps_source=True)[0][run_id]
    assert sum(len(span.content) for span in received) < 2**26
    sent = parts_of(run_export.export_of([span.content for span in received], 1))
    assert len(sent) == 10_000
    first, *_, last = (resource for resource, *_ in sent)
    assert [len(first.attributes), *(pair.key for pair in last.attributes)] == [2, "service.name"]


def test_a_fixed_sample_of_the_other_runs_is_forwarded_too(settings: Settings, receiving: Receiving) -> None:
    accepted_id, rejected_ids = new_run(), [f"{1:018x}{last:014x}" for last in (0, 2**55 - 1, 2**55, 2**56 - 1)]
    for run_id in (accepted_id, *rejected_ids):
        collect(settings, run_id, export_of(chat_span(run_id), chat_span(run_id)))
    publish(settings, [decision_on(accepted_id), *(decision_on(run_id, "rejected") for run_id in rejected_ids)])
    with receiving.process():
        done = forward(settings, "otlp-spans", receiving.url, "--share-of-rest", "0.5")
    assert "forwarded 3 runs" in done.stderr, done.output
    weights = {(span.trace_id.hex(), weight_of(span)) for span in spans_received(receiving)}
    assert weights == {(accepted_id, 1), (rejected_ids[2], 2), (rejected_ids[3], 2)}
    assert len(spans_received(receiving)) == 6


def test_no_run_is_lost_whoever_is_killed(
    on_broker: SettingsWith, receiving: Receiving, keys: Keys, redis_client: redis.Redis
) -> None:
    settings, runs = on_broker(broker__visibility_timeout_s=3), [new_run() for _ in range(20)]
    for run_id in runs:
        collect(settings, run_id, export_of(chat_span(run_id), chat_span(run_id)))
    assert all(publish(settings, [decision_on(run_id) for run_id in runs]))

    def count() -> int:
        return len({span.span_id for span in spans_received(receiving)})

    with following(settings, "otlp-spans", receiving.url) as first:
        with receiving.process() as receiver:
            wait_until(lambda: count() >= 6)
            receiver.kill()
        with receiving.process():
            wait_until(lambda: count() >= 14)
            first.kill()
            with following(settings, "otlp-spans", receiving.url):
                wait_until(lambda: count() == 40 and not redis_client.exists(keys.runs_kept, keys.runs_bytes))


@pytest.mark.parametrize("status", [200, 422])
def test_an_outage_of_redis_does_not_end_the_command(
    status: int, settings: Settings, receiving: Receiving, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    runs, file = [new_run(), new_run()], tmp_path / "refused.jsonl"
    for run_id in runs:
        collect(settings, run_id, export_of(chat_span(run_id)))
    publish(settings, [decision_on(run_id) for run_id in runs])
    with Proxy(settings.redis.url) as proxy:
        through = with_changed(settings, broker__url=proxy.url, redis__url=proxy.url, broker__timeout_s=2.0)
        log = tmp_path / "forward.log"
        with (
            log.open("wb") as lines,
            following(through, "otlp-spans", receiving.url, "--dead-letters", str(file), stderr=lines) as process,
        ):
            wait_until(lambda: "forwarding_waits" in log.read_text())
            proxy.refuse()
            with receiving.process(status):
                wait_until(lambda: "runs: ConnectionError" in log.read_text())
                proxy.accept()
                wait_until(lambda: process.poll() is not None or not redis_client.exists(keys.runs_kept))
            assert process.poll() is None, log.read_text()
    assert len(receiving.rows()) == 2
    assert len(rows_in(file.read_text())) == 2 if status == 422 else not file.exists()


def test_refused_and_removed_runs_are_in_the_file_with_their_spans(
    settings: Settings, receiving: Receiving, tmp_path: Path
) -> None:
    refused, gone, odd, huge, file = new_run(), new_run(), new_run(), new_run(), tmp_path / "refused.jsonl"
    collect(settings, refused, export_of(chat_span(refused)))
    collect(settings, odd, export_of(chat_span(odd) | {"name": 5}))
    span = chat_span(huge)
    span["attributes"].append({"key": "cost", "value": {"doubleValue": 10**400}})
    collect(settings, huge, export_of(span))
    publish(settings, [decision_on(each) for each in (refused, gone, odd, huge)])
    with receiving.process(422):
        done = forward(settings, "otlp-spans", receiving.url, "--dead-letters", file)
    assert "forwarded 0 runs, 4 refused" in done.stderr, done.output
    rows = {row["decision"]["trace_id"][-32:]: row for row in map(json.loads, file.read_text().splitlines())}
    assert [rows[each]["reason"] for each in (refused, gone, odd, huge)] == [
        "status 422",
        "serve keeps no spans of it",
        "its spans are not those of OTLP",
        "its spans are not those of OTLP",
    ]
    assert ["spans" in rows[each] for each in (refused, gone, odd, huge)] == [True, False, True, True]
    assert refused in rows[refused]["spans"]


@pytest.mark.parametrize("rejected", [0, 1])
@pytest.mark.parametrize("to", ["otlp", "otlp-spans"])
def test_decisions_rejected_within_an_accepted_request_are_kept_in_the_file(
    to: str, rejected: int, settings: Settings, receiving: Receiving, tmp_path: Path
) -> None:
    run_id, file = new_run(), tmp_path / "refused.jsonl"
    collect(settings, run_id, export_of(chat_span(run_id)))
    publish(settings, [decision_on(run_id)])
    of_events = {"partialSuccess": {"rejectedLogRecords": str(rejected), "errorMessage": "too old"}}
    of_spans = ExportTracePartialSuccess(rejected_spans=rejected, error_message="too old")
    in_binary = ExportTraceServiceResponse(partial_success=of_spans).SerializeToString()
    with receiving.process(200, json.dumps(of_events).encode() if to == "otlp" else in_binary):
        done = forward(settings, to, receiving.url, "--dead-letters", file)
    rows = rows_in(file.read_text()) if file.exists() else []
    assert [row["reason"] for row in rows] == ["rejected 1 of it: too old"] * rejected, done.output


@pytest.mark.parametrize("to", ["otlp", "otlp-spans"])
@pytest.mark.parametrize(
    "answer",
    [b"\xff{", b'{"partialSuccess": {"rejectedLogRecords": 1e999}}', b'{"partialSuccess": {"rejectedLogRecords": {}}}'],
)
def test_a_receiver_with_an_empty_answer_has_accepted_everything(
    answer: bytes, to: str, settings: Settings, receiving: Receiving
) -> None:
    run_id = new_run()
    collect(settings, run_id, export_of(chat_span(run_id)))
    publish(settings, [decision_on(run_id)])
    with receiving.process(200, answer):
        assert "forwarded 1 " in forward(settings, to, receiving.url).stderr


def test_an_open_run_is_left_alone(settings: Settings, store: Store, receiving: Receiving, tmp_path: Path) -> None:
    run_id, spans = new_run(), [ReceivedSpan("a" * 16, b"{}")]
    store.runs.store(run_id, spans)
    publish(settings, [decision_on(run_id)])
    done = forward(settings, "otlp-spans", receiving.url, "--dead-letters", tmp_path / "refused.jsonl")
    assert "1 refused" in done.stderr, done.output
    assert store.runs.held() == (1, 2)


def test_kept_spans_expire_and_can_be_forgotten_and_make_room(
    settings: Settings, keys: Keys, redis_client: redis.Redis
) -> None:
    with Store.open(with_changed(settings, serve__total_bytes=1_000, **KEPT)) as store:

        def submitted(run_id: str) -> None:
            assert store.runs.store(run_id, [ReceivedSpan("a" * 16, b"x" * 300)]) == ("stored", 0)
            assert store.runs.finish(run_id, "submitted")

        def run_ids() -> list[str]:
            return [run.run_id for run in store.runs.collected()]

        # Runs that end within the same millisecond are in the order of their names.
        for run_id in ("first", "second", "third"):
            submitted(run_id)
        # The last fifth of the space is reserved for runs that have begun.
        assert run_ids() == ["second", "third"]
        assert redis_client.get(keys.runs_bytes) == b"600"
        assert store.runs.held() == (0, 600)
        assert store.runs.forget("kp:trace:otel:second")
        assert not store.runs.forget("kp:trace:otel:second")
        assert run_ids() == ["third"]
        redis_client.zadd(keys.runs_kept, {"third": 1})
        assert store.runs.claim() is None
        assert run_ids() == []
        assert not redis_client.exists(keys.runs_kept, keys.runs_bytes)
        # An exporter that sends a span of this run again gets the same answer as before.
        assert store.runs.store("third", [ReceivedSpan("a" * 16, b"x")]) == ("closed", 0)


@pytest.mark.parametrize("arguments", [("otlp-spans", "--outcome", "revised"), ("otlp", "--share-of-rest", "0.1")])
def test_options_that_make_no_sense_are_refused(settings: Settings, arguments: tuple[str, ...]) -> None:
    assert forward(settings, arguments[0], "http://127.0.0.1", *arguments[1:]).exit_code == 2
