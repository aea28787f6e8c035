"""A worker's exporter of spans: OTLP over HTTP, from a thread of its own. OpenTelemetry's own variables configure it."""

import logging
import threading
from collections.abc import Sequence
from importlib.metadata import version

import requests
import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from kp_scorer.spans.context import Context, Destination
from kp_scorer.spans.recording import SCOPE, SpanRecording

log = structlog.get_logger("kp_scorer.spans.exporting")


class Recorder:
    """Records spans of messages whose producer's span is sampled; with a slow collector more than 2,048 are dropped."""

    def __init__(self, source: Destination, node: str) -> None:
        """Export as worker ``node``, which consumes from ``source``; ValueError if OpenTelemetry refuses a variable's value."""
        # This logger quotes headers that it cannot parse, and with them passwords (opentelemetry-api 1.45.2).
        logging.getLogger("opentelemetry.util.re").setLevel(logging.CRITICAL)
        own = Resource({"service.name": "kp-scorer", "service.version": version("kp-scorer"), "service.instance.id": node})
        # Resource.create() has a default name of the service, and the variables come last, to win over ours.
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        processor = BatchSpanProcessor(_ReportingExporter(session=_session()))
        # The handler that OpenTelemetry registers for the exit waits half a minute for the collector.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE)
        self._source = source
        # OpenTelemetry logs each failed export, and a collector may be down for days; we log the first.
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def begin(self, context: Context, received_s: float) -> SpanRecording:
        """Begin to record a message with this context, received at this Unix time."""
        return SpanRecording(self._tracer, context, received_s, self._source)

    def close(self, timeout_s: float) -> None:
        """Export the remaining spans within this time, or drop them."""
        # Shutting down waits for a collector without a limit, so a daemon thread does it.
        closing = threading.Thread(target=self._provider.shutdown, name="close spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("spans_not_exported", detail=f"the collector did not accept the last ones within {timeout_s:.1f} s")


def _session() -> requests.Session:
    """A session that does not read the body of an answer."""
    session = requests.Session()
    # requests 2.34 unpacks a body, however large it becomes, also that of a redirection.
    session.hooks["response"].insert(0, lambda response, **_: response.close())
    return session


class _ReportingExporter(OTLPSpanExporter):
    """Logs when exports begin to fail, and when they succeed again."""

    _succeeds = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        succeeded, self._succeeds = self._succeeds, result is SpanExportResult.SUCCESS
        if succeeded and not self._succeeds:
            log.warning("spans_not_exported", detail="the collector does not accept them; log.level = debug shows why")
        elif self._succeeds and not succeeded:
            log.info("spans_exported_again")
        return result
