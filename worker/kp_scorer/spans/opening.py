"""The one place that has OpenTelemetry's SDK imported, where a setting says so."""

from kp_scorer.errors import SettingsError
from kp_scorer.spans.recorder import Destination, Recorder


def open_recorder(taken_from: Destination, node: str) -> Recorder:
    """Begin to export spans of messages that are ``taken_from`` a queue by the worker ``node``, as variables ``OTEL_…`` say.

    Raises:
        SettingsError: OpenTelemetry is not installed, or a variable says what cannot be done.
    """
    try:
        from kp_scorer.spans.exporting import ExportingRecorder
    except ImportError as error:
        raise SettingsError("otel.enabled: spans need OpenTelemetry: pip install 'kp-scorer[otel-worker]'") from error
    except ValueError as error:
        # It reads some variables as soon as it is imported.
        raise SettingsError(f"OTEL_…: {error}") from error
    return ExportingRecorder(taken_from, node)
