"""Spans of OpenTelemetry, from the producer to the published decision. It is imported when there is one to record."""

from kp_scorer.spans.context import NO_CONTEXT, TRACEPARENT, TRACESTATE, Context, context_in
from kp_scorer.spans.opening import open_recorder
from kp_scorer.spans.recorder import CARRYING, Destination, Recorder, Recording, Step
from kp_scorer.spans.sending import sending

__all__ = [
    "CARRYING",
    "NO_CONTEXT",
    "TRACEPARENT",
    "TRACESTATE",
    "Context",
    "Destination",
    "Recorder",
    "Recording",
    "Step",
    "context_in",
    "open_recorder",
    "sending",
]
