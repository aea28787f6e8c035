"""What a worker tells of each message on its way, and whom: an exporter of spans, or nobody."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from kp_scorer.spans.context import Context

TRACE_ID: Final = "kp_scorer.trace.id"
"""The attribute of a span that holds the id of the trace which it tells of: a ReasoningTrace, not one of OpenTelemetry."""

Attributes = Mapping[str, str | int | float]


class Step(NamedTuple):
    """What was done with a trace, together with others. Times are Unix times."""

    name: str
    begun_s: float
    ended_s: float
    traces: int
    """How many traces it was done with."""


class Destination(NamedTuple):
    """Where messages are put: what kind of server that is, and what it calls the queue or the stream."""

    system: str
    name: str


class Recording(Protocol):
    """One message, from the moment it was taken."""

    def publishing(self, destination: Destination | None) -> Context:
        """A decision is about to be published there, if anywhere; return the context that goes with it, the same each time."""
        ...

    def end(self, steps: Sequence[Step], attributes: Attributes, error: str = "") -> None:
        """It has ended, by these steps, with an error of this kind if with any."""
        ...


class Recorder(Protocol):
    """Begins recordings. No call waits, whatever becomes of the spans."""

    def begin(self, context: Context, taken_s: float) -> Recording:
        """Begin to record a message with this context, which was taken at this Unix time."""
        ...

    def close(self, timeout_s: float) -> None:
        """Export what is left, in this time or not at all."""
        ...


class _NoRecording:
    """A message of which nothing is recorded: what comes of it has its context."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def publishing(self, destination: Destination | None) -> Context:
        return self._context

    def end(self, steps: Sequence[Step], attributes: Attributes, error: str = "") -> None:
        pass


class _NoRecorder:
    def begin(self, context: Context, taken_s: float) -> Recording:
        return _NoRecording(context)

    def close(self, timeout_s: float) -> None:
        pass


NO_RECORDER: Final[Recorder] = _NoRecorder()
"""Records nothing, and hands on the contexts that come."""
