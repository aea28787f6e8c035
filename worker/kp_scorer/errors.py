"""Defines every error that this package raises on purpose, one class for each thing that a caller can do next.

    ScorerError
    ├── SettingsError            correct the setting, start again
    │   └── WindowDiffers        requeue all that is in flight and exit; other workers can decide
    ├── InvalidTrace             correct the trace; a worker dead-letters it
    │   └── UnknownFormat        check that it is a trace, or convert it to one
    ├── NotConverted             correct the record in the other format, or pass the option that supplies a field
    │   ├── FieldsMissing        pass the options that it names
    │   ├── NotRecorded          configure the agent to record its messages
    │   └── Unfinished           wait for the rest of the run
    ├── TraceConflict            use another id; a worker dead-letters it
    ├── TraceDead                look at the dead letter; no decision will come
    ├── DecisionTimeout          wait again, if the trace is known
    ├── OutputFailed             give the command a stdout that it can write to
    ├── ProcessFailed            ask it another question; it could not answer this one
    ├── EngineUnavailable        try the next engine; after the last, raise SettingsError or use no embedder
    └── ServiceUnavailable       try again later; nothing was lost
        ├── NoQueue              start the worker that declares the queue
        ├── QueueFull            try again later, and more slowly
        ├── BrokerBlocked        clear RabbitMQ's alarm
        ├── TraceHeld            another worker is deciding it; look again in a moment
        └── EmbedderUnhealthy    requeue all that is in flight and exit; another process can embed

No message holds trace content: only field paths, ids, names of settings, and what was expected.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Literal, NamedTuple, Self, get_args

Reason = Literal["malformed", "invalid", "conflict", "scoring_failed", "poison", "lost", "damaged"]
"""The reason for which a submission became a dead letter."""

REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


class ScorerError(Exception):
    """Base of every error of the scorer."""

    exit_code: ClassVar[int] = 1  # Exit code of a process that ends because of this error.


class SettingsError(ScorerError):
    """A setting has a value that cannot be used, or something it asks for is not installed."""

    exit_code = 2


class WindowDiffers(SettingsError):
    """The window of this process is not that of the novelty log, which other workers share."""


class Problem(NamedTuple):
    """One thing wrong with a submission."""

    field: str
    """The dotted path of the field, with list positions from 0: ``steps.3.tool.name``; ``$`` is the whole message."""
    expected: str
    """The expectation that the field does not meet, without the offending value."""


class InvalidTrace(ScorerError):
    """A submission is not a ReasoningTrace, or is larger or deeper than the limits allow."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(_summary(self.problems))

    @classmethod
    def whole(cls, expected: str) -> Self:
        """Return the error of a submission that is wrong as a whole, and not in one field."""
        return cls([Problem("$", expected)])


class UnknownFormat(InvalidTrace):
    """Lines of the input are neither traces nor anything else that this command reads; the message says what to do.

    ``lines`` has the numbers of the first such lines, and ``count`` says how many there are.
    """

    def __init__(self, problems: Sequence[Problem], lines: Sequence[int] = (), count: int = 1) -> None:
        super().__init__(problems)
        self.lines, self.count = tuple(lines), count


class NotConverted(ScorerError):
    """A record in another format does not make a valid trace."""

    def __init__(self, line: int, problems: Sequence[Problem]) -> None:
        self.line = line
        self.problems = tuple(problems)
        super().__init__(f"line {line}: {_summary(self.problems)}")


class FieldsMissing(NotConverted):
    """A record lacks fields of a trace, and nobody supplied them; ``options`` names the command's options that would."""

    def __init__(self, line: int, missing: Mapping[str, str]) -> None:
        self.options = tuple(missing.values())
        expected = ((field, f"expected {option}: the source does not state it") for field, option in missing.items())
        super().__init__(line, [Problem(*each) for each in expected])


class NotRecorded(NotConverted):
    """The spans of an agent hold no messages."""


class Unfinished(NotConverted):
    """An agent has called tools, but neither an answer nor a result is recorded."""

    is_part = False  # True if this may be the beginning of a run that another record repeats and continues.


def _summary(problems: Sequence[Problem]) -> str:
    summary = "; ".join(f"{problem.field}: {problem.expected}" for problem in problems[:3])
    more = len(problems) - 3
    return summary + (f"; and {more} more" if more > 0 else "")


class TraceConflict(ScorerError):
    """A trace with this id and other content was submitted before; the first one stands."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        super().__init__(f"id: {trace_id} was submitted before with other content; the first submission stands")


class TraceDead(ScorerError):
    """A trace ended as a dead letter, so it will get no decision."""

    def __init__(self, trace_id: str, reason: Reason, detail: str) -> None:
        self.trace_id = trace_id
        self.reason = reason
        self.detail = detail
        super().__init__(f"{trace_id} was dead-lettered, {reason}: {detail}")


class DecisionTimeout(ScorerError):
    """No decision came within the time given; the trace is pending or unknown."""

    def __init__(self, trace_id: str, timeout_s: float, *, is_known: bool) -> None:
        self.trace_id = trace_id
        self.is_known = is_known
        state = "still pending" if is_known else "unknown: never submitted, forgotten, or not received by a worker yet"
        super().__init__(f"no decision on {trace_id} within {timeout_s:g} s; it is {state}")


class OutputFailed(ScorerError):
    """Standard output cannot be written: its reader is gone, or the disk is full."""

    exit_code = 2

    def __init__(self, message: str, *, is_unread: bool = False) -> None:
        super().__init__(message)
        self.is_unread = is_unread  # True if nobody reads the pipe any more.


class ProcessFailed(ScorerError):
    """A process that works on hostile texts failed to answer a question, or ended."""


class EngineUnavailable(ScorerError):
    """An engine cannot run here; the message says why."""


class ServiceUnavailable(ScorerError):
    """Redis or the broker cannot be reached, refuses, or does not answer in time."""

    exit_code = 3


class NoQueue(ServiceUnavailable):
    """RabbitMQ has no such queue, and another program has to declare it."""


class QueueFull(ServiceUnavailable):
    """There is no room for a submission, or for a run's spans, until others are decided."""


class BrokerBlocked(ServiceUnavailable):
    """RabbitMQ accepts no messages, as it has an alarm: it is short of memory or disk."""

    def __init__(self) -> None:
        super().__init__(
            "broker: RabbitMQ accepts no messages, as it is short of memory or disk: see `rabbitmq-diagnostics alarms` there"
        )


class TraceHeld(ServiceUnavailable):
    """Another worker, which is alive, is deciding this trace."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        super().__init__("ledger: another worker is deciding this trace")


class EmbedderUnhealthy(ServiceUnavailable):
    """The embedder of this process fails on every text."""

    exit_code = 4
