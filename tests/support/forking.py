"""Our programs in processes of their own, forked from one that has imported them: they start at once, not after a second.

Each is a real process, with its own environment, streams and end. Only starting Python and importing happens once. Where that
matters, as for memory or for streams that are closed, a test starts an interpreter of its own.

This module is also the program that forks. For each process it writes two numbers to a pipe, a line each: the id of the
process, and how it ended.
"""

import atexit
import gc
import json
import os
import runpy
import selectors
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
from typing import Any, Final

_IMPORTED: Final = (
    "billiard.pool",
    *("celery.app.control", "celery.app.events", "celery.app.log", "celery.apps.worker", "celery.backends.redis"),
    *("celery.bin.celery", "celery.concurrency.thread", "celery.events.receiver", "celery.fixups.django"),
    *("celery.worker.autoscale", "celery.worker.strategy"),
    "encodings.idna",
    "kp_scorer.app",
    "kp_scorer.broker.redis_transport.channel",
    "kp_scorer.cli.main",
    *(
        f"kp_scorer.cli.commands.{name}"
        for name in ("audit", "cache", "dead_letter", "doctor", "forget", "report", "stats", "submit", "up", "worker")
    ),
)
_MOST: Final = 1 << 20


class Forked:
    """A process whose parent is the forker, which reports its end through a pipe."""

    def __init__(self, pipe: int) -> None:
        """Follow a process; the first line from its pipe is its id."""
        self._pipe = os.fdopen(pipe, "rb", buffering=0)
        self._lock = threading.Lock()
        self.pid = int(self._pipe.readline())
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
                if not select([self._pipe], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a forked process", timeout or 0)
                status = self._pipe.readline()
                assert status, "the forker has ended, and with it the report of how this process ended"
                self.returncode = os.waitstatus_to_exitcode(int(status))
                self._pipe.close()
        return int(self.returncode)

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended: another process may have its id by then."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


def start(module: Sequence[str], variables: Mapping[str, str], *streams: int) -> Process:
    """Run a module with its arguments, as ``python -m`` does, with exactly these variables, stdin, stdout and stderr."""
    if not sys.platform.startswith("linux") or _of_python(variables) != _of_python(os.environ):
        stdin, stdout, stderr = streams
        return subprocess.Popen([sys.executable, "-m", *module], env=variables, stdin=stdin, stdout=stdout, stderr=stderr)
    read, write = os.pipe()
    request = {"module": list(module), "variables": dict(variables), "directory": str(Path.cwd())}
    socket.send_fds(_forker()[0], [json.dumps(request).encode()], [*streams, write])
    os.close(write)
    return Forked(read)


def _of_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Import what an interpreter reads when it starts, and a forked one does not."""
    return {name: value for name, value in variables.items() if name.startswith("PYTHON")}


@cache
def _forker() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """This process's forker, and the connection to it; when that is closed, the forker ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        # Without settings: what it imports must not depend on them.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forking", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    atexit.register(stop)
    return ours, process


def stop() -> None:
    """End this process's forker, if it has one."""
    if _forker.cache_info().currsize:
        ours, process = _forker()
        ours.close()
        process.wait()
        _forker.cache_clear()


def main() -> None:
    """Fork for the requests on the socket whose number is the argument, until its other end is closed."""
    for name in _IMPORTED:
        __import__(name)
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        # Here, outside the loop, so that it ends as any other program does.
        sys.argv[1:] = request["module"][1:]
        runpy.run_module(request["module"][0], run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the child, and None when the other end is closed."""
    # By its pidfd: the id of each process, and the pipe to report to.
    running: dict[int, tuple[int, int]] = {}
    ready = selectors.DefaultSelector()
    ready.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is not requests:
                pid, pipe = running.pop(key.fd)
                _report(pipe, os.waitpid(pid, 0)[1])
                ready.unregister(key.fd)
                os.close(pipe)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, _MOST, 4)
            if not message:
                return None
            *streams, pipe = descriptors
            pid = os.fork()
            if not pid:
                # Closed by their objects, which would otherwise close the numbers once more when they are collected.
                ready.close()
                requests.close()
                os.close(pipe)
                for handle, (_, other_pipe) in running.items():
                    os.close(handle)
                    os.close(other_pipe)
                request: dict[str, Any] = json.loads(message)
                _become(request, streams)
                return request
            for stream in streams:
                os.close(stream)
            _report(pipe, pid)
            handle = os.pidfd_open(pid)
            running[handle] = pid, pipe
            ready.register(handle, selectors.EVENT_READ)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["directory"])


def _report(pipe: int, number: int) -> None:
    # The test may have ended.
    with suppress(BrokenPipeError):
        os.write(pipe, b"%d\n" % number)


if __name__ == "__main__":
    main()
