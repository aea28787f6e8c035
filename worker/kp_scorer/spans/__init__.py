"""Records spans of OpenTelemetry from the producer to the published decision. Only a process that does so imports the SDK."""

import os
import sys
from typing import TYPE_CHECKING, Final

from kp_scorer.errors import SettingsError
from kp_scorer.spans.context import NO_CONTEXT, Context

if TYPE_CHECKING:
    from kp_scorer.spans.recording import Recorder

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def is_export_configured() -> bool:
    """Return whether OpenTelemetry's variables name a collector, and do not disable it."""
    return any(map(os.environ.get, _ENDPOINTS)) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def open_recorder(system: str, node: str) -> "Recorder":
    """Return a recorder that exports spans of the messages that worker ``node`` consumes, as the variables ``OTEL_…`` say.

    Raises SettingsError if OpenTelemetry is missing or refuses a value.
    """
    try:
        from kp_scorer.spans.recording import Recorder

        return Recorder(system, node)
    except ImportError as error:
        raise SettingsError(f"{_ENDPOINTS[0]}: spans need OpenTelemetry: pip install 'kp-scorer[otel-worker]'") from error
    except ValueError as error:
        raise SettingsError(f"OTEL_…: {error}") from error


def current_context() -> Context:
    """Return the context of the caller's span, if the application around our client records spans."""
    # An application that records spans has imported the module; most others have not even installed it.
    if "opentelemetry.trace" not in sys.modules:
        return NO_CONTEXT
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
