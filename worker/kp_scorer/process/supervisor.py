"""Notify systemd of the state of the process that it started: ready, alive, stopping."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Final

import structlog

_TIMEOUT_S: Final = 1.0

log = structlog.get_logger("kp_scorer.process.supervisor")


class Supervisor:
    """Whoever listens at ``NOTIFY_SOCKET``, as a unit of ``Type=notify`` has it; without that variable, nothing is sent."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        """Read the socket and the watchdog interval from the environment; send nothing."""
        self._socket = variables.get("NOTIFY_SOCKET", "")
        interval_us, pid = variables.get("WATCHDOG_USEC", ""), variables.get("WATCHDOG_PID") or str(os.getpid())
        is_watched = interval_us.isdecimal() and pid == str(os.getpid())
        self._every_s = int(interval_us) / 2e6 if is_watched else 0.0
        self._fed_at = float("-inf")

    def feed(self) -> None:
        """Report that the process is alive. May be called often: it is sent twice an interval, at most."""
        now = time.monotonic()
        if self._every_s and now - self._fed_at >= self._every_s:
            self._fed_at = now
            self.notify("WATCHDOG=1")

    def extend_start(self) -> None:
        """Report that the process needs a minute more to start."""
        self.notify("EXTEND_TIMEOUT_USEC=60000000")

    def notify(self, state: str) -> None:
        """Report ``READY=1`` once the process receives messages, ``STOPPING=1`` once it finishes what it has in flight."""
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
