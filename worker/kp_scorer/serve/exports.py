"""Reads exports of OpenTelemetry, in Protobuf or JSON, groups their spans and events by run, and writes the answers.

https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kp_scorer.adapters.attributes import SERVICE
from kp_scorer.adapters.node import source
from kp_scorer.broker.publishing import portions
from kp_scorer.decoding import parse_json
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.serve.run_converter import SUPPLIED
from kp_scorer.store.runs import ReceivedSpan

Decoded = TypeVar("Decoded", bound=Message)

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"

# The attributes of a resource that its spans keep.
_OF_RESOURCES: Final = frozenset({SERVICE, *(f"kp.{name}" for name in SUPPLIED)})
_TRACE_ID: Final = re.compile("(?!0{32})[0-9a-f]{32}")
_SPAN_ID: Final = re.compile("(?!0{16})[0-9a-f]{16}")  # An id of zeros stands for none: spans of any agent may have it.
_MOST_SPANS: Final = 20_000
_MOST_FIELDS: Final = 7 * _MOST_SPANS  # The most fields around spans in Protobuf: each may have its own resource and scope.
# The most objects in an export in Protobuf before spans are no longer decoded: each takes microseconds, but only two bytes.
MOST_OBJECTS: Final = 1_000_000
_MOST_SPAN_BYTES: Final = 1_048_576  # The largest span: a parsed one takes up to two hundred times as much memory.
_MOST_SCOPE: Final = 128  # The most characters of the name of a scope.
MOST_LASTING_BYTES: Final = 1_024  # The most bytes of the attributes that spans keep of their resource.
_MOST_SOURCE_BYTES: Final = 4_096  # The most bytes of a resource, or a scope, that spans keep in full, to be handed on.
_MOST_SOURCES_BYTES: Final = 2**25  # The most bytes of those in an export: each span repeats them, however small it is.


class Signal(NamedTuple):
    """A kind of OTLP export: the keys of its lists in JSON, an item's message in Protobuf, and the fields of its ids."""

    resources: str
    scopes: str
    items: str
    message: type[Span | LogRecord]
    ids: tuple[int, ...]


SPANS: Final = Signal("resourceSpans", "scopeSpans", "spans", Span, (1, 2, 4))
LOGS: Final = Signal("resourceLogs", "scopeLogs", "logRecords", LogRecord, (9, 10))


def spans_in(
    body: bytes, media_type: str, limits: Limits, signal: Signal = SPANS, *, keeps_source: bool = False
) -> tuple[dict[str, list[ReceivedSpan]], int]:
    """Return an export's spans by the ids of their runs, and the number of spans without valid ids.

    A span that is too large or cannot be decoded is returned without content, and so are the spans of such a resource, and
    those of the largest runs once the others have a million objects. With ``keeps_source``, spans keep their resource and
    scope, to be handed on. Of an export of logs, only the events of agents are returned. Raises InvalidTrace or NotConverted if
    the body is no export.
    """
    by_run: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
    rejected = objects = sources_bytes = 0
    # Events that came as logs are not handed on.
    keeps_source = keeps_source and signal is not LOGS
    if media_type == JSON:
        exported = _from_json(body, limits, signal, keeps_source=keeps_source)
    else:
        items = _items(body, signal, keeps_source=keeps_source)
        exported = _from_protobuf(items, signal, lambda: objects <= MOST_OBJECTS)
    for number, fields in enumerate(exported):
        if number == _MOST_SPANS:
            raise InvalidTrace.whole(f"expected at most {_MOST_SPANS} spans")
        run_id, span_id = (str(fields.get(name)).lower() for name in ("traceId", "spanId"))
        has_ids = _TRACE_ID.fullmatch(run_id) and _SPAN_ID.fullmatch(span_id)
        if keeps_source and "source" in fields:
            sources_bytes += len(fields["source"])
            if sources_bytes > _MOST_SOURCES_BYTES:
                fields["source"] = _smallest_source(fields)
        # A span without attributes was too large to parse, or could not be. Its run becomes a dead letter, so keep no content.
        content = _as_bytes(fields) if "attributes" in fields else b""
        # Count the objects. Within a text, a backslash precedes each quote, so no text looks like the start of an object with
        # fields.
        objects += content.count(b'{"') + content.count(b"{}")
        if signal is LOGS:
            event = content or fields["refused"]
            if not (has_ids and b"gen_ai." in event and ("body" in fields or not content)):
                continue
            # Store the event as a child of its span, with an id from its content, so that a repeated one counts once.
            span_id = hashlib.blake2b(event, digest_size=8).hexdigest()
            content = _as_bytes(fields | {"spanId": span_id, "parentSpanId": fields["spanId"]}) if content else b""
        if has_ids:
            by_run[run_id].append(ReceivedSpan(span_id, content if len(content) <= _MOST_SPAN_BYTES else b""))
        else:
            rejected += 1
    return by_run, rejected


