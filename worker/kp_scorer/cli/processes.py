"""Worker processes that a command starts, and stops when it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from kp_scorer.embedding.select import usable_cores
from kp_scorer.local.embedded import dying_with_parent, stop
from kp_scorer.settings import Settings, as_environment

_STOP_TIMEOUT_S: Final = 60.0

Process = subprocess.Popen[bytes]


@contextmanager
def worker_processes(settings: Settings, url: str, ports: Sequence[int]) -> Iterator[list[Process]]:
    """Run a worker for each port, 0 for none, against the Redis at ``url``; on leaving, each finishes its batch and ends.

    From then on SIGTERM raises KeyboardInterrupt in this process, so that SIGTERM leaves no worker behind.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    processes = [start_worker(settings, url, len(ports), port) for port in ports]
    try:
        yield processes
    finally:
        stop(processes, _STOP_TIMEOUT_S)


def start_worker(settings: Settings, url: str, count: int, port: int) -> Process:
    """Start one of ``count`` workers against the Redis at ``url``; it answers probes on this port, unless it is 0."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    own = {"KP_BROKER_URL": url, "KP_REDIS_URL": url, "KP_METRICS_PORT": str(port)}
    environment = inherited | as_environment(settings) | own
    if not settings.embedding.threads:
        # Otherwise each worker would use all cores, and the workers would slow each other down.
        environment["KP_EMBEDDING_THREADS"] = str(max(1, usable_cores() // count))
    # -P: a kp_scorer.py or redis.py in the current folder must not be imported instead of ours.
    command = [sys.executable, "-P", "-m", "kp_scorer.cli", "worker"]
    # A session of its own: Ctrl-C must reach the worker once, from us, or it would drop what it has in flight.
    # Killed with us, as its Redis ends with us too. Redis keeps the messages in flight for the next start.
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=dying_with_parent(signal.SIGKILL))


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
