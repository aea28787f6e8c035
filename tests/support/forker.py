"""The process that forks: it has imported what commands and workers import, and starts what it is asked for.

For each process it tells two numbers, a line each: the id of the process, and how it ended.
"""

import gc
import json
import os
import runpy
import selectors
import socket
import sys
from contextlib import suppress
from typing import Any, Final

_IMPORTED: Final = (
    "celery.apps.worker",
    "celery.backends.redis",
    "celery.bin.celery",
    "celery.concurrency.thread",
    "celery.events",
    "celery.worker.pidbox",
    "kp_scorer.app",
    "kp_scorer.cli.main",
)
_MOST: Final = 1 << 20


def main() -> None:
    """Serve the socket whose number is the argument, until its other end is closed."""
    for name in _IMPORTED:
        __import__(name)
    gc.freeze()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        # Here and not where it was forked, so that it ends as any other program does.
        sys.argv[1:] = request["module"][1:]
        runpy.run_module(request["module"][0], run_name="__main__", alter_sys=True)


def _serve(asked: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return it in the child, and None once nobody asks any more."""
    # By the descriptor that tells of its end: the id of each process, and the pipe that its news go to.
    running: dict[int, tuple[int, int]] = {}
    ready = selectors.DefaultSelector()
    ready.register(asked, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is not asked:
                ready.unregister(key.fd)
                _tell_the_end(key.fd, *running.pop(key.fd))
                continue
            message, descriptors, _, _ = socket.recv_fds(asked, _MOST, 4)
            if not message:
                return None
            *streams, news = descriptors
            pid = os.fork()
            if not pid:
                # By their objects: what Python collects later would close the numbers once more, whosever they are by then.
                ready.close()
                asked.close()
                os.close(news)
                for handle, (_, told) in running.items():
                    os.close(handle)
                    os.close(told)
                request: dict[str, Any] = json.loads(message)
                _become(request, streams)
                return request
            for stream in streams:
                os.close(stream)
            _tell(news, pid)
            handle = os.pidfd_open(pid)
            running[handle] = pid, news
            ready.register(handle, selectors.EVENT_READ)


def _become(request: dict[str, Any], streams: list[int]) -> None:
    """Take on the streams, the variables and the directory of a request."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["variables"])
    os.chdir(request["directory"])


def _tell_the_end(handle: int, pid: int, news: int) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(news, status)
    os.close(news)
    os.close(handle)


def _tell(news: int, number: int) -> None:
    # Nobody may listen any more.
    with suppress(BrokenPipeError):
        os.write(news, b"%d\n" % number)


if __name__ == "__main__":
    main()
