"""Worker processes, free ports, and waiting on conditions."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.settings.sections import MetricsSettings

from tests.support.forking import Process, start

Value = TypeVar("Value")

KP_SCORER_WORKER = ("kp_scorer.cli", "worker")
FAST_WORKER = ("tests.support.fast_worker",)
"""The same worker with an embedder that needs no model: ready in a second, so that many can be started and killed."""

CRASHING_WORKER = ("tests.support.crashing_worker",)
"""The fast worker, dying, erring or stalling where a test wants it to."""

CONTAINER_BYTES = 1_536 * 2**20
SOON_STALLED: Final = {"CONSTANTS": "WorkerSettings.stalled_after_s=3"}
"""A variable for these, by which a worker without progress ends soon."""
CONTAINER_WORKER = ("tests.support.limited", str(CONTAINER_BYTES), *KP_SCORER_WORKER)
"""The worker in the memory that deploy/kubernetes gives its container."""

SMALL_WORKER = ("tests.support.limited", str(2**30), *FAST_WORKER)
"""The fast worker in 1 GB of memory."""


PATIENCE_S: Final = 120.0
"""The longest time that a test waits. It only bounds a failure: no machine takes this long, whatever else it does."""

_BURST_S: Final = 0.1
LISTENING: Final = range(20_000, 32_768)  # Ports below those that the kernel gives connections.


def wait_until(condition: Callable[[], Value], timeout_s: float = PATIENCE_S) -> Value:
    """Wait until a condition returns something true, and return that; fail after the timeout."""
    started_s = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - started_s
        assert waited_s < timeout_s, f"nothing within {timeout_s:g} s"
        # Seldom where it takes long: some conditions start a process, or read all that workers have logged.
        time.sleep(min(0.02 + waited_s / 50, 0.1))
    return value


def slowness() -> float:
    """Return the time that a thread of this process takes for its work now, as a multiple of the time that it takes alone."""
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
    """Run a program, which must succeed; what it writes to stdout."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **{"timeout": 200, **options})
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return str(done.stdout)


@contextmanager
def opened(*command: str | Path, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a program, and kill it if it outlives the block: a ``Popen`` would wait for it, however long it runs."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    """Find a port that nobody listens on, and that no connection of another test takes before it is used."""
    while True:
        # Hypothesis seeds the other generator alike in all processes.
        port = secrets.choice(LISTENING)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Worker:
    """A worker in a process of its own, and what it logged."""

    def __init__(self, process: Process, log: Path) -> None:
        self.process = process
        self._log = log

    def events(self, name: str) -> list[dict[str, Any]]:
        rows = (json.loads(line) for line in self.text().splitlines() if name in line and line[0] + line[-1] == "{}")
        return [row for row in rows if row["event"] == name]

    def logged(self, name: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait until it has logged this many events, as it writes its log behind its work; return all of the name."""
        wait_until(lambda: len(self.events(name)) >= count)
        return self.events(name)

    def text(self) -> str:
        return self._log.read_text("utf-8")

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text("utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1_024

    def wait_until_ready(self, event: str = "worker_ready") -> None:
        # Loading the model takes seconds, or a minute on a machine that has much else to do.
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
    """Run ``kp-scorer worker`` with exactly these settings; wait until it is ready; stop it in the end."""
    started = launch_worker(settings, log, command, variables)
    try:
        if ready:
            started.wait_until_ready()
        yield started
    finally:
        started.stop()


@contextmanager
def at_work(settings: Settings, directory: Path, **options: Any) -> Iterator[tuple[Worker, Client]]:
    """A fast worker that is ready and logs to ``worker.log`` in a directory, and a client of it."""
    started = start_worker(settings, directory / "worker.log", **{"command": FAST_WORKER, **options})
    with started as worker, Client(settings) as client:
        yield worker, client


def launch_worker(
    settings: Settings, log: Path, command: Sequence[str] = KP_SCORER_WORKER, variables: Mapping[str, str] | None = None
) -> Worker:
    """Run a worker with exactly these settings, and with variables beside them, and do not wait for it."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    environment = inherited | as_environment(settings)
    if settings.metrics == MetricsSettings():
        # Workers of other tests have that port.
        environment["KP_METRICS_PORT"] = "0"
    environment |= variables or {}
    with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
        return Worker(start(command, environment, nothing.fileno(), output.fileno(), output.fileno()), log)
