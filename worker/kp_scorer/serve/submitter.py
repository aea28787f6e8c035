"""From spans to submissions: complete runs are converted, submitted under ids made of their own, and only then removed.

A process that dies in between leaves a claim that ends. Whoever claims the run next submits the same, which is decided once.
"""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any, Final, Self

import structlog
from pydantic import TypeAdapter, ValidationError

from kp_scorer.adapters import SuppliedFields, convert
from kp_scorer.client import Client
from kp_scorer.decoding import check_values, decode_for_sending
from kp_scorer.errors import InvalidTrace, NotConverted, Problem, QueueFull, ServiceUnavailable, TraceConflict
from kp_scorer.ledger import Store
from kp_scorer.ledger.runs import ClosedRun
from kp_scorer.logs import raised_at
from kp_scorer.serve.otlp import SERVICE, SUPPLIED, Fields, export_of
from kp_scorer.settings import Settings
from kp_scorer.trace import TRACE_ID_PREFIX

_EVERY_S: Final = 0.5
_BACKOFF_S: Final = 2.0
_STALLED_S: Final = 120.0
_SILENT_S: Final = 10.0
_MOST_VALUES: Final = 300_000  # Of a run: converted, they take up to a kilobyte each.
_FIELDS: Final = TypeAdapter(SuppliedFields)
_MISSING: Final = "expected this attribute on the root span or its resource, or the setting of its name in the section serve"
_LACKS: Final = {"outcome.confidence": Problem("kp.confidence", _MISSING), "metadata.success": Problem("kp.success", _MISSING)}
"""By the fields of a trace that nothing supplies, what to do about it."""

log = structlog.get_logger("kp_scorer.serve.submitter")


class Submitter:
    """Submits complete runs, in a thread of its own. A context manager: it ends between two runs."""

    def __init__(self, settings: Settings, store: Store, client: Client) -> None:
        """Take runs from ``store``, submit them by ``client``."""
        self._settings = settings
        self._store = store
        self._client = client
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="submitter", daemon=True)
        self._moved_at = self._succeeded_at = time.monotonic()

    def why_not_live(self) -> list[str]:
        """Why this process should be started again; empty if it should not."""
        is_moving = self._thread.is_alive() and time.monotonic() - self._moved_at < _STALLED_S
        return [] if is_moving else ["the thread that submits runs has stalled"]

    def why_not_ready(self) -> list[str]:
        """Why requests should go elsewhere; empty if they should not."""
        silent_s = time.monotonic() - self._succeeded_at
        return [f"Redis or the broker has been away for {silent_s:.0f} s"] if silent_s > _SILENT_S else []

    def _repeat(self) -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            pause_s = _BACKOFF_S
            self._moved_at = time.monotonic()
            try:
                if run := self._store.runs.claim():
                    self._submit(run)
                    self._store.runs.finish(run.run_id)
                pause_s = 0.0 if run else _EVERY_S
                self._succeeded_at = time.monotonic()
            except ServiceUnavailable as error:
                # The run is claimed again.
                log.warning("runs_wait", detail=str(error))
                if isinstance(error, QueueFull):
                    # Nobody else has room either: requests are to get their 429.
                    self._succeeded_at = time.monotonic()
            except Exception as error:
                log.error("runs_wait", error=type(error).__name__, where=raised_at(error))

    def _submit(self, run: ClosedRun) -> None:
        # Without its id, all runs of which no span was stored would be the same dead letter.
        export = export_of(run.spans or [b'{"traceId":"%s"}' % run.run_id.encode()])
        try:
            trace = self._converted(run, export)
            self._client.submit(trace)
            log.info("run_submitted", trace_id=trace["id"], spans=len(run.spans))
        except TraceConflict as error:
            decoded, raw = decode_for_sending(trace, self._settings.limits)
            self._store.dead_letters.dead_letter(raw, "conflict", str(error), decoded.id, decoded.digest())
        except (InvalidTrace, NotConverted) as error:
            self._store.dead_letters.dead_letter(export, "invalid", _detail(error), f"{TRACE_ID_PREFIX}otel:{run.run_id}")

    def _converted(self, run: ClosedRun, raw: bytes) -> dict[str, Any]:
        most = self._settings.serve
        if run.is_too_large:
            raise InvalidTrace([Problem("$", f"expected at most {most.run_spans} spans and {most.run_bytes} bytes")])
        check_values(raw, _MOST_VALUES)
        export = json.loads(raw)
        attributes = _attributes(export["resourceSpans"][0]["scopeSpans"][0]["spans"])
        supplied = _supplied({name: attributes.get(f"kp.{name}", getattr(most, name)) for name in SUPPLIED})
        try:
            (trace,) = convert("otel", [(1, export)], supplied, self._settings.limits)
        except Exception as error:
            # An error of ours, which the run would cause each time again.
            log.error("run_not_converted", otel_trace_id=run.run_id, error=type(error).__name__, where=raised_at(error))
            raise InvalidTrace([Problem("$", "expected a run that can be converted")]) from None
        if isinstance(trace, NotConverted):
            raise trace
        service = attributes.get(SERVICE)
        # OpenTelemetry calls a service so that nobody has named.
        if isinstance(service, str) and not service.startswith("unknown_service"):
            trace["metadata"]["agent_id"] = service
        return trace

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(self._settings.worker.grace_s)


def _attributes(spans: Sequence[Fields]) -> dict[str, Any]:
    """The attributes that describe a run: the root's win over others', and a span's over its resource's."""
    root_last = sorted(spans, key=lambda span: not span.get("parentSpanId"))
    pairs = (pair for span in root_last for pair in span["attributes"] if isinstance(pair, dict))
    values = {str(pair.get("key")): pair.get("value") for pair in pairs}
    return {key: next(iter(value.values()), None) for key, value in values.items() if isinstance(value, dict)}


def _supplied(values: dict[str, Any]) -> SuppliedFields:
    try:
        # Attributes may be texts: OTEL_RESOURCE_ATTRIBUTES knows nothing else.
        return _FIELDS.validate_python({"task_domain": values.pop("domain"), "paths": {}, **values})
    except ValidationError as error:
        names = {str(item["loc"][0]).removeprefix("task_"): item["msg"] for item in error.errors(include_input=False)}
        raise InvalidTrace([Problem(f"kp.{name}", message) for name, message in names.items()]) from None


def _detail(error: InvalidTrace | NotConverted) -> str:
    return str(InvalidTrace([_LACKS.get(each.field, each) for each in error.problems]))
