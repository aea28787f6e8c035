"""A worker's exporter of spans: OTLP over HTTP, from a thread of its own, as OpenTelemetry's variables say."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

import structlog
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from kp_scorer.errors import SettingsError
from kp_scorer.spans.context import Context
from kp_scorer.spans.recorder import Destination
from kp_scorer.spans.recording import SCOPE, SpanRecording

_ONLY: Final = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
}
"""Variables by which another exporter could be asked for, and what they may say."""
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = structlog.get_logger("kp_scorer.spans.exporting")


class ExportingRecorder:
    """Records a span for each message, and for each step, where its producer's is sampled; a queue of 2,048 holds them.

    What the collector does not take in time is dropped, and nobody waits for it.
    """

    def __init__(self, taken_from: Destination, node: str) -> None:
        """Export as the worker ``node``, which takes messages from there.

        Raises:
            SettingsError: a variable asks for another exporter, or has no valid value.
        """
        # By their standard an empty one counts as none, but not all that reads them knows.
        for empty in [name for name, value in os.environ.items() if name.startswith("OTEL_") and not value.strip()]:
            del os.environ[empty]
        for variable, expected in _ONLY.items():
            if os.environ.get(variable, expected) != expected:
                raise SettingsError(f"{variable}: expected {expected}, the only one that workers have")
        for variable in _ENDPOINTS:
            # Exporters by gRPC take a name and a port alone.
            if not os.environ.get(variable, "http://").lower().startswith(("http://", "https://")):
                raise SettingsError(f"{variable}: expected a URL that begins with http:// or https://")
        # Each failure is a line of theirs, and a collector may be away for days; ours says so once.
        if not logging.getLogger().isEnabledFor(logging.DEBUG):
            logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        own = Resource({"service.name": "kp-scorer", "service.version": version("kp-scorer"), "service.instance.id": node})
        resource = Resource.create().merge(own)
        with _no_defaults_for_bad_values():
            resource = resource.merge(OTELResourceDetector().detect())
            processor = BatchSpanProcessor(_TellingExporter(OTLPSpanExporter()))
            # Its own handler at the exit would wait for the collector for half a minute.
            self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE)
        self._taken_from = taken_from

    def begin(self, context: Context, taken_s: float) -> SpanRecording:
        """Begin to record a message with this context, which was taken at this Unix time."""
        return SpanRecording(self._tracer, context, taken_s, self._taken_from)

    def close(self, timeout_s: float) -> None:
        """Export what is left, in this time or not at all."""
        # It waits for a collector that hangs as long as it likes: by a thread that the process leaves behind.
        closing = threading.Thread(target=self._provider.shutdown, name="close spans", daemon=True)
        closing.start()
        closing.join(timeout_s)
        if closing.is_alive():
            log.warning("spans_not_exported", detail=f"the collector did not take the last ones within {timeout_s:.1f} s")


class _TellingExporter(SpanExporter):
    """Says when spans cannot be exported any more, and when they can again."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._is_well = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_well, self._is_well = self._is_well, result is SpanExportResult.SUCCESS
        if is_well and not self._is_well:
            log.warning("spans_not_exported", detail="the collector does not take them; with log.level = debug more is said")
        elif self._is_well and not is_well:
            log.info("spans_exported_again")
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # This logger quotes headers, in which passwords stand.
        quotes_headers = record.name == "opentelemetry.util.re"
        self.texts.append(str(record.msg).partition(": %s")[0] if quotes_headers else record.getMessage())


@contextmanager
def _no_defaults_for_bad_values() -> Iterator[None]:
    """Read variables within this: of some that it cannot read OpenTelemetry only warns, and takes its default.

    Raises:
        SettingsError: one has no valid value.
    """
    logger, warnings = logging.getLogger("opentelemetry"), _Warnings()
    level, logger.propagate = logger.level, False
    logger.setLevel(logging.WARNING)
    logger.addHandler(warnings)
    try:
        yield
    except Exception as error:
        raise SettingsError(f"OTEL_…: {'; '.join([*warnings.texts, str(error)])}") from error
    finally:
        logger.removeHandler(warnings)
        logger.setLevel(level)
        logger.propagate = True
    if warnings.texts:
        raise SettingsError(f"OTEL_…: {'; '.join(warnings.texts)}")
