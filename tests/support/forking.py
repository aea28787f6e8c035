"""Programs of ours in processes of their own, forked from one that has imported them: they start at once, not after a second.

Each is a real process, with its own environment, streams and end. Only what Python and the imports take is taken once. Where
that matters, as for memory or for streams that are closed, a test starts an interpreter of its own.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import Any, Protocol


class Process(Protocol):
    """What tests ask of a process, whoever started it: as ``subprocess.Popen`` says it."""

    pid: int

    @property
    def returncode(self) -> int | Any: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A process whose parent is the forker, which tells its end through a pipe."""

    def __init__(self, news: int) -> None:
        """Begin to follow a process; the first line of its news is its id."""
        self._news = os.fdopen(news, "rb", buffering=0)
        self._lock = threading.Lock()
        self.pid = int(self._news.readline())
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        """Its exit code, or the negative of the signal that ended it; None as long as it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; ``subprocess.TimeoutExpired`` if it does not come in time."""
        # A fleet's supervisor waits in a thread of its own.
        with self._lock:
            if self.returncode is None:
                if not select([self._news], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0)
                status = self._news.readline()
                assert status, "the forker is gone, and with it whoever knows how this process ended"
                self.returncode = os.waitstatus_to_exitcode(int(status))
                self._news.close()
        return int(self.returncode)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended: another process may have its id by then."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def start(module: Sequence[str], variables: Mapping[str, str], *streams: int) -> Process:
    """Run a module with its arguments, as ``python -m`` does, with exactly these variables, stdin, stdout and stderr."""
    if not sys.platform.startswith("linux") or _of_python(variables) != _of_python(os.environ):
        stdin, stdout, stderr = streams
        return subprocess.Popen([sys.executable, "-m", *module], env=variables, stdin=stdin, stdout=stdout, stderr=stderr)
    read, write = os.pipe()
    request = {"module": list(module), "variables": dict(variables), "directory": str(Path.cwd())}
    socket.send_fds(_forker(), [json.dumps(request).encode()], [*streams, write])
    os.close(write)
    return Forked(read)


def _of_python(variables: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter reads when it starts, and a forked one does not."""
    return {name: value for name, value in variables.items() if name.startswith("PYTHON")}


@cache
def _forker() -> socket.socket:
    """The connection to this process's forker; when it is closed, the forker ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        # With the settings of nobody: what it imports may not depend on them.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forker", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours
