"""Tell systemd how the process that it started is: when it takes work, that it is well, and that it stops."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Final

import structlog

_TIMEOUT_S: Final = 1.0

log = structlog.get_logger("kp_scorer.process.supervisor")


class Supervisor:
    """Whoever listens at ``NOTIFY_SOCKET``, as a unit of ``Type=notify`` has it; without that variable, nobody is told."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Read from the environment where to tell it, and how often it wants to hear that all is well; sends nothing."""
        self._socket = variables.get("NOTIFY_SOCKET", "")
        self._every_s = _watchdog_s(variables) / 2
        self._fed_at = float("-inf")

    def ready(self) -> None:
        """The process takes work from now on."""
        self._tell("READY=1")

    def stopping(self) -> None:
        """The process finishes what it has in hand, and ends."""
        self._tell("STOPPING=1")

    def feed(self) -> None:
        """All is well. May be said often: it is passed on twice in the time after which systemd would end the process."""
        now = time.monotonic()
        if self._every_s and now - self._fed_at >= self._every_s:
            self._fed_at = now
            self._tell("WATCHDOG=1")

    def _tell(self, state: str) -> None:
        if not self._socket:
            return
        # A name that begins with an at sign is in the abstract namespace, where the kernel wants a zero in its place.
        address = f"\0{self._socket[1:]}" if self._socket.startswith("@") else self._socket
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                # systemd may be busy, and the thread that feeds it has more to look after.
                sender.settimeout(_TIMEOUT_S)
                sender.sendto(state.encode(), address)
        except OSError as error:
            log.warning("supervisor_not_told", state=state, detail=str(error))


def _watchdog_s(variables: Mapping[str, str]) -> float:
    """Seconds of silence after which systemd ends this process; 0 if it never does, or means another process."""
    microseconds = variables.get("WATCHDOG_USEC", "")
    meant = variables.get("WATCHDOG_PID") or str(os.getpid())
    return int(microseconds) / 1_000_000 if microseconds.isdecimal() and meant == str(os.getpid()) else 0.0
