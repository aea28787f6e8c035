"""Each run that a server acknowledges is decided once, though servers are killed at random while agents export to them."""

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.arena import SEED, TRACES
from tests.support.http_server import HttpServer, open_server, text_message
from tests.support.outcomes import published
from tests.support.processes import FAST_WORKER, PATIENCE_S, start_worker, wait_until

AGENTS: Final = 3
KILLS: Final = TRACES // 50


def spans_of_a_run(number: int) -> list[ReadableSpan]:
    """Return the spans of a model's call and of the root around it, as an instrumented agent records them."""
    recorded = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": f"agent-{number}"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(recorded))
    tracer = provider.get_tracer("agent")
    with tracer.start_as_current_span("agent"), tracer.start_as_current_span("chat") as chat:
        chat.set_attribute("gen_ai.operation.name", "chat")
        chat.set_attribute("gen_ai.input.messages", text_message("user", f"question {number}"))
        chat.set_attribute("gen_ai.output.messages", text_message("assistant", f"answer {number}"))
    return list(recorded.get_finished_spans())


def export(servers: list[HttpServer], numbers: Iterator[int], acknowledged: list[str], is_over: threading.Event) -> None:
    """Export runs to the servers in turn until ``is_over``; append the ids of runs whose spans were all accepted."""
    exporters = itertools.cycle([OTLPSpanExporter(f"{server.url}/v1/traces", timeout=20) for server in servers])
    while not is_over.wait(0.02):
        spans = spans_of_a_run(next(numbers))
        if all(next(exporters).export([span]) is SpanExportResult.SUCCESS for span in spans):
            acknowledged.append(f"kp:trace:otel:{spans[0].context.trace_id:032x}")
        next(exporters)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_acknowledged_run_is_decided_once(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A killed server's claim on a run ends after five seconds here, and after a minute otherwise.
    monkeypatch.setenv("CONSTANTS", "store.runs._LEASE_MS=5000")
    choice, is_over = random.Random(SEED), threading.Event()
    quick = {"serve__quiet_s": 0.1}
    with (
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER),
        open_server(settings, tmp_path / "first.log", **quick) as first,
        open_server(settings, tmp_path / "second.log", **quick) as second,
        Client(settings) as client,
    ):
        acknowledged, numbers = list[str](), itertools.count()
        with ThreadPoolExecutor(AGENTS) as pool:
            exporting = [pool.submit(export, [first, second], numbers, acknowledged, is_over) for _ in range(AGENTS)]
            try:
                for _ in range(KILLS):
                    # Wait until another run gets through, because agents retry only some seconds after a kill.
                    before = len(acknowledged)
                    wait_until(lambda before=before: len(acknowledged) > before)  # type: ignore[misc]
                    time.sleep(choice.uniform(0.1, 0.7))
                    server = choice.choice([first, second])
                    server.process.process.kill()
                    server.process.process.wait()
                    server.start()
            finally:
                is_over.set()
            for each in exporting:
                each.result()
        decided = {status.trace_id for status in client.as_completed(acknowledged, timeout_s=PATIENCE_S) if status.decision}
        assert decided == set(acknowledged)
        # A run that a killed server has claimed is settled only after the claim has ended.
        wait_until(lambda: redis_client.zcard(keys.runs) == 0)
    assert list(store.dead_letters.read()) == []
    times = {(decision["trace_id"], decision["decided_at"]) for decision in published(settings)}
    assert max(Counter(trace_id for trace_id, _ in times).values()) == 1
    assert {trace_id for trace_id, _ in times} >= decided
