"""Turns spans into submissions: complete runs are converted, submitted under ids of their own, and only then removed.

A process that dies in between leaves a claim that ends. Whichever process claims the run next submits the same trace, which is
decided once. Spans arrive as exporters of OpenTelemetry send them, in Protobuf or JSON:
https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import hashlib
import json
import math
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

import structlog
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from kp_scorer.adapters.attributes import SERVICE
from kp_scorer.adapters.node import source
from kp_scorer.bounded import BoundedProcess, Bounds
from kp_scorer.client import Client
from kp_scorer.decoding import Limits, decode_for_sending, parse_json
from kp_scorer.errors import (
    InvalidTrace,
    Problem,
    ProcessFailed,
    QueueFull,
    ScorerError,
    ServiceUnavailable,
    SettingsError,
    TraceConflict,
)
from kp_scorer.logs import Seldom, raised_at
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.run_converter import SUPPLIED
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.runs import MOST_VALUES, NO_WAIT, ClaimedRun, Ended, ReceivedSpan, Recording

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"

# The attributes of a resource that its spans keep.
_OF_RESOURCES: Final = frozenset({SERVICE, *(f"kp.{name}" for name in SUPPLIED)})
_TRACE_ID: Final = re.compile("(?!0{32})[0-9a-f]{32}")
_SPAN_ID: Final = re.compile("(?!0{16})[0-9a-f]{16}")  # A span id of zeros is none: spans of any agents may have it.
_MOST_SPANS: Final = 20_000
_MOST_FIELDS: Final = 7 * _MOST_SPANS  # The fields around spans in Protobuf: each may have its own resource and scope.
_MOST_SPAN_BYTES: Final = 1_048_576  # The largest span: a parsed one takes up to two hundred times as much memory.
_MOST_SCOPE: Final = 128  # Characters of the name of a scope.
_MOST_LASTING_BYTES: Final = 1_024  # The bytes of a resource's attributes that its spans keep.
_MOST_SOURCE_BYTES: Final = 4_096  # The bytes of a resource and a scope that spans keep in full, to be handed on.
_EVERY_S: Final = 0.5
_SHOW_EVERY_S: Final = 5.0
_BACKOFF_S: Final = 2.0
_STALLED_S: Final = 120.0
_AWAY_S: Final = 10.0
# The largest runs that make traces take 3 s and 150 MB. A claim must outlast a conversion.
_CONVERTING_S: Final = 20.0
_CONVERTING_BYTES: Final = 402_653_184

log = structlog.get_logger("kp_scorer.serve.submitter")


class Signal(NamedTuple):
    """What OTLP exports: the keys of its lists in JSON, and the message of an item in Protobuf, with the numbers of its ids."""

    resources: str
    scopes: str
    items: str
    message: type[Span | LogRecord]
    ids: tuple[int, ...]


SPANS: Final = Signal("resourceSpans", "scopeSpans", "spans", Span, (1, 2, 4))
LOGS: Final = Signal("resourceLogs", "scopeLogs", "logRecords", LogRecord, (9, 10))


class Submitter:
    """Submits complete runs, in a thread of its own. On leaving this context manager, it ends between two runs."""

    def __init__(
        self, settings: Settings, store: Store, clients: Mapping[str, Client], metrics: ServeMetrics | None = None
    ) -> None:
        """Claim runs from ``store`` and submit each by the client of its queue, or by that without a name."""
        self._metrics = metrics or ServeMetrics()
        self._shown_at = -math.inf
        self._settings = settings
        self._store = store
        self._clients = clients
        supplied = settings.serve.model_dump_json(include={"confidence", "success"})
        arguments = supplied, settings.limits.model_dump_json(), str(MOST_VALUES)
        # The answer is JSON in ASCII, which may be six times as long.
        bounds = Bounds(30.0, _CONVERTING_S, _CONVERTING_BYTES, answer_bytes=8 * settings.limits.message_bytes)
        self._converting = BoundedProcess("kp_scorer.serve.run_converter", arguments, bounds)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="submitter", daemon=True)
        self._moved_at = time.monotonic()
        self._failing_since: float | None = None
        # By queue: when it last refused a run, by the monotonic clock.
        self._refused_at: dict[str, float] = {}
        self._seldom = Seldom()

    def why_not_live(self) -> list[str]:
        """Return why this process must be restarted; empty if it need not be."""
        is_moving = self._thread.is_alive() and time.monotonic() - self._moved_at < _STALLED_S
        return [] if is_moving else ["the thread that submits runs has stalled"]

    def why_not_ready(self) -> list[str]:
        """Return why requests should go to another process; empty if they should not."""
        away_s = time.monotonic() - since if (since := self._failing_since) else 0.0
        return [f"Redis or the broker has been away for {away_s:.0f} s"] if away_s > _AWAY_S else []

    def _repeat(self) -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            pause_s = _BACKOFF_S
            self._moved_at = time.monotonic()
            full = [queue for queue, refused_at in self._refused_at.items() if self._moved_at - refused_at < _BACKOFF_S]
            run = None
            try:
                if run := self._store.runs.claim(full):
                    self._complete(run)
                if time.monotonic() - self._shown_at > _SHOW_EVERY_S:
                    self._metrics.show_held(*self._store.runs.held(), self._settings.serve)
                    self._shown_at = time.monotonic()
                pause_s = 0.0 if run else _EVERY_S
                self._failing_since = None
            except Exception as error:
                if run and isinstance(error, QueueFull):
                    # No other process has room either: requests must get their 429. Runs of other queues need not wait.
                    self._failing_since, pause_s = None, 0.0
                    self._refused_at[run.queue] = time.monotonic()
                else:
                    self._failing_since = self._failing_since or time.monotonic()
                if isinstance(error, ScorerError):
                    # The run will be claimed again.
                    log.warning("runs_wait", detail=str(error))
                else:
                    log.error("runs_wait", error=type(error).__name__, where=raised_at(error))

    def _complete(self, run: ClaimedRun) -> None:
        try:
            answer = self._converted(run)
            if answer.get("is_open") and not run.has_waited:
                self._store.runs.wait(run, is_empty="left_out" in answer)
                return
            outcome = self._outcome(run, answer)
            if self._store.runs.close(run, answer.get("agent_span", ""), outcome):
                if outcome not in ("", NO_WAIT):
                    _state(answer["trace"], json.loads(outcome))
                self._store.runs.finish(run.run_id, self._submit(run, answer))
        except (ServiceUnavailable, SettingsError):
            self._store.runs.release(run.run_id)
            raise
        except (TimeoutError, ProcessFailed) as error:
            # The claim ends later, and counts as an attempt.
            detail = str(error) if isinstance(error, ProcessFailed) else f"it took longer than {_CONVERTING_S:g} s"
            log.warning("run_not_converted", otel_trace_id=run.run_id, detail=detail)

    def _outcome(self, run: ClaimedRun, answer: dict[str, Any]) -> str:
        """Return as JSON the late outcome of a run that does not state its success; empty if it is to wait for one."""
        assumed = answer["trace"]["metadata"].get("assumed", []) if "trace" in answer else []
        if run.closed or not self._settings.serve.outcome_wait_s or "success" not in assumed:
            # Whoever claims a closed run submits the same trace as who closed it.
            return run.closed or NO_WAIT
        late = self._store.ledger.waiting_outcome(run.trace_id)
        return late.model_dump_json(include={"success", "confidence"}, exclude_none=True) if late else ""

    def _converted(self, run: ClaimedRun) -> dict[str, Any]:
        attempts, most = run.attempts - 1, self._settings.serve
        if attempts >= self._settings.worker.max_attempts:
            took = f"took longer than {_CONVERTING_S:g} s or more than {_CONVERTING_BYTES >> 20} MiB"
            return {"poison": f"$: it was converted {attempts} times, and each time that {took}, or ended its process"}
        if run.is_too_large:
            return {"problems": [Problem("$", f"expected at most {most.run_spans} spans and {most.run_bytes} bytes")]}
        answer: dict[str, Any] = self._converting.ask(run.export)
        return answer

    def _submit(self, run: ClaimedRun, answer: dict[str, Any]) -> Ended:
        """Submit a run, leave it out or dead-letter it; return which."""
        if reason := answer.get("left_out"):
            self._metrics.runs_left_out.labels(reason).inc()
            if "detail" in answer and self._seldom.is_due(answer["detail"]):
                log.warning("run_left_out", otel_trace_id=run.run_id, reason=reason, detail=answer["detail"])
            return "left_out"
        if "poison" in answer:
            self._store.dead_letters.dead_letter(run.export, DeadLettering("poison", answer["poison"], run.trace_id))
            return "dead"
        try:
            if "problems" in answer:
                raise InvalidTrace([Problem(*each) for each in answer["problems"]])
            if other := self._store.runs.recorded_before(run.run_id, Recording(*answer["recording"])):
                self._metrics.runs_left_out.labels("repeated").inc()
                detail = f"another instrumentation recorded this run as {other}, which was submitted"
                log.info("run_left_out", otel_trace_id=run.run_id, reason="repeated", detail=detail)
                return "left_out"
            trace: dict[str, Any] = answer["trace"]
            self._clients.get(run.queue, self._clients[""]).submit(trace)
            self._metrics.runs_submitted.inc()
            assumed = ", ".join(trace["metadata"].get("assumed", []))
            log.info("run_submitted", trace_id=trace["id"], spans=len(run.spans), **({"assumed": assumed} if assumed else {}))
            return "submitted"
        except TraceConflict as error:
            decoded, raw = decode_for_sending(trace, self._settings.limits)
            self._store.dead_letters.dead_letter(raw, DeadLettering("conflict", str(error), decoded.id, decoded.digest()))
        except InvalidTrace as error:
            self._store.dead_letters.dead_letter(run.export, DeadLettering("invalid", str(error), run.trace_id))
        return "dead"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(self._settings.worker.grace_s)
        self._converting.close()


def _state(trace: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Have a trace state the success and the confidence of an outcome in place of what was assumed."""
    assumed = [name for name in trace["metadata"].pop("assumed", []) if name not in outcome]
    trace["metadata"] |= {"success": outcome["success"]} | ({"assumed": assumed} if assumed else {})
    trace["outcome"]["confidence"] = outcome.get("confidence", trace["outcome"]["confidence"])


