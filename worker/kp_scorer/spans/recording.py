"""Spans as OpenTelemetry has them, by its conventions for messaging. Without its SDK, recording is nothing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import structlog
from opentelemetry.context import Context as Surroundings
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Status, StatusCode, Tracer, get_tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kp_scorer.spans.context import Context
from kp_scorer.spans.recorder import TRACE_ID, Attributes, Destination, Step

SCOPE: Final = "kp_scorer"

_W3C: Final = TraceContextTextMapPropagator()

log = structlog.get_logger("kp_scorer.spans.recording")


class SpanRecording:
    """Records a message as a span of its own, with what was done as its children, in the OpenTelemetry trace of who sent it."""

    def __init__(self, tracer: Tracer, context: Context, taken_s: float, taken_from: Destination) -> None:
        """Begin where ``context`` left off, if it says so, at the Unix time ``taken_s``."""
        self._tracer = tracer
        self._span = tracer.start_span(
            f"process {taken_from.name}",
            _W3C.extract(context, Surroundings()),
            SpanKind.CONSUMER,
            _messaging("process", taken_from),
            start_time=_ns(taken_s),
        )
        self._inside = set_span_in_context(self._span, Surroundings())
        self._publishing: Span | None = None

    def publishing(self, destination: Destination | None) -> Context:
        """Begin the span of publishing, unless there is one; return the context of the innermost."""
        if destination and not self._publishing:
            attributes = _messaging("send", destination)
            self._publishing = self._tracer.start_span(f"send {destination.name}", self._inside, SpanKind.PRODUCER, attributes)
        return _context_of(self._publishing or self._span)

    def end(self, steps: Sequence[Step], attributes: Attributes, error: str = "") -> None:
        """End the span."""
        if self._publishing:
            self._publishing.end()
        # Of one that is not sampled nobody will ask.
        if self._span.is_recording():
            for step in steps:
                together = {"messaging.batch.message_count": step.traces}
                child = self._tracer.start_span(step.name, self._inside, attributes=together, start_time=_ns(step.begun_s))
                child.end(_ns(step.ended_s))
            self._span.set_attributes(attributes)
            if error:
                _fail(self._span, error)
        self._span.end()


@contextmanager
def sending_spans(trace_ids: Sequence[str], destination: Destination) -> Iterator[Sequence[Context]]:
    """Record the sending of each trace, as part of what the application does at the moment; give the contexts of the spans."""
    attributes = _messaging("send", destination)
    try:
        tracer = get_tracer(SCOPE)
        spans = [
            tracer.start_span(f"send {destination.name}", None, SpanKind.PRODUCER, {**attributes, TRACE_ID: trace_id})
            for trace_id in trace_ids
        ]
    except Exception as error:
        # As where a variable names a provider that is not there. That is no reason not to send.
        log.warning("spans_not_recorded", detail=type(error).__name__)
        spans = [INVALID_SPAN] * len(trace_ids)
    try:
        yield [_context_of(span) for span in spans]
    except Exception as error:
        for span in spans:
            _fail(span, type(error).__name__)
        raise
    finally:
        for span in spans:
            span.end()


def _messaging(operation: str, destination: Destination) -> Mapping[str, str]:
    return {
        "messaging.system": destination.system,
        "messaging.destination.name": destination.name,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
    }


def _context_of(span: Span) -> Context:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Surroundings()))
    return carrier


def _fail(span: Span, kind: str) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, kind))


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)
