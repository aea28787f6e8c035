"""``kp-scorer up`` and ``kp-scorer worker``: run scorers."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import click
from celery.platforms import SecurityWarning

from worker.app import create_app
from worker.cli.options import settings_options
from worker.cli.output import say
from worker.cores import usable_cores
from worker.embedded import embedded_redis, noted, running_url, state_dir, with_endpoints
from worker.errors import SettingsError
from worker.settings import Settings, as_environment

_STOP_TIMEOUT_S: Final = 60.0
_RESTART_PAUSE_S: Final = 2.0


@click.command(epilog="Example: KP_BROKER_URL=redis://queue:6379/0 kp-scorer worker")
@settings_options
def worker(settings: Settings) -> None:
    """Run one worker in the foreground, against the configured broker and Redis, until SIGTERM or Ctrl-C.

    It finishes what it has in hand before it ends.
    """
    app = create_app(with_endpoints(settings))
    # Celery warns everyone who runs as root, for fear of pickle; we take nothing but JSON, and in a container root is common.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # Gossip and mingle only serve features that scorers do not use. The name must be unique on the machine.
    flags = ["--without-gossip", "--without-mingle", "--hostname", f"scorer-{os.getpid()}@%h"]
    app.worker_main(["--quiet", "worker", *flags])


@click.command(epilog="Example: kp-scorer up --workers 2, then in another terminal: kp-scorer submit traces.jsonl --wait")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many worker processes.")
@click.option(
    "--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Where Redis keeps its file, across restarts."
)
@settings_options
def up(workers: int, data_dir: Path | None, settings: Settings) -> None:
    """Run an embedded Redis and workers until Ctrl-C; the other commands find them by themselves."""
    if settings.broker.url or settings.redis.url:
        raise SettingsError("broker.url, redis.url: `up` brings its own Redis; leave them unset, or run `kp-scorer worker`")
    if running_url():
        raise SettingsError("up: an embedded Redis is running already for this user; the other commands use it")
    with ExitStack() as stack:
        url = stack.enter_context(embedded_redis(data_dir or state_dir() / "data"))
        stack.enter_context(noted(url))
        processes = stack.enter_context(worker_processes(settings, url, workers))
        say(f"embedded Redis and {workers} worker(s) are starting; Ctrl-C stops them")
        try:
            _supervise(processes, lambda: _start_worker(settings, url, workers))
        except KeyboardInterrupt:
            say("stopping: workers finish what they have in hand")


@contextmanager
def worker_processes(settings: Settings, url: str, count: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run workers against the Redis at ``url``; on leaving, each finishes its batch and ends.

    From now on SIGTERM is a KeyboardInterrupt in this process, so that it too leaves no worker behind.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    processes = [_start_worker(settings, url, count) for _ in range(count)]
    try:
        yield processes
    finally:
        _stop(processes)


def _start_worker(settings: Settings, url: str, count: int) -> "subprocess.Popen[bytes]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    environment = inherited | as_environment(settings) | {"KP_BROKER_URL": url, "KP_REDIS_URL": url}
    if not settings.embedding.threads:
        # Each worker would take all cores for itself, and they would get in each other's way.
        environment["KP_EMBEDDING_THREADS"] = str(max(1, usable_cores() // count))
    # A session of its own: Ctrl-C must reach the worker once, from us, or it would drop what it has in hand.
    return subprocess.Popen([sys.executable, "-m", "worker.cli", "worker"], env=environment, start_new_session=True)


def _supervise(processes: list["subprocess.Popen[bytes]"], start: Callable[[], "subprocess.Popen[bytes]"]) -> NoReturn:
    """Replace workers that die, for as long as they could start at all."""
    while True:
        for index, process in enumerate(processes):
            code = process.poll()
            if code == SettingsError.exit_code:
                raise SettingsError("a worker could not start; its log says why")
            if code is not None:
                say(f"worker {process.pid} ended with {code}; starting another")
                time.sleep(_RESTART_PAUSE_S)
                processes[index] = start()
        time.sleep(0.2)


def _stop(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