def spans_in(
    body: bytes, media_type: str, limits: Limits, signal: Signal = SPANS, *, keeps_source: bool = False
) -> tuple[dict[str, list[ReceivedSpan]], int]:
    """Return an export's spans by the ids of their runs, and the number of invalid or too large ones.

    With ``keeps_source`` they have their resource and scope, to be handed on. Of an export of logs, only the events of agents
    are returned. Raises InvalidTrace or NotConverted if it is no export.
    """
    by_run: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
    rejected = 0
    # Events that came as logs are not handed on.
    keeps_source = keeps_source and signal is not LOGS
    if media_type == JSON:
        exported = _from_json(body, limits, signal, keeps_source=keeps_source)
    else:
        exported = _from_protobuf(body, signal, keeps_source=keeps_source)
    for number, fields in enumerate(exported):
        if number == _MOST_SPANS:
            raise InvalidTrace([Problem("$", f"expected at most {_MOST_SPANS} spans")])
        run_id, span_id = (str(fields.get(name)).lower() for name in ("traceId", "spanId"))
        has_ids = _TRACE_ID.fullmatch(run_id) and _SPAN_ID.fullmatch(span_id)
        # Keep nothing of a span that is too large: its run is too large, too.
        content = _as_bytes(fields) if "attributes" in fields else b""
        if signal is LOGS:
            if not (has_ids and b"gen_ai." in content and "body" in fields):
                continue
            # It is stored as a span within its span, with an id by which it counts once.
            span_id = hashlib.blake2b(content, digest_size=8).hexdigest()
            content = _as_bytes(fields | {"spanId": span_id, "parentSpanId": fields["spanId"]})
        if has_ids:
            by_run[run_id].append(ReceivedSpan(span_id, content if len(content) <= _MOST_SPAN_BYTES else b""))
        else:
            rejected += 1
    return by_run, rejected


