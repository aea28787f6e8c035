"""Writes structured logs to stderr: JSON Lines, or coloured text on a terminal. Events have stable names, no trace content."""

import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from select import select
from typing import Any, Final

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from kp_scorer.characters import escaped, escaped_lines
from kp_scorer.settings.sections import LogSettings

# These log every step of connections and models.
_CHATTY: Final = ("kombu", "amqp", "sentence_transformers", "transformers")
# In Celery 5.7.0 this logger quotes body or headers of messages that it rejects, and with them traces. Our consumer logs lost
# connections itself.
_QUOTES_CONTENT: Final = "celery.worker.consumer.consumer"

_MOST_LINES: Final = 10_000  # At most this many lines wait; they take about 4 MB.
_LINES_AT_ONCE: Final = 100
_FLUSH_S: Final = 1.0


class BackgroundHandler(logging.Handler):
    """Writes lines to a descriptor in a thread of its own, so that no other thread waits for the reader of the log.

    While ``most_lines`` wait to be written, further ones are dropped and counted.
    """

    def __init__(self, descriptor: int, most_lines: int = _MOST_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_lines = most_lines
        # A signal handler that logs may interrupt a call of put. With Queue, its own put would then wait for ever.
        self._lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        self._dropped = 0
        self.count_dropped: Callable[[], object] = lambda: None
        threading.Thread(target=self._write_all, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for writing, if there is room."""
        try:
            self.put(self.format(record))
        except Exception:
            # The standard library would print an error of formatting to stderr, with a text that may quote a trace.
            self._drop()

    def put(self, line: str) -> None:
        """Queue a line for writing, if there is room."""
        if self._lines.qsize() < self._most_lines:
            self._lines.put(f"{line}\n".encode(errors="backslashreplace"))
        else:
            self._drop()

    def _drop(self) -> None:
        self._dropped += 1
        self.count_dropped()

    def flush(self) -> None:
        """Wait until all lines are written, but at most a second."""
        written = threading.Event()
        self._lines.put(written)
        written.wait(_FLUSH_S)

    def _write_all(self) -> None:
        while True:
            waiting = [self._lines.get()]
            with suppress(Empty):
                while len(waiting) < _LINES_AT_ONCE:
                    waiting.append(self._lines.get_nowait())
            lines = [line for line in waiting if isinstance(line, bytes)]
            try:
                self._write(b"".join(lines))
                has_written = bool(lines)
            except OSError:
                # The disk is full, or the reader has ended. A log line about that would be dropped, too.
                has_written = False
                for _ in lines:
                    self._drop()
            for written in waiting:
                if isinstance(written, threading.Event):
                    written.set()
            if has_written and self._dropped and self._lines.qsize() < self._most_lines:
                dropped, self._dropped = self._dropped, 0
                logging.getLogger(__name__).warning("log_lines_dropped", extra={"lines": dropped})

    def _write(self, lines: bytes) -> None:
        while lines:
            try:
                lines = lines[os.write(self._descriptor, lines) :]
            except BlockingIOError:
                select([], [self._descriptor], [])


def configure_logs(settings: LogSettings, *, in_background: bool = False) -> None:
    """Send the log lines of structlog and the standard library to stderr: as text to a terminal, otherwise as JSON.

    It may be called again. With ``in_background``, a thread writes the lines, so that a reader who stalls does not stall the
    process.
    """
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    as_json = not sys.stderr.isatty()
    # Both formats have plain tracebacks: structlog's own for terminals show local variables, and with them traces.
    rendering: list[Processor] = [structlog.processors.format_exc_info]
    rendering += (
        [structlog.processors.JSONRenderer(lambda event, **options: escaped(json.dumps(event, **options)))]
        if as_json
        else [_escaped, structlog.dev.ConsoleRenderer(colors=not os.environ.get("NO_COLOR"))]
    )
    root = logging.getLogger()
    # Keep the handler whose thread is running when Celery configures logs a second time.
    handler: logging.Handler | None = next((each for each in root.handlers if isinstance(each, BackgroundHandler)), None)
    if handler is None:
        handler = BackgroundHandler(sys.stderr.fileno()) if in_background else logging.StreamHandler(sys.stderr)
    # Our own lines do not become records of the standard library, which would take two thirds of the time for a line.
    background = handler if isinstance(handler, BackgroundHandler) else None
    structlog.configure(
        processors=[*shared, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(settings.level),
        logger_factory=partial(_LineLogger, background.put if background else _write_to_stderr),
        # A cached logger would go on writing to stderr itself after a later call has asked for the thread.
        cache_logger_on_first_use=background is not None,
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger(_QUOTES_CONTENT).setLevel(logging.CRITICAL)


class _LineLogger:
    """Passes rendered lines on. structlog calls the method that is named after the level of a line."""

    def __init__(self, put: Callable[[str], None], name: str = "") -> None:
        self.name = name
        self.debug = self.info = self.warning = self.error = self.critical = put


def _write_to_stderr(line: str) -> None:
    # A command goes on even if nobody reads its log any more.
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def count_dropped_lines(count: Callable[[], object]) -> None:
    """Call ``count``, which must not block, for each line that is dropped because nobody reads the log."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, BackgroundHandler):
            handler.count_dropped = count


def flush_logs() -> None:
    """Wait until all lines are written, at most a second; call this before a process ends without Python's usual steps."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def library_logger(name: str) -> Any:
    """Return a logger that uses the standard library, for modules that run in other programs, whose stdout is not ours."""
    return structlog.wrap_logger(logging.getLogger(name), processors=[structlog.stdlib.render_to_log_kwargs])


def raised_at(error: BaseException) -> str:
    """Return the function, file and line that raised an error, to log in place of its message, which may quote a trace."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} in {frame.filename}:{frame.lineno}"


def _escaped(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape the texts of an event. Other values are shown by their repr, which escapes them."""
    texts = {name: escaped(value) for name, value in event.items() if isinstance(value, str)}
    if "exception" in event:
        texts["exception"] = escaped_lines(event["exception"])
    return {**event, **texts}


class LogThrottle:
    """Limits log lines to one a minute for each key."""

    _MOST: Final = 1_000

    def __init__(self) -> None:
        self._logged_at: dict[Hashable, float] = {}

    def admit(self, key: Hashable) -> bool:
        """Admit a line with this key and return True, unless one was admitted within the last minute."""
        now_s = time.monotonic()
        if now_s - self._logged_at.get(key, -math.inf) < 60:
            return False
        if len(self._logged_at) >= self._MOST:
            self._logged_at.clear()
        self._logged_at[key] = now_s
        return True
