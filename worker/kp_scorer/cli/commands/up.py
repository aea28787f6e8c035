"""``kp-scorer up`` and ``down``: an embedded Redis and workers on it, and how to be rid of them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NoReturn

import click

from kp_scorer.cli.display import threshold_words
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import NO_EMBEDDER, print_note
from kp_scorer.embedding.select import is_embedder_installed, usable_cores
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.ledger import Store
from kp_scorer.local import (
    cache_dir,
    dying_with_parent,
    embedded_redis,
    free_ports,
    remove_data,
    running,
    state_dir,
    stop,
)
from kp_scorer.scoring import decide_again
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

Process = subprocess.Popen[bytes]

_RESTART_PAUSE_S: Final = 2.0
_MOST_LOOKED_AT: Final = 10_000
_LOOK_EVERY_S: Final = 0.2
_WORKERS_STOP_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 100.0  # Those of workers, to finish what they have in flight, and some for Redis.


@click.command(epilog="Example: kp-scorer up --workers 2, then in another terminal: kp-scorer submit traces.jsonl --wait")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many worker processes.")
@click.option("--fresh", is_flag=True, help="Remove what an earlier `up` kept: records, decisions, the novelty log.")
@settings_options
def up(workers: int, fresh: bool, settings: Settings) -> None:
    """Run an embedded Redis and workers until Ctrl-C or `down`; other commands use this Redis, and these settings, by default.

    What it holds is kept for the next time.
    """
    if settings.broker.url or settings.redis.url:
        raise SettingsError("broker.url, redis.url: `up` brings its own Redis; leave them unset, or run `kp-scorer worker`")
    if running():
        raise SettingsError("up: an embedded Redis is running already for this user; the other commands use it")
    data_dir = state_dir() / "data"
    if fresh:
        remove_data(data_dir)
    ports = free_ports(settings.metrics.host, settings.metrics.port, workers)
    own = settings.model_dump(mode="json", exclude_unset=True, exclude={"log"})
    with embedded_redis(data_dir, advertise={"pid": os.getpid(), "ports": ports, "settings": own}) as url:
        print_note(f"embedded Redis and {workers} worker(s) are starting; Ctrl-C stops them")
        print_note(_kept(settings, data_dir))
        if not is_embedder_installed(settings.embedding):
            print_note(NO_EMBEDDER)
        with worker_processes(settings, url, ports) as processes:
            try:
                _supervise(processes, settings, url, ports)
            except KeyboardInterrupt:
                print_note("stopping: workers finish what they have in flight")


def _kept(settings: Settings, data_dir: Path) -> str:
    """What the embedded Redis holds from earlier, and where."""
    with Store.open(with_endpoints(settings)) as store:
        decisions = [each.decision for each in islice(store.ledger.all_decided(), _MOST_LOOKED_AT)]
    if not decisions:
        return f"it keeps what comes in {data_dir}; there is no decision yet"
    others = sum(decide_again(each, settings.scoring).threshold != each.threshold for each in decisions)
    count = f"{len(decisions):,}{' or more' if len(decisions) == _MOST_LOOKED_AT else ''}"
    words = f"{data_dir} keeps {count} decisions from earlier, by {threshold_words(decisions)}"
    stand = f"; {others} of them by another than now, which stand: `kp-scorer up --fresh` starts empty"
    return words + stand if others else words


def _supervise(processes: list[Process], settings: Settings, url: str, ports: Sequence[int]) -> NoReturn:
    """Replace workers that die; raise SettingsError if one cannot start."""
    while True:
        for index, process in enumerate(processes):
            code = process.poll()
            if code == SettingsError.exit_code:
                raise SettingsError("a worker could not start; its log says why")
            if code is not None:
                print_note(f"worker {process.pid} ended with {code}; starting another")
                time.sleep(_RESTART_PAUSE_S)
                processes[index] = _start_worker(settings, url, len(ports), ports[index])
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def worker_processes(settings: Settings, url: str, ports: Sequence[int]) -> Iterator[list[Process]]:
    """Run a worker for each port, 0 for none, against the Redis at ``url``; on leaving, each finishes its batch and ends.

    From then on SIGTERM raises KeyboardInterrupt in this process, so that SIGTERM leaves no worker behind.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    processes = [_start_worker(settings, url, len(ports), port) for port in ports]
    try:
        yield processes
    finally:
        stop(processes, _WORKERS_STOP_S)


def _start_worker(settings: Settings, url: str, count: int, port: int) -> Process:
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


@click.command(epilog="Example: kp-scorer down --remove")
@click.option("--remove", is_flag=True, help="Remove what `up` kept, and the converted models; asks before.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def down(remove: bool, yes: bool) -> None:
    """Stop what `up` runs for this user, and name what it keeps on this machine; with --remove remove that.

    Workers finish what they have in flight. The package and its environment stay.
    """
    print_note("stopped the embedded Redis and its workers" if _stop() else "no embedded Redis is running for this user")
    folders = {state_dir(): "records, decisions, the novelty log", cache_dir(): "converted models"}
    existing = [path for path in folders if path.exists()]
    for path in existing:
        size_bytes = sum(file.lstat().st_size for file in path.rglob("*"))
        print_note(f"{path}: {folders[path]}, {size_bytes / 1e6:,.1f} MB")
    if not existing:
        print_note("nothing is kept on this machine")
    elif not remove:
        print_note("`kp-scorer down --remove` removes them")
    elif not (yes or click.confirm("Remove all of that for good?", err=True)):
        sys.exit(1)
    else:
        remove_data(state_dir() / "data")
        for path in existing:
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror}") from None
            print_note(f"removed {path}")


def _stop() -> bool:
    """Stop the running `up`, and wait until it has ended; return whether there was one."""
    embedded = running()
    if not (embedded and embedded.pid):
        return False
    with suppress(ProcessLookupError):
        os.kill(embedded.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while running():
        if time.monotonic() > deadline:
            raise ServiceUnavailable(f"down: process {embedded.pid} has not ended within {_STOP_TIMEOUT_S:g} s")
        time.sleep(_LOOK_EVERY_S)
    return True