def _from_json(body: bytes, limits: Limits, signal: Signal, *, keeps_source: bool) -> Iterator[dict[str, Any]]:
    for resource in source(1, parse_json(body, limits)).at(signal.resources).items():
        of_resource = resource.at("resource", "attributes").items()
        lasting = _checked([pair.value for pair in of_resource if pair.at("key").text() in _OF_RESOURCES])
        full_resource = _small(resource.at("resource").value, {"attributes": lasting}) if keeps_source else ""
        for scope in resource.at(signal.scopes).items():
            own: dict[str, Any] = {"scope": {"name": scope.at("scope", "name").text()[:_MOST_SCOPE]}}
            if keeps_source:
                own["source"] = _source(full_resource, _small(scope.at("scope").value, own["scope"]), len(lasting))
            for item in scope.at(signal.items).items():
                pairs = [*lasting, *(pair.value for pair in item.at("attributes").items())]
                yield item.object() | own | {"attributes": pairs}


def _from_protobuf(body: bytes, signal: Signal, *, keeps_source: bool) -> Iterator[dict[str, Any]]:
    # Parse each span by itself: 8 MiB of empty ones, parsed at once, take 700 MB.
    left = _MOST_FIELDS

    def layer(message: bytes) -> Any:
        nonlocal left
        parsed = _Layer.FromString(message)
        left -= len(parsed.field_1) + len(parsed.field_2)
        if left < 0:
            raise InvalidTrace([Problem("$", f"expected at most {_MOST_SPANS} spans")])
        return parsed

    try:
        for resource_spans in map(layer, layer(body).field_1):
            raw_resource = b"".join(resource_spans.field_1)
            if len(raw_resource) > _MOST_SPAN_BYTES:
                raise InvalidTrace([Problem("resource", f"expected at most {_MOST_SPAN_BYTES} bytes")])
            resource = Resource.FromString(raw_resource)
            lasting = _checked([MessageToDict(pair) for pair in resource.attributes if pair.key in _OF_RESOURCES])
            full_resource = _small(_decoded(Resource, raw_resource), {"attributes": lasting}) if keeps_source else ""
            for scope in map(layer, resource_spans.field_2):
                name = b"".join(layer(raw_scope := b"".join(scope.field_1)).field_1[-1:])
                own: dict[str, Any] = {"scope": {"name": name[:_MOST_SCOPE].decode(errors="replace")}}
                if keeps_source:
                    full_scope = _small(_decoded(InstrumentationScope, raw_scope), own["scope"])
                    own["source"] = _source(full_resource, full_scope, len(lasting))
                for raw in scope.field_2:
                    if len(raw) > _MOST_SPAN_BYTES:
                        large = _Layer.FromString(raw)
                        yield _ids(*(b"".join(getattr(large, f"field_{number}")) for number in signal.ids))
                        continue
                    item = signal.message.FromString(raw)
                    content = MessageToDict(item, use_integers_for_enums=True)
                    ids = (getattr(item, name, b"") for name in ("trace_id", "span_id", "parent_span_id"))
                    yield content | _ids(*ids) | own | {"attributes": [*lasting, *content.get("attributes", ())]}
    except DecodeError:
        raise InvalidTrace([Problem("$", "expected an export of OTLP in Protobuf")]) from None


