"""The ``ReasoningTrace`` message: what a producer submits, checked and frozen.

Unknown fields are ignored. Everything else that does not fit is an :class:`InvalidTrace` that names the field's path and
never repeats its value, because trace content must not reach logs or error messages.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from worker.errors import InvalidTrace, Problem

TRACE_ID_PREFIX: Final = "kp:trace:"

StepType = Literal["thought", "tool_call", "observation", "error_recovery"]
STEP_TYPES: Final[tuple[StepType, ...]] = get_args(StepType)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a submission may be. Every figure is inclusive."""

    message_bytes: int = 1_048_576
    """Size of the trace as UTF-8 JSON, in bytes."""
    steps: int = 2_000
    """Number of steps."""
    field_chars: int = 100_000
    """Length of any one string, in characters."""
    depth: int = 32
    """Nesting of objects and lists, counted from the trace itself."""


def _iso_datetime(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        raise PydanticCustomError("iso_datetime", "expected an ISO 8601 date and time") from None
    if len(text) < len("2026-01-01T00:00"):
        raise PydanticCustomError("iso_datetime", "expected an ISO 8601 date and time, not a date alone")
    return text


# Python refuses to convert longer ones to text and back, because that takes quadratic time.
_HUGE_NUMBER: Final = Problem("$", "expected numbers of at most 4300 digits")


class _Part(BaseModel):
    """Strict, frozen, blind to unknown fields; the base of everything in a trace."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True, serialize_by_alias=True
    )


NonEmpty = Annotated[str, Field(min_length=1)]
IsoDatetime = Annotated[str, AfterValidator(_iso_datetime)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FreeObject = dict[str, Any]
# A JSON array arrives as a list; strict mode alone would take only tuples. The items stay strict.
_AsTuple = Field(strict=False)


class Metadata(_Part):
    """Where a trace comes from and how it may be shared. ``quality_score`` is accepted and never read."""

    created_at: IsoDatetime
    task_domain: NonEmpty
    success: bool
    quality_score: Fraction | None = None
    visibility: Literal["private", "org", "network"]
    privacy_level: Literal["aggregated", "federated", "private"]
    agent_id: str | None = None
    framework: str | None = None
    validated_by: Annotated[tuple[str, ...], _AsTuple] = ()


class Task(_Part):
    """What the agent was asked to do."""

    objective: NonEmpty
    input_schema: Any = None


class Tool(_Part):
    """The tool a step used."""

    name: str
    mcp_server: str | None = None


class Step(_Part):
    """One step of the reasoning."""

    step_id: Annotated[int, Field(ge=0)]
    type: StepType
    content: str | None = None
    tool: Tool | None = None
    input: FreeObject | None = None
    output_summary: str | None = None
    latency_ms: Annotated[float, Field(ge=0)] | None = None


class Outcome(_Part):
    """How the task ended. ``confidence`` is a fraction in 0..1."""

    result_summary: str
    confidence: Fraction


class Entity(_Part):
    """A node that the trace adds to the knowledge graph."""

    name: str
    type: str


class Relationship(_Part):
    """A fact that the trace adds to the knowledge graph."""

    fact: str
    valid_from: str


class KnowledgeGraphDelta(_Part):
    """What the trace adds to the knowledge graph."""

    entities: Annotated[tuple[Entity, ...], _AsTuple] = ()
    relationships: Annotated[tuple[Relationship, ...], _AsTuple] = ()


class ReasoningTrace(_Part):
    """One agent run: a task, the steps taken, and the outcome."""

    context: Annotated[Literal["https://openknowledgepulse.org/schema/v1"], Field(alias="@context")]
    type: Annotated[Literal["ReasoningTrace"], Field(alias="@type")]
    id: Annotated[str, Field(pattern=rf"^{TRACE_ID_PREFIX}[^\s]+$", max_length=200)]
    metadata: Metadata
    task: Task
    steps: Annotated[tuple[Step, ...], Field(min_length=1), _AsTuple]
    outcome: Outcome
    source_skill: str | None = None
    knowledge_graph_delta: KnowledgeGraphDelta | None = None

    @property
    def embedding_text(self) -> str:
        """The text whose embedding gives the trace's novelty: the objective, then every step's content, single-spaced."""
        return " ".join([self.task.objective, *(step.content or "" for step in self.steps)])

    def content_digest(self) -> bytes:
        """BLAKE2b-128 of what the trace says: everything but its id, its time stamp and the unread quality score.

        Two submissions with equal digests say the same, whatever order their JSON keys were in.
        """
        content = self.model_dump(mode="json", exclude={"id": True, "metadata": {"created_at", "quality_score"}})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.blake2b(canonical.encode(), digest_size=16).digest()


def decode_json(raw: bytes, limits: Limits) -> ReasoningTrace:
    """Decode one trace from UTF-8 JSON.

    Raises:
        InvalidTrace: not UTF-8, not JSON, not a trace, or over a limit.
    """
    return decode_trace(parse_json(raw, limits), limits, size_bytes=len(raw))


def parse_json(raw: bytes, limits: Limits) -> object:
    """Parse UTF-8 JSON of at most ``limits.message_bytes``; raises InvalidTrace that names line and column."""
    _check_size(len(raw), limits)
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidTrace([Problem("$", f"expected UTF-8; byte {error.start} is not")]) from None
    except json.JSONDecodeError as error:
        raise InvalidTrace([Problem("$", f"expected JSON; {error.msg} at line {error.lineno} column {error.colno}")]) from None
    except RecursionError:
        raise InvalidTrace([Problem("$", f"expected nesting of at most {limits.depth}")]) from None
    except ValueError:
        raise InvalidTrace([_HUGE_NUMBER]) from None


def decode_trace(payload: object, limits: Limits, *, size_bytes: int | None = None) -> ReasoningTrace:
    """Check parsed JSON and freeze it as a trace. ``size_bytes`` is its size on the wire, measured here if not given.

    Raises:
        InvalidTrace: not a trace, or over a limit; names every offending field.
    """
    if not isinstance(payload, dict):
        raise InvalidTrace([Problem("$", "expected a JSON object that is a ReasoningTrace")])
    if size_bytes is None:
        size_bytes = _size_on_the_wire(payload, limits)
    _check_size(size_bytes, limits)
    try:
        trace = ReasoningTrace.model_validate(payload)
    except ValidationError as error:
        raise InvalidTrace(_problems(error)) from None
    if problems := list(_over_limits(trace, limits)):
        raise InvalidTrace(problems)
    return trace


def _problems(error: ValidationError) -> list[Problem]:
    found = [
        Problem(".".join(map(str, item["loc"])) or "$", _SAID_FOR_JSON.get(item["type"], item["msg"]))
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    # pydantic counts only valid items, so a list whose one item is invalid seems too short as well.
    inner = {problem.field.partition(".")[0] for problem in found if "." in problem.field}
    return [problem for problem in found if problem.field != "steps" or "steps" not in inner]


_SAID_FOR_JSON: Final = {"tuple_type": "Input should be a valid array", "model_type": "Input should be a valid object"}


def _size_on_the_wire(payload: dict[str, Any], limits: Limits) -> int:
    try:
        # A list that holds itself is nested without end, like any other that is too deep.
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), check_circular=False)
    except RecursionError:
        raise InvalidTrace([Problem("$", f"expected nesting of at most {limits.depth}")]) from None
    except TypeError:
        raise InvalidTrace(
            [Problem("$", "expected only what JSON has: objects, arrays, strings, numbers, booleans, null")]
        ) from None
    except ValueError:
        raise InvalidTrace([_HUGE_NUMBER]) from None
    return len(text.encode("utf-8", "surrogatepass"))


def _check_size(size_bytes: int, limits: Limits) -> None:
    if size_bytes > limits.message_bytes:
        raise InvalidTrace([Problem("$", f"expected at most {limits.message_bytes} bytes, got {size_bytes}")])


def _over_limits(trace: ReasoningTrace, limits: Limits) -> Iterator[Problem]:
    """Check what pydantic cannot: the settings' limits, and the insides of free-form objects."""
    if len(trace.steps) > limits.steps:
        yield Problem("steps", f"expected at most {limits.steps} steps, got {len(trace.steps)}")
        return
    # Free-form values are walked on a stack of our own: they may be nested deeper than Python can recurse.
    pending: list[tuple[str, int, object]] = [("", 1, trace)]
    while pending:
        path, depth, value = pending.pop()
        match value:
            case str():
                if len(value) > limits.field_chars:
                    yield Problem(path, f"expected at most {limits.field_chars} characters, got {len(value)}")
                elif not _is_unicode(value):
                    yield Problem(path, "expected Unicode text, got a lone surrogate")
            case float():
                if not math.isfinite(value):
                    yield Problem(path, "expected a finite number")
            case None | int():
                pass
            case _ if depth > limits.depth:
                yield Problem(path, f"expected nesting of at most {limits.depth}")
            # Inside free-form values the path stops growing: their keys are content.
            case dict():
                pending.extend((path, depth + 1, key) for key in value)
                pending.extend((path, depth + 1, item) for item in value.values())
            case list():
                pending.extend((path, depth + 1, item) for item in value)
            case tuple():
                pending.extend((f"{path}.{index}", depth + 1, item) for index, item in enumerate(value))
            case BaseModel():
                pending.extend((f"{path}.{name}".lstrip("."), depth + 1, item) for name, item in value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
