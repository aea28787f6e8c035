"""Spans of OpenTelemetry lead from the sender of a trace to its published decision, and nothing waits for the collector."""

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings
from kp_scorer.spans import is_export_configured, open_recorder
from kp_scorer.store import Store
from kp_scorer.store.decision_stream import Publication
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext, format_span_id, format_trace_id, use_span

from tests.support.builders import decision
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.collector import Collector, Span, collecting
from tests.support.processes import PATIENCE_S, at_work, ending_within, wait_until
from tests.support.rabbitmq import confirming
from tests.support.traces import short_traces

MARKER: Final = "Xylophonia"
HEX: Final = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT: Final = {"traceparent": f"00-{HEX[0]}-{HEX[1]}-01", "tracestate": "shop=42"}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the variables with which a worker exports to it."""
    with collecting() as (listening, url):
        yield listening, {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "judge"}


def marked(count: int) -> list[dict[str, Any]]:
    """Return traces whose content has a mark, which must not get into spans."""
    return [
        {**trace, "task": {"objective": f"{MARKER} {number}"}, "metadata": {**trace["metadata"], "task_domain": MARKER}}
        for number, trace in enumerate(short_traces(count, seed=3))
    ]


def send(settings: Settings, trace: Any, headers: dict[str, Any]) -> None:
    """Call the task like a program that records spans of its own."""
    name = settings.queues.first
    exchange = "" if settings.broker.is_redis else name
    with confirming(settings.broker.url) as connection:
        called = {"task": TASK_NAME, "id": "1", **headers}
        connection.Producer().publish([[trace], {}, None], exchange=exchange, routing_key=name, headers=called)


def read(settings: Settings, count: int) -> dict[str, dict[str, Any]]:
    """Consume ``count`` messages from the queue of rejected decisions; return their headers by trace id."""
    headers: dict[str, dict[str, Any]] = {}
    with Connection(settings.broker.url) as connection, connection.channel() as channel:

        def receive() -> bool:
            while (message := channel.basic_get(settings.queues.name("rejected"), no_ack=True)) is not None:
                message = channel.message_to_python(message)
                headers[message.properties["message_id"]] = message.headers
            return len(headers) >= count

        wait_until(receive)
    return headers


def test_spans_link_the_producer_to_the_published_decision(
    on_broker: SettingsWith,
    collector: tuple[Collector, dict[str, str]],
    tmp_path: Path,
) -> None:
    collected, variables = collector
    recorded = on_broker()
    *ours, unsampled, foreign = marked(5)
    with at_work(recorded, tmp_path, variables=variables) as (worker, client):
        with TracerProvider(shutdown_on_exit=False).get_tracer("shop").start_as_current_span("run of an agent") as run:
            client.submit_many(ours)
        with use_span(NonRecordingSpan(SpanContext(1, 1, is_remote=False))):
            client.submit(unsampled)
        send(recorded, foreign, CONTEXT)
        send(recorded, {"@type": "ReasoningTrace", "id": "no trace"}, {"traceparent": CONTEXT["traceparent"]})
        published = read(recorded, 5)
        wait_until(lambda: worker.events("trace_dead"))
    # A worker exports the remaining spans before it ends.
    assert worker.process.returncode == 0
    names = recorded.queues.first, recorded.queues.name("rejected")
    of_ours = collected.spans(format_trace_id(run.get_span_context().trace_id))
    of_run = [span for span in of_ours if span.parent == format_span_id(run.get_span_context().span_id)]
    processed = {span.attributes["kp_scorer.trace.id"]: span for span in of_run}
    assert processed.keys() == {trace["id"] for trace in ours}
    for trace_id, process in processed.items():
        follow(process, of_ours, published[trace_id]["traceparent"], names)
        assert 0 <= process.attributes["kp_scorer.queued_s"] < 30
    assert published[unsampled["id"]]["traceparent"].startswith(f"00-{1:032x}-")
    assert published[unsampled["id"]]["traceparent"].endswith("-00")
    assert {span.otel_trace for span in collected.spans()} == {HEX[0], format_trace_id(run.get_span_context().trace_id)}
    of_foreign = collected.spans(HEX[0])
    process, dead = sorted((span for span in of_foreign if span.parent == HEX[1]), key=lambda span: span.is_error)
    follow(process, of_foreign, published[foreign["id"]]["traceparent"], names)
    assert process.state == published[foreign["id"]]["tracestate"] == CONTEXT["tracestate"]
    assert dead.is_error
    assert dead.attributes["kp_scorer.dead_letter.reason"] == dead.attributes["error.type"] == "invalid"
    assert collected.service["service.name"] == "judge"
    assert MARKER.encode() not in collected.raw


def follow(process: Span, spans: Sequence[Span], traceparent: str, names: tuple[str, str]) -> None:
    """Check that a message's span has a child for the publishing, whose context the decision carries."""
    (publishing,) = [span for span in spans if span.parent == process.span]
    assert (process.name, publishing.name) == (f"process {names[0]}", f"send {names[1]}")
    assert process.started_ns <= publishing.started_ns <= publishing.ended_ns <= process.ended_ns
    assert process.attributes["kp_scorer.batch_size"] >= 1
    assert process.attributes["kp_scorer.look_up_ms"] > 0
    assert traceparent.startswith(f"00-{process.otel_trace}-{publishing.span}-")
    # The lowest bit says that the span is sampled.
    assert int(traceparent[-2:], 16) & 1
    assert (process.attributes["kp_scorer.outcome"], process.attributes["kp_scorer.domain"]) == ("rejected", "other")