def portions_of(by_run: Mapping[str, Sequence[ReceivedSpan]]) -> Iterator[Sequence[tuple[str, Sequence[ReceivedSpan]]]]:
    """Yield the runs of an export, each with its id, in portions that Redis stores in one round trip.

    With a round trip for each run, an export of thousands would take longer than exporters wait, and those of other tokens
    would wait for it.
    """
    # Each run counts as at least 4 kB, so that no portion takes Redis long.
    return portions(list(by_run.items()), lambda run: 4_096 + sum(len(span.content) for span in run[1]), 1_048_576)


def _from_json(body: bytes, limits: Limits, signal: Signal, *, keeps_source: bool) -> Iterator[dict[str, Any]]:
    for resource in source(1, parse_json(body, limits)).at(signal.resources).items():
        of_resource = resource.at("resource", "attributes").items()
        lasting, is_small = _lasting([pair.value for pair in of_resource if pair.at("key").text() in _OF_RESOURCES])
        full_resource = _small(resource.at("resource").value, {"attributes": lasting}) if keeps_source else ""
        for scope in resource.at(signal.scopes).items():
            own: dict[str, Any] = {"scope": {"name": scope.at("scope", "name").text()[:_MOST_SCOPE]}}
            if keeps_source:
                own["source"] = _source(full_resource, _small(scope.at("scope").value, own["scope"]), len(lasting))
            for item in scope.at(signal.items).items():
                if is_small:
                    pairs = [*lasting, *(pair.value for pair in item.at("attributes").items())]
                    yield item.object() | own | {"attributes": pairs}
                else:
                    raw = _as_bytes(item.value) if signal is LOGS else b""
                    yield {name: item.at(name).value for name in ("traceId", "spanId")} | {"refused": raw}


class _Item(NamedTuple):
    """A span or a record of an export in Protobuf, not decoded yet, and what it keeps of its resource and its scope."""

    raw: bytes
    lasting: list[Any]
    own: dict[str, Any]
    is_of_refused: bool  # True if its resource is refused.

    def ids(self, signal: Signal) -> list[bytes]:
        layer = _Layer.FromString(self.raw)
        # If a field is repeated, the last one counts. A list of all would take forty times their bytes.
        return [b"".join(getattr(layer, f"field_{number}")[-1:]) for number in signal.ids]


def _items(body: bytes, signal: Signal, *, keeps_source: bool) -> Iterator[_Item]:
    # Parse each span by itself: 8 MiB of empty ones, parsed at once, take 700 MB.
    left = _MOST_FIELDS

    def layer(message: bytes) -> Any:
        nonlocal left
        parsed = _Layer.FromString(message)
        left -= len(parsed.field_1) + len(parsed.field_2)
        if left < 0:
            raise InvalidTrace.whole(f"expected at most {_MOST_SPANS} spans")
        return parsed

    for resource_spans in map(layer, layer(body).field_1):
        raw_resource = b"".join(resource_spans.field_1)
        resource = _decoded(Resource, raw_resource) if len(raw_resource) <= _MOST_SPAN_BYTES else None
        pairs = resource.attributes if resource is not None else ()
        lasting, is_small = _lasting([MessageToDict(pair) for pair in pairs if pair.key in _OF_RESOURCES])
        full_resource = _small(_source_in(Resource, raw_resource), {"attributes": lasting}) if keeps_source else ""
        for scope in map(layer, resource_spans.field_2):
            name = b"".join(layer(raw_scope := b"".join(scope.field_1)).field_1[-1:])
            own: dict[str, Any] = {"scope": {"name": name[:_MOST_SCOPE].decode(errors="replace")}}
            if keeps_source:
                full_scope = _small(_source_in(InstrumentationScope, raw_scope), own["scope"])
                own["source"] = _source(full_resource, full_scope, len(lasting))
            for raw in scope.field_2:
                yield _Item(raw, lasting, own, is_of_refused=resource is None or not is_small)


