"""Exports of spans and logs are read into runs, and a damaged or costly run costs no other one."""

import json
from contextlib import suppress
from typing import Any

import pytest
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.serve.exports import LOGS, spans_in
from kp_scorer.serve.run_converter import load
from kp_scorer.store.runs import ClaimedRun
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_server import chat_span, export_of, in_protobuf, new_run

JSON, PROTOBUF = "application/json", "application/x-protobuf"
LARGEST_BODY = Limits(message_bytes=2**23)


def test_spans_in_protobuf_are_read_whatever_stands_between_them() -> None:
    parts = [export_of(chat_span(new_run()), kp__domain=domain, of_nobody="x" * 2_000) for domain in ("code", "finance")]
    # Add unknown fields (a varint, eight bytes, four bytes, a text), and a span of over a mebibyte, of which only the ids are
    # kept.
    unknown = b"\xf8\x7f\xff\x01" + b"\xf9\x7f" + bytes(8) + b"\xfd\x7f" + bytes(4) + b"\xfa\x7f\x02ab"
    large = export_of(chat_span(new_run(), said="x" * 1_100_000))
    body = unknown.join(map(in_protobuf, [*parts, large])) + unknown
    by_run, rejected = spans_in(body, PROTOBUF, Limits())
    assert rejected == 0
    at_once = ExportTraceServiceRequest.FromString(body)
    assert list(by_run) == [resource.scope_spans[0].spans[0].trace_id.hex() for resource in at_once.resource_spans]
    contents = [spans[0].content for spans in by_run.values()]
    assert [json.loads(content)["attributes"][0]["value"] for content in contents[:2]] == [
        {"stringValue": domain} for domain in ("code", "finance")
    ]
    assert contents[2] == b""
    for cut in range(0, 600, 7):
        with suppress(InvalidTrace):
            spans_in(body[:cut], PROTOBUF, Limits())


def test_a_run_of_too_many_objects_costs_no_other_run() -> None:
    # An agent recorded a list of numbers for each token. Between its spans, a collector sends those of another agent.
    costly = in_protobuf(export_of(chat_span(run_id := new_run()) | {"attributes": [{}] * 180_000}))
    others = [in_protobuf(export_of(chat_span(new_run(), said="x" * 10_000))) for _ in range(7)]
    by_run, rejected = spans_in(b"".join(costly + export for export in others), PROTOBUF, LARGEST_BODY)
    assert (rejected, len(by_run)) == (0, 8)
    of_costly = by_run.pop(run_id)
    assert [not span.content for span in of_costly] == [False] * 6 + [True]
    assert all(span.content for (span,) in by_run.values())


@pytest.mark.parametrize(("attribute", "length"), [("service.name", 1_100), ("process.command_line", 1_100_000)])
@pytest.mark.parametrize("form", [JSON, PROTOBUF])
def test_a_long_attribute_of_a_resource_costs_no_other_run(attribute: str, length: int, form: str) -> None:
    good, long = export_of(chat_span(new_run())), export_of(chat_span(new_run()), **{attribute: "x" * length})
    body = json.dumps({"resourceSpans": [*long["resourceSpans"], *good["resourceSpans"]]}).encode()
    by_run, rejected = spans_in(in_protobuf(long) + in_protobuf(good) if form == PROTOBUF else body, form, LARGEST_BODY)
    assert rejected == 0
    of_long, of_good = (span for (span,) in by_run.values())
    # JSON is parsed as a whole, so only what its spans keep of a resource is limited.
    assert (of_long.content == b"") == (form == PROTOBUF or attribute == "service.name")
    assert b"high water" in of_good.content


def test_an_event_that_cannot_be_decoded_costs_its_run_as_a_span_does() -> None:
    word, whole, damaged = "Hochwasser", new_run(), new_run()
    message = ExportLogsServiceRequest()
    records = message.resource_logs.add().scope_logs.add().log_records
    for run_id, name, content in (
        (whole, "gen_ai.choice", "At 04:12."),
        (damaged, "gen_ai.choice", word),
        (new_run(), "", word),
    ):
        record = records.add(event_name=name, trace_id=bytes.fromhex(run_id), span_id=bytes([1] * 8))
        record.body.string_value = content
    body = message.SerializeToString().replace(word.encode(), b"\xc3" * len(word))
    by_run, rejected = spans_in(body, PROTOBUF, LARGEST_BODY, LOGS)
    # Without its event, the run would be decided as if nothing had been said there. The last record is no agent's.
    assert {run_id: bool(event.content) for run_id, (event,) in by_run.items()} == {whole: True, damaged: False}
    assert rejected == 0
    # No record in JSON passes for a refused one by a field of its own.
    claiming = {"traceId": damaged, "spanId": "01" * 8, "refused": "gen_ai.choice"}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": [claiming]}]}]}
    assert spans_in(json.dumps(logs).encode(), JSON, LARGEST_BODY, LOGS) == ({}, 0)


def metadata_of(body: bytes, form: str) -> dict[str, Any]:
    """Return the metadata of the trace of the only run in an export."""
    convert: Any = load((json.dumps({"confidence": 0.8, "success": True}), Limits().model_dump_json(), "300000"))[1]
    ((_, spans),) = spans_in(body, form, Limits())[0].items()
    metadata: dict[str, Any] = convert(ClaimedRun("r", False, [each.content for each in spans], 1).export)["trace"]["metadata"]
    return metadata


def test_framework_of_a_run_is_in_the_name_of_a_scope() -> None:
    exported = export_of(chat_span(new_run()))
    exported["resourceSpans"][0]["scopeSpans"][0]["scope"] = {"name": "openinference.instrumentation.langchain"}
    for body, form in ((json.dumps(exported).encode(), JSON), (in_protobuf(exported), PROTOBUF)):
        assert metadata_of(body, form)["framework"] == "langchain"


def test_a_lone_surrogate_in_the_name_of_a_service_does_not_stop_its_runs() -> None:
    exported = export_of(chat_span(new_run()), service__name="tide \ud800")
    assert metadata_of(json.dumps(exported).encode(), JSON)["agent_id"] == "tide \ufffd"
