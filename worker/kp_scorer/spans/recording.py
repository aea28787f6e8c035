"""Records a worker's spans by OpenTelemetry's conventions for messaging, and exports them from a thread, as OTLP over HTTP.

OpenTelemetry's own variables configure the export.
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final

import requests
import structlog
from opentelemetry.context import Context as OtelContext
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kp_scorer.spans.context import Context, Destination

_W3C: Final = TraceContextTextMapPropagator()

log = structlog.get_logger("kp_scorer.spans.recording")


class Recorder:
    """Records spans of messages, unless the producer's sampler left them out.

    While a slow collector keeps 2,048 spans waiting, further ones are dropped.
    """

    def __init__(self, system: str, node: str) -> None:
        """Export as worker ``node``, which consumes from ``system``.

        Raises ValueError if OpenTelemetry refuses a variable's value.
        """
        # This logger quotes headers that it cannot parse, and with them passwords (opentelemetry-api 1.45.2).
        logging.getLogger("opentelemetry.util.re").setLevel(logging.CRITICAL)
        own = Resource({"service.name": "kp-scorer", "service.version": version("kp-scorer"), "service.instance.id": node})
        # Resource.create() sets a default name of the service, which ours replaces; the variables come last, as they win over
        # ours.
        resource = Resource.create().merge(own).merge(OTELResourceDetector().detect())
        session = requests.Session()
        # Close each answer unread: requests 2.34 would unpack its body, however large, even that of a redirection.
        session.hooks["response"].insert(0, lambda response, **_: response.close())
        processor = BatchSpanProcessor(_ReportingExporter(session=session))
        # OpenTelemetry's own exit handler would wait half a minute for the collector.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kp_scorer")
        self._system = system
        # OpenTelemetry logs each failed export, and a collector may be down for days; we log the first.
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)

    def begin(self, context: Context, received_s: float, queue: str) -> "SpanRecording":
        """Begin to record a message with this context, which was received from a queue at this Unix time."""
        return SpanRecording(self._tracer, context, received_s, Destination(self._system, queue))

    def close(self, timeout_s: float) -> None:
        """Export the remaining spans within this time, or drop them."""
        # Shutting down waits for a collector without limit, so a daemon thread does it.
        closing = threading.Thread(target=self._provider.shutdown, name="close spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("spans_not_exported", detail=f"the collector did not accept the last spans within {timeout_s:.1f} s")


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


class SpanRecording:
    """A message as a span, and its publishing as another within it, in the OpenTelemetry trace of its producer."""

    def __init__(self, tracer: Tracer, context: Context, received_s: float, source: Destination) -> None:
        """Begin at the Unix time ``received_s``, as a child of ``context`` if there is one."""
        self._tracer = tracer
        self._span = self._start("process", source, _W3C.extract(context, OtelContext()), received_s)
        self._inside = set_span_in_context(self._span, OtelContext())
        self._publishing: Span | None = None

    def publishing(self, destination: Destination | None) -> Context:
        """Begin the span of publishing, unless it has begun; return the context of the innermost span."""
        if destination and not self._publishing:
            self._publishing = self._start("send", destination, self._inside)
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, set_span_in_context(self._publishing or self._span, OtelContext()))
        return carrier

    def end(self, attributes: Mapping[str, str | int | float], error: str = "") -> None:
        """End the spans; ``error`` is the kind of error if the message failed."""
        if self._publishing:
            self._publishing.end()
        self._span.set_attributes(attributes)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()

    def _start(self, operation: str, destination: Destination, context: OtelContext, begun_s: float | None = None) -> Span:
        attributes = {
            "messaging.system": destination.system,
            "messaging.destination.name": destination.name,
            "messaging.operation.name": operation,
            "messaging.operation.type": operation,
        }
        kind = SpanKind.CONSUMER if operation == "process" else SpanKind.PRODUCER
        begun_ns = None if begun_s is None else int(begun_s * 1e9)
        return self._tracer.start_span(f"{operation} {destination.name}", context, kind, attributes, start_time=begun_ns)
