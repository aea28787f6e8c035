"""Starts worker processes, finds free ports, and waits for conditions."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.settings.sections import MetricsSettings

from tests.support.forking import Process, start

Value = TypeVar("Value")

KP_SCORER_WORKER = ("kp_scorer.cli", "worker")
FAST_WORKER = ("tests.support.fast_worker",)
"""A worker whose embedder needs no model: it is ready in a second, so that tests can start and kill many."""

CRASHING_WORKER = ("tests.support.crashing_worker",)
"""The fast worker, which also dies, errs or stalls where a test wants it to."""

CONTAINER_BYTES = 1_536 * 2**20
SOON_STALLED: Final = {"CONSTANTS": "WorkerSettings.stalled_after_s=3"}
"""A variable for the two workers above, with which a worker without progress ends soon."""
CONTAINER_WORKER = ("tests.support.limited", str(CONTAINER_BYTES), "512:4096", *KP_SCORER_WORKER)
"""A worker with the memory that deploy/kubernetes gives its container."""

SMALL_WORKER = ("tests.support.limited", str(2**30), "512:4096", *FAST_WORKER)
"""The fast worker, limited to 1 GB of memory."""


PATIENCE_S: Final = 120.0
"""The longest time that a test waits. It only bounds a failing test: no machine takes this long, however busy it is."""

_BURST_S: Final = 0.1
LISTENING: Final = range(20_000, 32_768)  # These ports are below those that the kernel gives to connections.


def wait_until(condition: Callable[[], Value], timeout_s: float = PATIENCE_S) -> Value:
    """Wait until a condition returns something true, and return that; fail after the timeout."""
    started_s = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"nothing within {timeout_s:g} s"
        # Ask less often the longer it takes, as some conditions start a process or read all logs of the workers.
        time.sleep(min(0.02 + waited_s / 50, 0.1))
    return value


def slowness() -> float:
    """Return how many times longer a thread of this process takes now than it would take alone on the machine."""
    started_s, end_s = time.monotonic(), time.thread_time() + _BURST_S
    while time.thread_time() < end_s:
        pass
    return max(1.0, (time.monotonic() - started_s) / _BURST_S)


@contextmanager
def ending_within(limit_s: float) -> Iterator[None]:
    """Assert that the block takes no longer than the limit, multiplied by the slowness of a busy machine."""
    started_s = time.monotonic()
    yield
    elapsed_s = time.monotonic() - started_s
    assert elapsed_s < limit_s or elapsed_s < limit_s * slowness(), f"it took {elapsed_s:.1f} s"


def output_of(*command: str | Path, **options: Any) -> str:
    """Run a program, assert that it succeeds, and return its stdout."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **{"timeout": 200, **options})
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


@contextmanager
def opened(*command: str | Path, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program, and kill it if it outlives the block. A ``Popen`` alone would wait for it without end."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def forked(*module: str, variables: Mapping[str, str] | None = None, stderr: BinaryIO | None = None) -> Iterator[Process]:
    """Run a module as ``python -m`` does, with variables beside the present ones; kill it if it outlives the block."""
    with Path(os.devnull).open("r+b") as nothing:
        streams = nothing.fileno(), nothing.fileno(), (stderr or nothing).fileno()
        process = start(module, os.environ | (variables or {}), *streams)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Find a port that nobody listens on, and that the kernel gives to no connection of another test meanwhile."""
    while True:
        # ``random`` would choose the same ports in all processes, because Hypothesis seeds it.
        port = secrets.choice(LISTENING)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Worker:
    """A worker in a process of its own, and its log."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        rows = (json.loads(line) for line in self.text().splitlines() if name in line and line[0] + line[-1] == "{}")
        return [row for row in rows if row["event"] == name]

    def logged(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until the worker has logged this many events of a name, as its log lags behind its work; return all of them."""
        wait_until(lambda: len(self.events(name)) >= count)
        return self.events(name)

    def text(self) -> str:
        return self._log.read_text("utf-8")

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1_024

    def wait_until_ready(self, event: str = "worker_ready") -> None:
        # Loading the model takes seconds, or a minute on a busy machine.
        wait_until(lambda: self.events(event) or self.process.poll() is not None, timeout_s=200)
        assert self.process.poll() is None, self.text()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def start_worker(
    settings: Settings,
    log: Path,
    *,
    ready: bool = True,
    command: Sequence[str] = KP_SCORER_WORKER,
    variables: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Run ``kp-scorer worker`` with exactly these settings during the block, by default once it is ready; then stop it."""
    started = launch_worker(settings, log, command, variables)
    try:
        if ready:
            started.wait_until_ready()
        yield started
    finally:
        started.stop()


@contextmanager
def at_work(settings: Settings, directory: Path, **options: Any) -> Iterator[tuple[Worker, Client]]:
    """Run a fast worker that logs to ``worker.log`` in a directory; yield it when it is ready, and a client of it."""
    started = start_worker(settings, directory / "worker.log", **{"command": FAST_WORKER, **options})
    with started as worker, Client(settings) as client:
        yield worker, client


def launch_worker(
    settings: Settings, log: Path, command: Sequence[str] = KP_SCORER_WORKER, variables: Mapping[str, str] | None = None
) -> Worker:
    """Start a worker with exactly these settings, and with variables beside them, without waiting for it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    environment = inherited | as_environment(settings)
    if settings.metrics == MetricsSettings():
        # Workers of other tests may have the default port.
        environment["KP_METRICS_PORT"] = "0"
    environment |= variables or {}
    with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        return Worker(start(command, environment, nothing.fileno(), output.fileno(), output.fileno()), log)