def _from_protobuf(items: Iterator[_Item], signal: Signal, has_room: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the items, those of the smallest runs first; without content once there is no room for further objects."""
    try:
        of_runs = [(item.ids(signal)[0], item) for item in items]
        sizes = Counter[bytes]()
        for run_id, item in of_runs:
            sizes[run_id] += len(item.raw)
        # Objects take bytes, so a run that has most of them comes after those that a collector sends with it.
        for _, item in sorted(of_runs, key=lambda each: sizes[each[0]]):
            is_readable = not item.is_of_refused and len(item.raw) <= _MOST_SPAN_BYTES and has_room()
            message = _decoded(signal.message, item.raw) if is_readable else None
            if message is None:
                yield _ids(*item.ids(signal)) | {"refused": item.raw}
                continue
            content = MessageToDict(message, use_integers_for_enums=True)
            ids = (getattr(message, name, b"") for name in ("trace_id", "span_id", "parent_span_id"))
            yield content | _ids(*ids) | item.own | {"attributes": [*item.lasting, *content.get("attributes", ())]}
    except DecodeError:
        raise InvalidTrace.whole("expected an export of OTLP in Protobuf") from None


def _decoded(kind: type[Decoded], raw: bytes) -> Decoded | None:
    """Return a message; None if Protobuf refuses its content, such as a text that is not UTF-8.

    A collector sends the spans of many agents together, and one agent's must not cost those of the others.
    """
    message: Decoded | None = None
    with suppress(DecodeError):
        message = kind.FromString(raw)
    return message


def _source_in(kind: type[Resource | InstrumentationScope], raw: bytes) -> dict[str, Any] | None:
    message = _decoded(kind, raw) if len(raw) <= _MOST_SOURCE_BYTES else None
    return MessageToDict(message) if message is not None else None


def _small(value: object, otherwise: dict[str, Any]) -> str:
    return text if isinstance(value, dict) and len(text := json.dumps(value)) <= _MOST_SOURCE_BYTES else json.dumps(otherwise)


def _source(resource: str, scope: str, lasting: int) -> str:
    """Return a span's resource and scope, and the number of its first attributes that are the resource's (``lasting``).

    The result is a single text, so that it counts as only one of the values that a run may have.
    """
    return f"[{resource}, {scope}, {lasting}]"


def _smallest_source(fields: dict[str, Any]) -> str:
    """Return a span's source, reduced to the name of the scope and to what the scorer reads of the resource."""
    *_, lasting = json.loads(fields["source"])
    return _source(_small(None, {"attributes": fields["attributes"][:lasting]}), _small(None, fields["scope"]), lasting)


def _ids(trace_id: bytes, span_id: bytes, parent_id: bytes = b"") -> dict[str, Any]:
    # OTLP's JSON has ids in hexadecimal, unlike the JSON of other Protobuf messages.
    return {"traceId": trace_id.hex(), "spanId": span_id.hex(), "parentSpanId": parent_id.hex()}


def _layer() -> Any:
    """Return the class of a message that parses one layer only: each field holds the bytes of the real message's field."""
    kind = FieldDescriptorProto
    fields = [
        kind(name=f"field_{number}", number=number, type=kind.TYPE_BYTES, label=kind.LABEL_REPEATED)
        for number in {1, 2, *SPANS.ids, *LOGS.ids}
    ]
    file = FileDescriptorProto(name="layer", message_type=[DescriptorProto(name="Layer", field=fields)])
    described = DescriptorPool().AddSerializedFile(file.SerializeToString())
    return GetMessageClass(described.message_types_by_name["Layer"])


_Layer: Final = _layer()


def _lasting(attributes: list[Any]) -> tuple[list[Any], bool]:
    """Return the attributes that spans keep of their resource, and True; none, and False, if they are too long."""
    is_small = len(_as_bytes(attributes)) <= MOST_LASTING_BYTES
    return attributes if is_small else [], is_small


def _as_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def success(media_type: str, rejected: int, message: str) -> bytes:
    """Return the answer to an export whose spans are stored, except for ``rejected`` ones; ``message`` has the reason."""
    partly = messages.ExportTracePartialSuccess(rejected_spans=rejected, error_message=message) if rejected else None
    answer = messages.ExportTraceServiceResponse(partial_success=partly)
    encoded: bytes = MessageToJson(answer, indent=None).encode() if media_type == JSON else answer.SerializeToString()
    return encoded


def failure(media_type: str, message: str) -> bytes:
    """Return the answer to an export that was not accepted: a ``google.rpc.Status``."""
    if media_type == JSON:
        return json.dumps({"message": message}).encode()
    # The message has the same field number in both types.
    encoded: bytes = messages.ExportTracePartialSuccess(error_message=message).SerializeToString()
    return encoded