def test_a_collector_that_hangs_delays_no_decision(
    settings: Settings, collector: tuple[Collector, dict[str, str]], tmp_path: Path
) -> None:
    collected, variables = collector
    collected.hangs.set()
    # With this timeout, whatever waited for an export would outlast the test.
    variables["OTEL_EXPORTER_OTLP_TIMEOUT"] = "600"
    variables["OTEL_BSP_MAX_QUEUE_SIZE"] = variables["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "8"
    impatient = with_changed(settings, worker__grace_s=6.0)
    with at_work(impatient, tmp_path, variables=variables) as (worker, client):
        # Each trace makes two spans, which is more than the queue of spans holds.
        submitted = client.submit_many(short_traces(12, seed=4))
        assert len(list(client.as_completed([str(trace_id) for trace_id in submitted], timeout_s=PATIENCE_S))) == 12
        with ending_within(impatient.worker.grace_s):
            worker.process.send_signal(signal.SIGTERM)
            assert worker.process.wait(PATIENCE_S) == 0
    assert worker.events("spans_not_exported")
    assert collected.spans() == []


def test_the_context_goes_with_a_decision_by_whatever_way(settings: Settings, redis_client: redis.Redis) -> None:
    streaming = with_changed(settings, results__via="stream")
    calling = with_changed(settings, results__via="task", results__task="shop.decided")
    streamed, called = decision("kp:trace:1", score=0.9), decision("kp:trace:3")
    again = {"traceparent": f"00-{HEX[0]}-{HEX[1][::-1]}-01"}
    with make_celery(settings) as app, Store.open(settings) as store:
        # Each copy of a decision carries the context of its own delivery.
        copies = [Publication(streamed, CONTEXT), Publication(streamed, again), Publication(streamed)]
        assert Publisher(app, streaming, store).publish_all(copies) == [None] * 3
        assert Publisher(app, calling, store).publish_all([Publication(called, CONTEXT)]) == [None]
    entries: Any = redis_client.xrange("decisions.accepted")
    fields = [{name.decode(): value.decode() for name, value in entry.items()} for _, entry in entries]
    contexts = [{name: entry[name] for name in entry.keys() - {"trace_id", "decided_at", "decision"}} for entry in fields]
    assert contexts == [CONTEXT, again, {}]
    item: Any = redis_client.lpop("decisions.rejected")
    assert json.loads(item)["headers"].items() >= CONTEXT.items()


def test_spans_are_refused_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kp_scorer.spans.recording", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"kp-scorer\[otel-worker\]"):
        open_recorder("redis", "me")


def test_spans_are_exported_where_a_variable_names_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_export_configured()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4318/v1/traces")
    assert is_export_configured()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "True")
    assert not is_export_configured()


def test_a_value_that_opentelemetry_refuses_is_an_error_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "0")
    with pytest.raises(SettingsError, match=r"^OTEL_.*max_queue_size must be a positive integer"):
        open_recorder("redis", "me")


def test_no_log_line_quotes_headers_with_a_password(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "hunter2")
    open_recorder("redis", "me").close(5.0)
    assert "hunter2" not in caplog.text
