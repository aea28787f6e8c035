"""The ``ReasoningTrace`` message, which producers submit, as a frozen model."""

import hashlib
import json
import re
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeGuard, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kp_scorer.characters import check_name, normalized, without_unseen

TRACE_ID_PREFIX: Final = "kp:trace:"
_TRACE_ID: Final = rf"^{TRACE_ID_PREFIX}[!-~]{{1,191}}$"
DOMAIN_BYTES: Final = 200  # How long a domain may be, in bytes of UTF-8: it goes to log lines, where anybody may put anything.
# A day that there is, so that the JSON Schema says all that is checked: 29 February only in leap years.
_DAY: Final = (
    "(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = f"{_HOUR}:[0-5][0-9](?::(?:[0-5][0-9]|60)(?:[.,][0-9]+)?)?"
_DATETIME: Final = f"^{_DAY}[Tt ]{_TIME}(?:[Zz]|[+-]{_HOUR}(?::?[0-5][0-9](?::?[0-5][0-9])?)?)?$"
_DIGEST_VERSION: Final = b"kp-digest-1"
"""Names the rules by which digests are made. Under another name every redelivery across an upgrade would be a conflict."""

_CONTROLS: Final = re.compile(r"\\(?:b|u00..)")  # Those in JSON that are no white space.
_AS_VISIBLE: Final = (("\\\\", "\\/"), ('\\"', "\\'"), *((escape, " ") for escape in ("\\n", "\\r", "\\t", "\\f")))
"""What stands for escapes in JSON: then every backslash begins one, and every quotation mark begins or ends a text."""

Fraction = Annotated[float, Field(ge=0, le=1)]
StepType = Literal["thought", "tool_call", "observation", "error_recovery"]
Visibility = Literal["private", "org", "network"]
PrivacyLevel = Literal["aggregated", "federated", "private"]
STEP_TYPES: Final[tuple[StepType, ...]] = get_args(StepType)


def is_trace_id(value: object) -> TypeGuard[str]:
    """Whether a value, of any type, may be the id of a trace."""
    return isinstance(value, str) and re.fullmatch(_TRACE_ID, value) is not None


def namespaced(trace_id: str, namespace: str) -> str:
    """The id with its producer's namespace after the prefix; as it is if it has that already, or is no id."""
    start = f"{TRACE_ID_PREFIX}{namespace}:"
    if trace_id.startswith(start) or not trace_id.startswith(TRACE_ID_PREFIX):
        return trace_id
    return start + trace_id.removeprefix(TRACE_ID_PREFIX)


def begins(trace_id: str, beginning: str) -> bool:
    """Whether an id begins so after ``kp:trace:``, or after its namespaces."""
    own = trace_id.removeprefix(TRACE_ID_PREFIX)
    return own.startswith(beginning) or own.rpartition(":")[2].startswith(beginning)


def namespace_of(trace_id: str) -> str:
    """The namespace in an id, which its producer chose; empty if there is none."""
    namespace, colon, _ = trace_id.removeprefix(TRACE_ID_PREFIX).partition(":")
    return namespace if colon else ""


def _iso_datetime(text: str) -> str:
    if not re.fullmatch(_DATETIME, text):
        raise PydanticCustomError("iso_datetime", "expected an ISO 8601 date and time, such as 2026-01-31T12:00:00Z")
    return text


def _whole(value: object) -> object:
    # In JSON 1.0 is an integer too: some languages have no other way to write it.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _domain(text: str) -> str:
    # A domain names a profile and stands in labels, log lines and tables, so it must be short and look like no other.
    if not text or len(text.encode("utf-8", "surrogatepass")) > DOMAIN_BYTES:
        raise PydanticCustomError("domain", f"expected 1 to {DOMAIN_BYTES} bytes of UTF-8")
    try:
        return check_name(text)
    except ValueError as error:
        raise PydanticCustomError("domain", str(error)) from None


class _Part(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, allow_inf_nan=False, hide_input_in_errors=True, serialize_by_alias=True
    )


_DATETIME_SCHEMA: Final = {"type": "string", "pattern": _DATETIME, "description": "As RFC 3339; seconds and zone are optional."}
IsoDatetime = Annotated[str, AfterValidator(_iso_datetime), WithJsonSchema(_DATETIME_SCHEMA)]
_DOMAIN_SCHEMA: Final = {
    "type": "string",
    "minLength": 1,
    "maxLength": DOMAIN_BYTES,
    "description": f"At most {DOMAIN_BYTES} bytes of UTF-8 in NFC, nothing invisible, no space but U+0020.",
}
Domain = Annotated[str, AfterValidator(_domain), WithJsonSchema(_DOMAIN_SCHEMA)]
# A JSON array arrives as a list; strict mode alone would take only tuples. The items stay strict. After the first bad item the
# others are not looked at: collecting what is wrong with each of 100,000 takes seconds and hundreds of megabytes.
_AsTuple = Field(strict=False)


class Metadata(_Part):
    """Where a trace comes from and how it may be shared. ``quality_score`` is accepted and never read.

    ``quality_threshold`` is the score from which its submitter wants it accepted, where the settings allow that.
    """

    created_at: IsoDatetime
    task_domain: Domain
    success: bool
    quality_score: Fraction | None = None
    quality_threshold: Fraction | None = None
    visibility: Visibility
    privacy_level: PrivacyLevel
    agent_id: str | None = None
    framework: str | None = None
    validated_by: Annotated[tuple[str, ...], _AsTuple, FailFast()] = ()


class Task(_Part):
    """What the agent was asked to do."""

    objective: Annotated[str, Field(min_length=1)]
    input_schema: Any = None


class Tool(_Part):
    """The tool a step used."""

    name: str
    mcp_server: str | None = None


class Step(_Part):
    """One step of the reasoning."""

    step_id: Annotated[int, Field(ge=0), BeforeValidator(_whole)]
    type: StepType
    content: str | None = None
    tool: Tool | None = None
    input: dict[str, Any] | None = None
    output_summary: str | None = None
    latency_ms: Annotated[float, Field(ge=0, le=1e308)] | None = None


class TraceOutcome(_Part):
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

    entities: Annotated[tuple[Entity, ...], _AsTuple, FailFast()] = ()
    relationships: Annotated[tuple[Relationship, ...], _AsTuple, FailFast()] = ()


class ReasoningTrace(_Part):
    """One agent run: a task, the steps taken, and the outcome."""

    context: Annotated[Literal["https://openknowledgepulse.org/schema/v1"], Field(alias="@context")]
    type: Annotated[Literal["ReasoningTrace"], Field(alias="@type")]
    id: Annotated[str, Field(pattern=_TRACE_ID)]
    metadata: Metadata
    task: Task
    steps: Annotated[tuple[Step, ...], Field(min_length=1), _AsTuple, FailFast()]
    outcome: TraceOutcome
    source_skill: str | None = None
    knowledge_graph_delta: KnowledgeGraphDelta | None = None

    @property
    def embedding_text(self) -> str:
        """The text whose embedding gives the trace's novelty: the objective, then every step's content, joined by spaces."""
        return " ".join([self.task.objective, *(step.content or "" for step in self.steps)])

    @property
    def did(self) -> str:
        """What was done: the contents of the calls, then of the thoughts and recoveries; if blank, of all steps; by spaces."""
        calls = [step.content for step in self.steps if step.type == "tool_call" and step.content]
        thoughts = [step.content for step in self.steps if step.type in ("thought", "error_recovery") and step.content]
        text = " ".join(calls + thoughts)
        return text if text.strip() else " ".join(step.content for step in self.steps if step.content)

    def digest(self) -> bytes:
        """BLAKE2b of the content, 16 bytes: everything but the id, ``created_at`` and the fields about its quality.

        Missing fields do not count, so a field that a later version adds changes the digest of only the traces that use it.
        """
        return _hashed(self._canonical())

    def digests(self) -> "Digests":
        """The digest of the content, and that of what a person sees of it."""
        canonical = self._canonical()
        return Digests(_hashed(canonical), _hashed(_as_visible(canonical)))

    def _canonical(self) -> str:
        excluded: dict[str, Any] = {"id": True, "metadata": {"created_at", "quality_score", "quality_threshold"}}
        content = self.model_dump(mode="json", exclude=excluded, exclude_defaults=True)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class Digests(NamedTuple):
    """What two submissions are compared by."""

    content: bytes  # The same trace has the same, to the last character.
    visible: bytes
    """Copies have the same: texts that differ in white space, invisible characters and normal form look alike.

    It identifies no submission, as what is invisible may still be read, by a model for example.
    """


def _hashed(canonical: str) -> bytes:
    return hashlib.blake2b(canonical.encode(), digest_size=16, person=_DIGEST_VERSION).digest()


def _as_visible(text: str) -> str:
    """Canonical JSON with each run of white space as one space, none at the ends of texts, in NFC, and nothing invisible."""
    for escape, stand_in in _AS_VISIBLE:
        text = text.replace(escape, stand_in)
    if "\\u00" in text or "\\b" in text:
        text = _CONTROLS.sub("", text)
    if not text.isascii() or "\x7f" in text:
        text = normalized("NFC", without_unseen(text))
    return " ".join(text.split()).replace(' "', '"').replace('" ', '"')
