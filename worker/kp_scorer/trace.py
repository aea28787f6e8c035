"""The ``ReasoningTrace`` that producers submit, as a frozen model."""

import hashlib
import hmac
import json
import re
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeGuard, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kp_scorer.characters import check_name, has_wide_space, normalized, without_unseen

TRACE_ID_PREFIX: Final = "kp:trace:"
_TRACE_ID: Final = rf"^{TRACE_ID_PREFIX}[!-~]{{1,191}}$"
OUTCOME_ID_PREFIX: Final = "kp:outcome:"
_OUTCOME_ID: Final = rf"^{OUTCOME_ID_PREFIX}[!-~]{{1,189}}$"
DOMAIN_BYTES: Final = 200  # The longest domain in bytes of UTF-8. Producers choose domains, and log lines contain them.
# Matches only days that exist, so 29 February only in leap years: the JSON Schema must be as strict as the check.
_DAY: Final = (
    "(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_HOUR: Final = "(?:[01][0-9]|2[0-3])"
_TIME: Final = f"{_HOUR}:[0-5][0-9](?::(?:[0-5][0-9]|60)(?:[.,][0-9]+)?)?"
_DATETIME: Final = f"^{_DAY}[Tt ]{_TIME}(?:[Zz]|[+-]{_HOUR}(?::?[0-5][0-9](?::?[0-5][0-9])?)?)?$"
_UNRELEASED_BYTES: Final = 2_047
_DIGEST_VERSION: Final = b"kp-digest-1"
"""The version of the rules for digests. With another one, every redelivery across an upgrade would be a conflict."""

_RARE_ESCAPE: Final = re.compile(r"\\[rtfbu]")
_CONTROLS: Final = re.compile(r"\\(?:b|u00..)")  # The escapes of JSON for controls other than white space.
_SPACES: Final = re.compile(b"  +")

Fraction = Annotated[float, Field(ge=0, le=1)]
StepType = Literal["thought", "tool_call", "observation", "error_recovery"]
Visibility = Literal["private", "org", "network"]
PrivacyLevel = Literal["aggregated", "federated", "private"]
STEP_TYPES: Final[tuple[StepType, ...]] = get_args(StepType)


def is_trace_id(value: object) -> TypeGuard[str]:
    """Return whether a value of any type is a valid trace id."""
    return isinstance(value, str) and re.fullmatch(_TRACE_ID, value) is not None


def is_submission_id(value: object) -> TypeGuard[str]:
    """Return whether a value of any type is the id of a trace or of a late outcome."""
    return is_trace_id(value) or (isinstance(value, str) and re.fullmatch(_OUTCOME_ID, value) is not None)


def namespaced(trace_id: str, namespace: str) -> str:
    """Return an id with the namespace of its producer after the prefix; unchanged if it has the namespace, or is not an id."""
    start = f"{TRACE_ID_PREFIX}{namespace}:"
    if trace_id.startswith(start) or not trace_id.startswith(TRACE_ID_PREFIX):
        return trace_id
    return start + trace_id.removeprefix(TRACE_ID_PREFIX)


def has_beginning(trace_id: str, beginning: str) -> bool:
    """Return whether an id has this beginning, counted from after ``kp:trace:`` or from after its namespaces."""
    own = trace_id.removeprefix(TRACE_ID_PREFIX)
    return own.startswith(beginning) or own.rpartition(":")[2].startswith(beginning)


def namespace_of(trace_id: str) -> str:
    """Return the namespace in an id, which its producer chose; empty if there is none."""
    namespace, colon, _ = trace_id.removeprefix(TRACE_ID_PREFIX).partition(":")
    return namespace if colon else ""


def _iso_datetime(text: str) -> str:
    if not re.fullmatch(_DATETIME, text):
        raise PydanticCustomError("iso_datetime", "expected an ISO 8601 date and time, such as 2026-01-31T12:00:00Z")
    return text


def _as_integer(value: object) -> object:
    # In JSON, 1.0 is an integer, too, and some languages can write 1 only in this way.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _domain(text: str) -> str:
    # Labels, log lines and tables contain domains, so they must be short, and two domains must not look the same.
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
# A JSON array is a list, and strict mode would accept only tuples. The items stay strict. FailFast skips all items after an
# invalid one: collecting the errors of 100,000 items takes seconds and hundreds of megabytes.
_AsTuple = Field(strict=False)


class Metadata(_Part):
    """The origin of a trace and the limits on sharing it. ``quality_score`` is accepted and never read.

    ``quality_threshold`` is the threshold that its submitter requests, which applies if the settings allow it.
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
    """The task that the agent was given."""

    objective: Annotated[str, Field(min_length=1)]
    input_schema: Any = None


class Tool(_Part):
    """The tool a step used."""

    name: str
    mcp_server: str | None = None


class Step(_Part):
    """One step of the reasoning."""

    step_id: Annotated[int, Field(ge=0), BeforeValidator(_as_integer)]
    type: StepType
    content: str | None = None
    tool: Tool | None = None
    input: dict[str, Any] | None = None
    output_summary: str | None = None
    latency_ms: Annotated[float, Field(ge=0, le=1e308)] | None = None


class TraceOutcome(_Part):
    """The result of the task, and the agent's confidence in it, 0..1."""

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
    """The additions of a trace to the knowledge graph."""

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
        """The text whose embedding gives the novelty: the objective and every step's content, joined by spaces."""
        return " ".join([self.task.objective, *(step.content or "" for step in self.steps)])

    @property
    def actions_text(self) -> str:
        """The contents of the calls, then of the thoughts and recoveries, joined by spaces; if blank, those of all steps."""
        calls = [step.content for step in self.steps if step.type == "tool_call" and step.content]
        thoughts = [step.content for step in self.steps if step.type in ("thought", "error_recovery") and step.content]
        text = " ".join(calls + thoughts)
        return text if text.strip() else " ".join(step.content for step in self.steps if step.content)

    def digest(self) -> bytes:
        """Return the 16-byte BLAKE2b digest of the content: all but the id, ``created_at`` and the fields about quality."""
        # Missing fields do not count, so a field that a later version adds changes only the digests of traces that have it.
        return _hashed(self._canonical().encode())

    def digests(self) -> "Digests":
        """Return the digest of the content, and that of its visible part."""
        canonical = self._canonical()
        return Digests(_hashed(canonical.encode()), _hashed(_as_visible(canonical)))

    def _canonical(self) -> str:
        excluded: dict[str, Any] = {"id": True, "metadata": {"created_at", "quality_score", "quality_threshold"}}
        content = self.model_dump(mode="json", exclude=excluded, exclude_defaults=True)
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


class LateOutcome(_Part):
    """An outcome that becomes known after the submission of its trace, which is then decided again."""

    type: Annotated[Literal["LateOutcome"], Field(alias="@type")]
    id: Annotated[str, Field(pattern=_OUTCOME_ID)]
    trace_id: Annotated[str, Field(pattern=_TRACE_ID)]
    success: bool
    confidence: Fraction | None = None
    reason: Annotated[str, Field(max_length=200)] | None = None
    key: Annotated[str, Field(pattern=r"^[!-~]{16,200}$")]
    """Shows that the sender may speak for the trace: the text whose SHA-256 in hex ends the id, or an :func:`outcome_key`."""

    @model_validator(mode="before")
    @classmethod
    def _with_id(cls, payload: Any) -> Any:
        # An outcome without an id gets one from its content, so that the same outcome counts once.
        if not isinstance(payload, dict) or payload.get("id") is not None:
            return payload
        content = json.dumps(
            [payload.get(name) for name in ("trace_id", "success", "confidence", "reason", "key")], default=str
        )
        return {**payload, "id": OUTCOME_ID_PREFIX + hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}

    def digest(self) -> bytes:
        """Return the 16-byte digest of everything but the id. It covers the key, so a forged outcome has another digest."""
        return _hashed(json.dumps(self.model_dump(mode="json", exclude={"id"}), sort_keys=True).encode())

    def is_authentic(self, secret: str) -> bool:
        """Return whether the key belongs to the trace; ``secret`` is that of the ledger."""
        is_known_to_producer = self.trace_id.endswith(hashlib.sha256(self.key.encode()).hexdigest())
        return is_known_to_producer or hmac.compare_digest(self.key, outcome_key(secret, self.trace_id))


def outcome_key(secret: str, trace_id: str) -> str:
    """Return the key with which programs that may read the ledger's secret send late outcomes of a trace."""
    return hmac.digest(secret.encode(), trace_id.encode(errors="replace"), "sha256").hex()


class Digests(NamedTuple):
    """The digests by which two submissions are compared."""

    content: bytes  # Equal for traces that are equal to the last character.
    visible: bytes
    """Equal for copies, whose texts look the same: they differ only in white space, invisible characters or normal form.

    It does not identify a submission, because some readers, such as models, do see invisible characters.
    """


def _hashed(content: bytes) -> bytes:
    digest, view = hashlib.blake2b(digest_size=16, person=_DIGEST_VERSION), memoryview(content)
    # Hash small pieces: for larger ones, hashlib releases the interpreter's lock, and another thread may then keep it for 5 ms.
    for start in range(0, len(view), _UNRELEASED_BYTES):
        digest.update(view[start : start + _UNRELEASED_BYTES])
    return digest.digest()


def _as_visible(text: str) -> bytes:
    """Return canonical JSON in NFC, without invisible characters, with single spaces, and none at the ends of texts."""
    # After the first two replacements, every backslash begins an escape, and every quotation mark delimits a text.
    text = text.replace("\\\\", "\\/").replace('\\"', "\\'").replace("\\n", " ")
    if _RARE_ESCAPE.search(text):
        text = _CONTROLS.sub("", text.replace("\\r", " ").replace("\\t", " ").replace("\\f", " "))
    if not text.isascii() or "\x7f" in text:
        # The Braille cell without dots looks like a space, but Python does not count it as one.
        text = normalized("NFC", without_unseen(text)).replace("\u2800", " ")
        if has_wide_space(text):
            text = " ".join(text.split())
    # Splitting the text at its spaces and joining it again would take twice as long.
    return _SPACES.sub(b" ", text.encode()).replace(b' "', b'"').replace(b'" ', b'"')
