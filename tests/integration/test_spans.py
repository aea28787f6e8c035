"""Spans of OpenTelemetry lead from who sends to the published decision, and nobody waits for the collector."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings, load_settings
from kp_scorer.spans import Destination, open_recorder, recording, sending
from kp_scorer.store import Publication, Store
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, Tracer, format_span_id, format_trace_id, use_span

from tests.support.collector import Collector, Seen, collecting
from tests.support.decisions import decision
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ, confirming
from tests.support.traces import short_traces

MARKER: Final = "Xylophonia"
HEX: Final = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONTEXT: Final = {"traceparent": f"00-{HEX[0]}-{HEX[1]}-01", "tracestate": "shop=42"}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> TracerProvider:
    """The provider of the application that the client runs in. There can be only one in a process, for good."""
    made = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(recording, "get_tracer", made.get_tracer)
    return made


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    """What that application records."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def tracer(provider: TracerProvider) -> Tracer:
    """By which the application records."""
    return provider.get_tracer("shop")


@pytest.fixture
def collector() -> Iterator[tuple[Collector, dict[str, str]]]:
    """A collector, and the variables that lead a worker to it."""
    with collecting() as (made, url):
        yield made, {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_SERVICE_NAME": "judge"}


@pytest.fixture(params=["redis", "rabbitmq"])
def recorded(request: pytest.FixtureRequest) -> Settings:
    """Settings on either broker by which workers record spans."""
    settings: Settings = request.getfixturevalue("settings")
    if request.param == "rabbitmq":
        rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
        settings = rabbitmq.settings()
    return recording_spans(settings)


def recording_spans(settings: Settings) -> Settings:
    return settings.model_copy(update={"otel": settings.otel.model_copy(update={"enabled": True})})


def marked(count: int) -> list[dict[str, Any]]:
    """Traces whose content must not get out."""
    return [
        {**trace, "task": {"objective": f"{MARKER} {number}"}, "metadata": {**trace["metadata"], "task_domain": MARKER}}
        for number, trace in enumerate(short_traces(count, seed=3))
    ]


def send(settings: Settings, trace: Any, headers: dict[str, Any]) -> None:
    """Call the task as any program would that records spans of its own."""
    name = settings.queues.traces
    exchange = "" if settings.broker.is_redis else name
    with confirming(settings.broker.url) as connection:
        called = {"task": TASK_NAME, "id": "1", **headers}
        connection.Producer().publish([[trace], {}, None], exchange=exchange, routing_key=name, headers=called)


def read(settings: Settings, count: int) -> dict[str, dict[str, Any]]:
    """So many messages off the queue of what was rejected: their headers by trace id."""
    found: dict[str, dict[str, Any]] = {}
    with Connection(settings.broker.url) as connection, connection.channel() as channel:

        def take() -> bool:
            while (message := channel.basic_get(settings.queues.rejected, no_ack=True)) is not None:
                message = channel.message_to_python(message)
                found[message.properties["message_id"]] = message.headers
            return len(found) >= count

        wait_until(take)
    return found


def test_spans_lead_from_who_sends_to_the_published_decision(
    recorded: Settings,
    collector: tuple[Collector, dict[str, str]],
    spans: InMemorySpanExporter,
    tracer: Tracer,
    tmp_path: Path,
) -> None:
    collected, variables = collector
    *ours, unsampled, foreign = marked(5)
    with (
        start_worker(recorded, tmp_path / "worker.log", command=FAST_WORKER, variables=variables) as worker,
        Client(recorded) as client,
    ):
        with tracer.start_as_current_span("run of an agent") as run:
            client.submit_many(ours)
        with use_span(NonRecordingSpan(SpanContext(1, 1, is_remote=False))):
            client.submit(unsampled)
        send(recorded, foreign, CONTEXT)
        send(recorded, {"@type": "ReasoningTrace", "id": "no trace"}, {"traceparent": CONTEXT["traceparent"]})
        published = read(recorded, 5)
        wait_until(lambda: worker.events("trace_dead"))
    # What ends exports what is left.
    assert worker.process.returncode == 0
    names = recorded.queues.traces, recorded.queues.rejected
    sent = {str((span.attributes or {}).get("kp_scorer.trace.id")): span for span in spans.get_finished_spans()}
    for trace in ours:
        producer = sent[trace["id"]]
        assert producer.name == f"send {names[0]}"
        assert producer.parent == run.get_span_context()
        parent = format_span_id(producer.context.span_id)
        seen = [one for one in collected.spans() if one.otel_trace == format_trace_id(run.get_span_context().trace_id)]
        (process,) = (one for one in seen if one.parent == parent)
        follow(process, seen, published[trace["id"]]["traceparent"], names)
        assert 0 < (producer.start_time or 0) <= process.begun_ns
        assert process.attributes["kp_scorer.trace.id"] == trace["id"]
        assert 0 <= process.attributes["kp_scorer.queued_s"] < 30
    assert published[unsampled["id"]]["traceparent"].startswith(f"00-{1:032x}-")
    assert published[unsampled["id"]]["traceparent"].endswith("-00")
    assert {one.otel_trace for one in collected.spans()} == {HEX[0], seen[0].otel_trace}
    of_foreign = [one for one in collected.spans() if one.otel_trace == HEX[0]]
    process, dead = sorted((one for one in of_foreign if one.parent == HEX[1]), key=lambda one: one.is_error)
    follow(process, of_foreign, published[foreign["id"]]["traceparent"], names)
    assert process.state == published[foreign["id"]]["tracestate"] == CONTEXT["tracestate"]
    assert dead.is_error
    assert dead.attributes["kp_scorer.dead_letter.reason"] == dead.attributes["error.type"] == "invalid"
    assert collected.service["service.name"] == "judge"
    assert MARKER.encode() not in collected.raw


def follow(process: Seen, seen: Sequence[Seen], told: str, names: tuple[str, str]) -> None:
    """Check that the span of a message has those of what was done with it, and that its decision tells of the last."""
    children = {one.name: one for one in seen if one.parent == process.span}
    assert (process.name, set(children)) == (f"process {names[0]}", {"look up", "embed", "decide", f"send {names[1]}"})
    times = [children[name].begun_ns for name in ("look up", "embed", "decide", f"send {names[1]}")]
    assert times == sorted(times)
    assert process.begun_ns <= times[0]
    assert max(one.ended_ns for one in children.values()) <= process.ended_ns
    assert told.startswith(f"00-{process.otel_trace}-{children[f'send {names[1]}'].span}-")
    # Whether it is sampled is the lowest bit.
    assert int(told[-2:], 16) & 1
    assert (process.attributes["kp_scorer.outcome"], process.attributes["kp_scorer.domain"]) == ("rejected", "other")


def test_a_collector_that_hangs_holds_nobody_up(
    settings: Settings, collector: tuple[Collector, dict[str, str]], tmp_path: Path
) -> None:
    collected, variables = collector
    collected.hangs.set()
    variables["OTEL_BSP_MAX_QUEUE_SIZE"] = variables["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "8"
    impatient = settings.model_copy(update={"worker": settings.worker.model_copy(update={"grace_s": 6.0})})
    started = start_worker(recording_spans(impatient), tmp_path / "worker.log", command=FAST_WORKER, variables=variables)
    with started as worker, Client(settings) as client:
        # With five spans for each, which is more than are held.
        submitted = client.submit_many(short_traces(5, seed=4))
        assert len(list(client.as_settled([str(trace_id) for trace_id in submitted], timeout_s=10))) == 5
        worker.process.send_signal(signal.SIGTERM)
        told_at = time.monotonic()
        assert worker.process.wait(20) == 0
    assert time.monotonic() - told_at < 6
    assert worker.events("spans_not_exported")
    assert collected.spans() == []


def test_the_context_goes_with_a_decision_by_whatever_way(settings: Settings, redis_client: redis.Redis) -> None:
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    mixed = load_settings({**urls, "results.accepted_via": "stream", "results.rejected_via": "task", "results.task": "take"})
    followed, alone, called = decision("kp:trace:1", score=0.9), decision("kp:trace:2", score=0.9), decision("kp:trace:3")
    with make_celery(mixed) as app, Store.open(mixed) as store:
        publications = [Publication(followed, CONTEXT), Publication(alone), Publication(called, CONTEXT)]
        assert Publisher(app, mixed, store).publish_all(publications) == [None] * 3
    entries: Any = redis_client.xrange("decisions.accepted")
    assert [{name.decode() for name in fields} - {"trace_id", "decided_at", "decision"} for _, fields in entries] == [
        set(CONTEXT),
        set(),
    ]
    assert entries[0][1][b"traceparent"].decode() == CONTEXT["traceparent"]
    item: Any = redis_client.lpop("decisions.rejected")
    assert json.loads(item)["headers"].items() >= CONTEXT.items()


def test_each_copy_of_a_decision_has_the_context_of_its_own_delivery(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    made, other = decision("kp:trace:1"), {"traceparent": f"00-{HEX[0]}-{HEX[1][::-1]}-01"}
    streams = {"results.accepted_via": "stream", "results.rejected_via": "stream"}
    both = load_settings({"broker.url": settings.broker.url, "redis.url": settings.redis.url, **streams})
    with make_celery(both) as app:
        copies = [Publication(made, CONTEXT), Publication(made, other), Publication(made)]
        assert Publisher(app, both, store).publish_all(copies) == [None] * 3
    entries: Any = redis_client.xrange("decisions.rejected")
    parents = [fields.get(b"traceparent", b"").decode() for _, fields in entries]
    assert parents == [CONTEXT["traceparent"], other["traceparent"], ""]


def test_what_records_no_spans_keeps_nothing_from_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_PYTHON_TRACER_PROVIDER", "nobody")
    with sending(["kp:trace:1", "kp:trace:2"], Destination("redis", "traces")) as contexts:
        assert contexts == [{}, {}]


def test_what_cannot_be_exported_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    taken_from = Destination("redis", "traces")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with pytest.raises(SettingsError, match="OTEL_TRACES_EXPORTER: expected otlp"):
        open_recorder(taken_from, "me")
    monkeypatch.delitem(sys.modules, "kp_scorer.spans.exporting")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"kp-scorer\[otel-worker\]"):
        open_recorder(taken_from, "me")


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_TRACES_SAMPLER", "one_percent", "Couldn't recognize sampler one_percent"),
        ("OTEL_BSP_SCHEDULE_DELAY", "5s", "OTEL_BSP_SCHEDULE_DELAY"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "max_queue_size must be a positive integer"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "Invalid timeout value 'soon'"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "hunter2", r"Header format invalid!.*occurrences$"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318", "ENDPOINT: expected a URL that begins with http"),
        ("OTEL_RESOURCE_ATTRIBUTES", "judge", "Invalid key value"),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "nobody", "'nobody' not found"),
        ("OTEL_PYTHON_METER_PROVIDER", "nobody", "Failed to load configured provider meter_provider"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "few", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT must be"),
    ],
)
def test_no_bad_value_is_passed_over(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str) -> None:
    for module in ("kp_scorer.spans.exporting", "opentelemetry.sdk.trace"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError, match=rf"^OTEL_.*{said}"):
        open_recorder(Destination("redis", "traces"), "me")


def test_an_empty_variable_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_TRACES_SAMPLER", "OTEL_BSP_SCHEDULE_DELAY"):
        monkeypatch.setenv(variable, "")
    open_recorder(Destination("redis", "traces"), "me").close(5.0)
