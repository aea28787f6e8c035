"""Structured logs on stderr: JSON Lines, or colours on a terminal. An event is a stable name and fields, no trace content."""

import json
import logging
import os
import sys
import traceback
from typing import Any, Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kp_scorer.characters import escaped, escaped_lines
from kp_scorer.settings.sections import LogSettings

# These log every step of connections and models.
_CHATTY: Final = ("kombu", "amqp", "sentence_transformers", "transformers")
# This logger quotes the body or headers of messages that it rejects, and with them the arguments (celery 5.7.0). Our consumer
# logs lost connections.
_QUOTES_CONTENT: Final = "celery.worker.consumer.consumer"


def configure_logs(settings: LogSettings) -> None:
    """Send structlog's and the standard library's log lines to stderr in one format. Call at start; safe to repeat."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    as_json = settings.format == "json" or (settings.format == "auto" and not sys.stderr.isatty())
    # Plain tracebacks in both: those that structlog makes for terminals show local variables, and with them traces.
    rendering: list[Processor] = [structlog.processors.format_exc_info]
    rendering += (
        [structlog.processors.JSONRenderer(lambda event, **options: escaped(json.dumps(event, **options)))]
        if as_json
        else [_escaped, structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"))]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger(_QUOTES_CONTENT).setLevel(logging.CRITICAL)


def library_logger(name: str) -> Any:
    """A logger by way of the standard library, for what also runs in programs of others, whose stdout is not ours."""
    return structlog.wrap_logger(logging.getLogger(name), processors=[structlog.stdlib.render_to_log_kwargs])


def raised_at(error: BaseException) -> str:
    """Function, file and line that raised an error, for logs of errors whose message may quote a trace."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} in {frame.filename}:{frame.lineno}"


def _escaped(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape the texts of an event. Other values are shown by their repr, which escapes by itself."""
    texts = {name: escaped(value) for name, value in event.items() if isinstance(value, str)}
    if "exception" in event:
        texts["exception"] = escaped_lines(event["exception"])
    return {**event, **texts}
