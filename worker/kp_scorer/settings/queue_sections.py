"""The sections of the queues: what they are called, how much waits there, and how decisions reach their readers."""

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    field_serializer,
    model_validator,
)

from kp_scorer.decision import KINDS, DecisionKind
from kp_scorer.decoding import MOST, Count
from kp_scorer.settings.section import Section

_QUEUE_NAME: Final = r"^[A-Za-z0-9_.:-]{1,200}$"
QueueName = Annotated[str, Field(pattern=_QUEUE_NAME)]
Via = Literal["queue", "stream", "task"]


class TraceQueue(Section):
    """The share of a queue of traces in what workers take, and the most traces that may wait there."""

    weight: Annotated[int, Field(ge=1, le=100)] = 1
    limit: Annotated[int, Field(ge=0, le=MOST)] = 0
    """0 sets no limit."""


def _as_table(traces: object) -> object:
    """Return the table that a single name stands for."""
    if not isinstance(traces, str):
        return traces
    if not re.match(_QUEUE_NAME, traces):
        raise ValueError("expected a name of 1 to 200 letters, digits and _.:-, or a table of queues by name")
    return {traces: TraceQueue()}


def intake_name(queue: str) -> str:
    """Return the name of the queue beside a queue of traces on RabbitMQ, for producers that declare the queue they send to."""
    return f"{queue}.intake"


def dead_name(queue: str) -> str:
    """Return the name of the queue beside a queue of traces to which RabbitMQ moves messages that expire."""
    return f"{queue}.dead"


class QueueSettings(Section):
    """The names of the queues, and their limits."""

    traces: Annotated[dict[QueueName, TraceQueue], BeforeValidator(_as_table), Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: {"traces": TraceQueue()}
    )
    accepted: QueueName = "decisions.accepted"
    review: QueueName = "decisions.review"
    rejected: QueueName = "decisions.rejected"
    revised: QueueName = "decisions.revised"
    message_bytes: Count = 1_048_576
    results_limit: Count = 100_000

    @model_validator(mode="after")
    def _queues_of_different_kinds_differ(self) -> Self:
        beside = [name for queue in self.traces for name in (intake_name(queue), dead_name(queue))]
        if clashes := {*beside} & {*self.traces}:
            raise ValueError(f"traces: expected names that no queue beside another has, got {', '.join(sorted(clashes))}")
        # Workers consume every message on a queue of traces as a submission.
        if {*self.traces, *beside} & set(map(self.name, KINDS)):
            raise ValueError(f"the queues of decisions need other names than {', '.join([*self.traces, *beside])}")
        return self

    @field_serializer("traces")
    def _as_configured(self, traces: dict[str, TraceQueue]) -> Any:
        (name, queue), *others = traces.items()
        return name if not others and queue == TraceQueue() else {each: traces[each].model_dump() for each in traces}

    @property
    def first(self) -> str:
        """The queue of traces for those who name none."""
        return next(iter(self.traces))

    def name(self, kind: DecisionKind) -> str:
        """Return the name of the queue, or the stream, of decisions of this kind."""
        return {"accepted": self.accepted, "review": self.review, "rejected": self.rejected, "revised": self.revised}[kind]


class ResultsSettings(Section):
    """The way in which decisions are published, and which of them are."""

    via: Via = "queue"
    publish: tuple[DecisionKind, ...] = KINDS
    task: Annotated[str, Field(pattern=r"^[!-~]{0,255}$")] = ""
    nearest: bool = True
    with_trace: bool = False

    @model_validator(mode="after")
    def _a_task_has_a_name(self) -> Self:
        if self.via == "task" and not self.task:
            raise ValueError("task: expected the name of the task to call where via is 'task'")
        return self
