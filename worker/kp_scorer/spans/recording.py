"""Spans by OpenTelemetry's conventions for messaging. Without its SDK nothing is recorded."""

from collections.abc import Mapping
from typing import Final

from opentelemetry.context import Context as OtelContext
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kp_scorer.spans.context import Context, Destination

SCOPE: Final = "kp_scorer"
_W3C: Final = TraceContextTextMapPropagator()


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
        return context_of(set_span_in_context(self._publishing or self._span, OtelContext()))

    def end(self, attributes: Mapping[str, str | int | float], error: str = "") -> None:
        """End the spans; ``error`` is its kind if the message failed."""
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


def context_of(current: OtelContext | None = None) -> Context:
    """The context of the span in OpenTelemetry's context, by default that of this thread or coroutine; none without a span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, current)
    return carrier
