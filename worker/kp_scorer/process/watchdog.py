"""Vital and periodic threads, and the watchdog: it ends a process that has stalled, so that its messages are redelivered."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final

import structlog

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.logs import flush_logs, raised_at

EXIT_CODE: Final = 4

_CHECK_EVERY_S: Final = 0.5
_NOTIFY_TIMEOUT_S: Final = 1.0
_BACKOFF_S: Final = 2.0

log = structlog.get_logger("kp_scorer.process.watchdog")


class StallTimer:
    """Measures the seconds since its last start; 0 while it is stopped. Thread-safe."""

    def __init__(self) -> None:
        self._since: float | None = None

    def start(self) -> None:
        """Start, or start again, from 0."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop, and return to 0."""
        self._since = None

    @property
    def is_running(self) -> bool:
        """True from a start until the next stop."""
        return self._since is not None

    def elapsed_s(self) -> float:
        """Return the seconds since the last start; 0 while it is stopped."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class VitalThread(threading.Thread):
    """A daemon thread that the process needs: the watchdog ends a process in which one has died."""

    def __init__(self, target: Callable[[StallTimer], None], name: str) -> None:
        """Prepare to run ``target`` until it returns.

        It is called with ``stall``, which it starts when it begins work and stops after it.
        """
        self.stall = StallTimer()
        super().__init__(target=target, args=[self.stall], name=name, daemon=True)
        self.has_died = False

    def run(self) -> None:
        """Run the target; set ``has_died`` if an error ends the thread."""
        try:
            super().run()
        # A panic in a native library raises a BaseException, which would end the thread all the same.
        except BaseException as error:
            # The error's message may quote a trace, so it is not logged.
            log.critical("thread_died", thread=self.name, error=type(error).__name__, where=raised_at(error))
            self.has_died = True


class PeriodicTask(VitalThread):
    """Calls a function periodically; ``stall`` measures the time since the last successful call, or since the start."""

    def __init__(self, work: str, do: Callable[[], object], every_s: float, ended: threading.Event) -> None:
        """Prepare to call ``do`` every ``every_s`` seconds, and no sooner than 2 s after a failure, until ``ended`` is set."""
        super().__init__(self._repeat, work)
        self._do = do
        self._every_s = every_s
        self._ended = ended
        self.failure = ""  # The error of the last call; empty if it succeeded.
        self.stall.start()

    def _repeat(self, stall: StallTimer) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            pause_s = max(self._every_s, _BACKOFF_S)
            try:
                self._do()
            except (ServiceUnavailable, SettingsError) as error:
                self.failure = str(error)
                log.warning("work_put_off", work=self.name, detail=self.failure)
            except Exception as error:
                self.failure = type(error).__name__
                log.error("work_put_off", work=self.name, detail=self.failure)
            else:
                pause_s, self.failure = self._every_s, ""
                stall.start()


class PeriodicTasks(AbstractContextManager["PeriodicTasks"]):
    """A context manager of all periodic tasks. On exit, it starts no more calls and waits for those in progress."""

    def __init__(self) -> None:
        self.threads: list[PeriodicTask] = []
        self._ended = threading.Event()

    def start(self, work: str, do: Callable[[], object], every_s: float) -> PeriodicTask:
        """Start and return a task; see :class:`PeriodicTask`."""
        task = PeriodicTask(work, do, every_s, self._ended)
        self.threads.append(task)
        task.start()
        return task

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for task in self.threads:
            task.join()


class Watchdog:
    """Ends the process if a part of it has stalled for longer than its limit, or a vital thread has died."""

    def __init__(self, when_well: Callable[[], None]) -> None:
        """Start the thread, which ends with the process; it calls ``when_well`` after each successful check."""
        self._when_well = when_well
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        self._threads: Sequence[VitalThread] = ()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, name: str, stalled_s: Callable[[], float], limit_s: float) -> None:
        """End the process with exit code 4 once ``stalled_s`` returns more than ``limit_s`` seconds."""
        self._watched = {**self._watched, name: (stalled_s, limit_s)}

    def watch_threads(self, threads: Sequence[VitalThread]) -> None:
        """End the process with exit code 4 if an error ever ends one of these threads."""
        self._threads = (*self._threads, *threads)

    def why_not_live(self) -> list[str]:
        """Return the reasons to restart the process; empty if all parts make progress. A wait for a server is progress."""
        return [f"{part}: {problem}" for part, problem, _ in self._stalls()]

    def _stalls(self) -> Iterator[tuple[str, str, dict[str, float]]]:
        """Yield the name of each dead thread and stalled part, the problem, and fields to log."""
        for thread in self._threads:
            if thread.has_died:
                yield thread.name, "the thread has died", {}
        for part, (elapsed_s, limit_s) in self._watched.items():
            if (stalled_s := elapsed_s()) > limit_s:
                yield part, f"stalled for {stalled_s:.0f} of {limit_s:g} s", {"limit_s": limit_s}

    def end_if_stalled(self) -> None:
        """End the process with exit code 4 if a part has stalled for too long, or a thread has died."""
        for part, _, fields in self._stalls():
            # A graceful shutdown would wait for the stalled part.
            try:
                log.critical("worker_stalled", stalled=part, **fields)
                flush_logs()
            finally:
                os._exit(EXIT_CODE)

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_EVERY_S)
            self.end_if_stalled()
            self._when_well()


class Supervisor:
    """Notifies systemd, or any listener at ``NOTIFY_SOCKET``; without that variable it sends nothing."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Read the socket and the watchdog interval from the environment."""
        self._socket = variables.get("NOTIFY_SOCKET", "")
        interval_us, pid = variables.get("WATCHDOG_USEC", ""), variables.get("WATCHDOG_PID") or str(os.getpid())
        is_watched = interval_us.isdecimal() and pid == str(os.getpid())
        self._every_s = int(interval_us) / 2e6 if is_watched else 0.0
        self._fed_at = float("-inf")

    def feed(self) -> None:
        """Report that the process is alive, at most twice an interval however often this is called."""
        now = time.monotonic()
        if self._every_s and now - self._fed_at >= self._every_s:
            self._fed_at = now
            self.notify("WATCHDOG=1")

    def notify(self, state: str) -> None:
        """Send a state, such as ``READY=1`` once the process receives messages, or ``STOPPING=1`` once it drains."""
        if not self._socket:
            return
        # A name that begins with @ is in the abstract namespace, where the kernel expects a zero byte in its place.
        address = f"\0{self._socket[1:]}" if self._socket.startswith("@") else self._socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                # Without a timeout, a busy systemd would keep this thread from watching the other parts.
                sender.settimeout(_NOTIFY_TIMEOUT_S)
                sender.sendto(state.encode(), address)
        except OSError as error:
            log.warning("supervisor_not_told", state=state, detail=str(error))