def _decoded(kind: type[Resource | InstrumentationScope], raw: bytes) -> dict[str, Any] | None:
    return MessageToDict(kind.FromString(raw)) if len(raw) <= _MOST_SOURCE_BYTES else None


def _small(value: object, otherwise: dict[str, Any]) -> str:
    return text if isinstance(value, dict) and len(text := json.dumps(value)) <= _MOST_SOURCE_BYTES else json.dumps(otherwise)


def _source(resource: str, scope: str, lasting: int) -> str:
    """Return where a span came from, whose first ``lasting`` attributes are the resource's.

    As a text it counts as one of the values that a run may have.
    """
    return f"[{resource}, {scope}, {lasting}]"


def _ids(trace_id: bytes, span_id: bytes, parent_id: bytes = b"") -> dict[str, Any]:
    # Unlike other JSON of Protobuf, OTLP's has ids in hexadecimal.
    return {"traceId": trace_id.hex(), "spanId": span_id.hex(), "parentSpanId": parent_id.hex()}


def _layer() -> Any:
    """Make the class of a message that parses no deeper than one layer: its fields are the bytes of those of another."""
    kind = FieldDescriptorProto
    fields = [
        kind(name=f"field_{number}", number=number, type=kind.TYPE_BYTES, label=kind.LABEL_REPEATED)
        for number in {1, 2, *SPANS.ids, *LOGS.ids}
    ]
    file = FileDescriptorProto(name="layer", message_type=[DescriptorProto(name="Layer", field=fields)])
    described = DescriptorPool().AddSerializedFile(file.SerializeToString())
    return GetMessageClass(described.message_types_by_name["Layer"])


_Layer: Final = _layer()


def _checked(lasting: list[Any]) -> list[Any]:
    if len(_as_bytes(lasting)) > _MOST_LASTING_BYTES:
        raise InvalidTrace([Problem("resource", f"expected {SERVICE} and kp.* of at most {_MOST_LASTING_BYTES} bytes")])
    return lasting


def _as_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def success(media_type: str, rejected: int, message: str) -> bytes:
    """Return the answer to an export of which all but ``rejected`` spans are stored; ``message`` has the reason."""
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
