"""Spans of OpenTelemetry, from the producer to the published decision. That is imported only where spans are recorded."""

from kp_scorer.spans.context import NO_CONTEXT, TRACEPARENT, TRACESTATE, Context, context_in
from kp_scorer.spans.opening import open_recorder
from kp_scorer.spans.recorder import NO_RECORDER, TRACE_ID, Destination, Recorder, Recording, Step
from kp_scorer.spans.sending import sending

__all__ = [
    "NO_CONTEXT",
    "NO_RECORDER",
    "TRACEPARENT",
    "TRACESTATE",
    "TRACE_ID",
    "Context",
    "Destination",
    "Recorder",
    "Recording",
    "Step",
    "context_in",
    "open_recorder",
    "sending",
]
