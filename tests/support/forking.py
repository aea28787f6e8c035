"""Forks our programs from a process that has imported them, so that they start at once and not after a second.

Each is a real process, with its own environment, streams and end; only starting Python and importing happen just once. Where
that matters, as for memory or closed streams, a test starts an interpreter of its own.

This module is also the program that forks. It writes two numbers to a pipe for each process, one on a line: its process id, and
how it ended.
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
    """A process whose parent is the forker, which reports the end of the process through a pipe."""

    def __init__(self, pipe: int) -> None:
        """Follow a process, whose id is the first line from its pipe."""
        self._pipe = os.fdopen(pipe, "rb", buffering=0)
        self._lock = threading.Lock()
        self.pid = int(self._pipe.readline())
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        """Return the exit code, or the negative number of the signal that ended the process; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; raise ``subprocess.TimeoutExpired`` if it does not end in time."""
        # The supervisor of a fleet waits in another thread.
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
        """Send a signal, unless the process has ended, as another process may have its id by then."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


def start(module: Sequence[str], variables: Mapping[str, str], *streams: int) -> Process:
    """Run a module as ``python -m`` does, with its arguments and with exactly these variables, stdin, stdout and stderr."""
    if not sys.platform.startswith("linux") or _of_python(variables) != _of_python(os.environ):
        stdin, stdout, stderr = streams
        return subprocess.Popen([sys.executable, "-m", *module], env=variables, stdin=stdin, stdout=stdout, stderr=stderr)
    read, write = os.pipe()
    request = {"module": list(module), "variables": dict(variables), "directory": str(Path.cwd())}
    socket.send_fds(_forker()[0], [json.dumps(request).encode()], [*streams, write])
    os.close(write)
    return Forked(read)


def _of_python(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter reads only when it starts, which a forked one therefore ignores."""
    return {name: value for name, value in variables.items() if name.startswith("PYTHON")}


@cache
def _forker() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the connection to this process's forker, and the forker, which ends when the connection is closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        # The forker gets no settings, because what it imports must not depend on them.
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
    """Fork for each request on the socket whose number is the argument, until the other end is closed."""
    for name in _IMPORTED:
        __import__(name)
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        # The child runs its program here, outside the loop, so that it ends as any other program does.
        sys.argv[1:] = request["module"][1:]
        runpy.run_module(request["module"][0], run_name="__main__", alter_sys=True)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the child, and None in the forker when the other end is closed."""
    # The process id and the pipe to report to, by the pidfd of each process.
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
                # Close these through their objects, which would otherwise close the same numbers again when they are collected.
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
    # The test that reads the pipe may have ended.
    with suppress(BrokenPipeError):
        os.write(pipe, b"%d\n" % number)


if __name__ == "__main__":
    main()
