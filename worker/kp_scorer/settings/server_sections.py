"""The sections of servers and queues: URLs (whose passwords may change), names, limits, and the routes of decisions."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_serializer, field_validator, model_validator

from kp_scorer.decision import KINDS, DecisionKind
from kp_scorer.files import read_text
from kp_scorer.limits import LARGEST_NUMBER, Count
from kp_scorer.settings.section import Section
from kp_scorer.settings.urls import BROKER_SCHEMES, REDIS_SCHEMES, ServerUrl, parse_url

_LARGEST_SECRET_BYTES: Final = 65_536
_QUEUE_NAME: Final = r"^[A-Za-z0-9_.:-]{1,200}$"
QueueName = Annotated[str, Field(pattern=_QUEUE_NAME)]
Via = Literal["queue", "stream", "task"]


class _ServerSection(Section):
    schemes: ClassVar[Sequence[str]]
    url: Annotated[str, Field(repr=False)] = ""
    _file: str = PrivateAttr("")  # The file that the URL was read from; empty if it had none of its own.

    @field_validator("url")
    @classmethod
    def _can_be_parsed(cls, url: str) -> str:
        if url:
            parse_url(url, cls.schemes)
        return url

    def server(self) -> ServerUrl:
        """Return the parsed URL, which must not be empty."""
        return parse_url(self.url, self.schemes)

    def from_file(self, file: str) -> Self:
        """Return a copy that knows the file that its URL was read from."""
        copy = self.model_copy()
        copy._file = file  # noqa: SLF001  # a copy of this one
        return copy

    def at(self, section: "_ServerSection") -> Self:
        """Return a copy with the URL of another section, and the file of that URL."""
        return self.model_copy(update={"url": section.url}).from_file(section._file)  # noqa: SLF001  # of this class

    @property
    def is_renewed(self) -> bool:
        """True if :meth:`server_now` may return another password than :meth:`server`."""
        return bool(self._file and self.server().password)

    def server_now(self) -> ServerUrl:
        """Return the parsed URL as its file has it now, or as it was read at the start if the file cannot be used."""
        with suppress(OSError, ValueError):
            if self._file and (renewed := parse_url(read_secret(self._file), self.schemes)).password:
                return renewed
        return self.server()


def read_secret(file: str) -> str:
    """Return the content of a file without its line ending."""
    return read_text(file, _LARGEST_SECRET_BYTES).removesuffix("\n").removesuffix("\r")


class BrokerSettings(_ServerSection):
    """The broker that traces come from and decisions go to."""

    schemes = BROKER_SCHEMES
    timeout_s: Annotated[float, Field(ge=0.001, le=86_400)] = 5.0
    visibility_timeout_s: Annotated[int, Field(ge=3, le=1_000_000_000)] = 60
    hold_s: ClassVar[float] = 600.0
    """On RabbitMQ, a worker returns a message that has been in flight for this long to the end of its queue.

    Otherwise, RabbitMQ would take it away after its consumer_timeout of 30 minutes, and count a delivery.
    """

    @property
    def is_redis(self) -> bool:
        """True if the queues are in Redis; otherwise the broker speaks AMQP."""
        return self.url.startswith("redis")


class RedisSettings(_ServerSection):
    """The Redis that holds the novelty log and the ledger."""

    schemes = REDIS_SCHEMES
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kp"


class TraceQueue(Section):
    """The weight of a queue of traces when workers choose among their queues, and the most traces that may wait in it."""

    weight: Annotated[int, Field(ge=1, le=100)] = 1
    limit: Annotated[int, Field(ge=0, le=LARGEST_NUMBER)] = 0
    """0 sets no limit."""


def _as_table(traces: object) -> object:
    """Return the table that a single name stands for; anything else unchanged."""
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
    decisions: QueueName = "decisions"
    message_bytes: Count = 1_048_576
    results_limit: Count = 100_000

    @model_validator(mode="after")
    def _queues_of_different_kinds_differ(self) -> Self:
        beside = [name for queue in self.traces for name in (intake_name(queue), dead_name(queue))]
        if clashes := {*beside} & {*self.traces}:
            raise ValueError(f"traces: expected names other than those of queues beside them, got {', '.join(sorted(clashes))}")
        # Workers consume every message on a queue of traces as a submission.
        if {*self.traces, *beside} & set(map(self.name, KINDS)):
            raise ValueError(f"decisions: the queues of decisions need other names than {', '.join([*self.traces, *beside])}")
        return self

    @field_serializer("traces")
    def _as_configured(self, traces: dict[str, TraceQueue]) -> Any:
        (name, queue), *others = traces.items()
        return name if not others and queue == TraceQueue() else {each: traces[each].model_dump() for each in traces}

    @property
    def first(self) -> str:
        """The name of the queue of traces that is used where none is named."""
        return next(iter(self.traces))

    def name(self, kind: DecisionKind) -> str:
        """Return the name of the queue, or the stream, of decisions of this kind."""
        return f"{self.decisions}.{kind}"


class ResultsSettings(Section):
    """The way in which decisions are published, and the kinds that are."""

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
