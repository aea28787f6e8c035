"""``kp-scorer up``, ``down`` and ``demo``: run an embedded Redis and workers, and remove them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from threading import Event
from typing import Final

import click

from kp_scorer.cli.display import BehindFailures, DecisionTable, note_if_unmeasured, progress
from kp_scorer.cli.options import settings_options, yes_option
from kp_scorer.cli.output import NO_EMBEDDER, print_note, print_text
from kp_scorer.client import Client, Status
from kp_scorer.embedding.select import is_embedder_installed, usable_cores
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.files import cache_dir, state_dir
from kp_scorer.local.embedded_redis import embedded_redis, remove_data, running
from kp_scorer.local.processes import dying_with_parent, free_ports, stop, stopped_by_signals
from kp_scorer.report.phrases import OUTCOME_WORDS
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store

Process = subprocess.Popen[bytes]

_RESTART_PAUSE_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.2
_WORKERS_STOP_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 100.0  # Workers finish what they have in flight, and then Redis ends.
_DEMO_TIMEOUT_S: Final = 600.0


@click.command(epilog="Example: kp-scorer up --workers 2, then in another terminal: kp-scorer submit traces.jsonl --wait")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Number of worker processes.")
@click.option("--fresh", is_flag=True, help="First remove the data of an earlier `up`: records, decisions and the novelty log.")
@settings_options
def up(workers: int, fresh: bool, settings: Settings) -> None:
    """Run an embedded Redis and workers until Ctrl-C or `down`; other commands use this Redis, and these settings, by default.

    The data is kept for the next start.
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
    advertised = {"pid": os.getpid(), "ports": ports, "settings": own}
    stopping = stopped_by_signals()
    with embedded_redis(data_dir, advertise=advertised) as url:
        settings = with_endpoints(settings)
        print_note(f"embedded Redis and {workers} worker(s) are starting; Ctrl-C stops them")
        print_note(f"other programs reach this Redis, now and the next time, at {url}")
        with Store.open(settings) as store:
            decided = store.ledger.counts().decided
        stand = "they stand, whatever the settings are now; `kp-scorer up --fresh` starts empty"
        earlier = f"{data_dir} has {decided:,} decisions from earlier: {stand}"
        print_note(earlier if decided else f"it keeps its data in {data_dir}; there is no decision yet")
        if not is_embedder_installed(settings.embedding):
            print_note(NO_EMBEDDER)
        with worker_processes(settings, ports) as processes:
            _supervise(processes, settings, ports, stopping)
            print_note("stopping: workers finish what they have in flight")


def _supervise(processes: list[Process], settings: Settings, ports: Sequence[int], stopping: Event) -> None:
    """Replace workers that die, until a signal comes; raise SettingsError if one cannot start."""
    while not stopping.is_set():
        for index, process in enumerate(processes):
            code = process.poll()
            if code == SettingsError.exit_code:
                raise SettingsError("a worker could not start; its log says why")
            if code is not None:
                print_note(f"worker {process.pid} ended with {code}; starting another")
                time.sleep(_RESTART_PAUSE_S)
                processes[index] = _start_worker(settings, len(ports), ports[index])
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def worker_processes(settings: Settings, ports: Sequence[int]) -> Iterator[list[Process]]:
    """Run a worker for each port, where 0 stands for a worker without one; on leaving, each finishes its batch and ends."""
    processes = [_start_worker(settings, len(ports), port) for port in ports]
    try:
        yield processes
    finally:
        stop(processes, _WORKERS_STOP_S)


def _start_worker(settings: Settings, count: int, port: int) -> Process:
    """Start one of ``count`` workers, which answers probes on this port unless it is 0."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KP_")}
    environment = inherited | as_environment(settings) | {"KP_METRICS_PORT": str(port)}
    if not settings.embedding.threads:
        # Otherwise each worker would use all cores, and the workers would slow each other down.
        environment["KP_EMBEDDING_THREADS"] = str(max(1, usable_cores() // count))
    # Without -P, a kp_scorer.py or redis.py in the current folder would be imported in place of ours.
    command = [sys.executable, "-P", "-m", "kp_scorer.cli", "worker"]
    # The worker has a session of its own, so that Ctrl-C reaches it once, through us; otherwise it would drop what it has in
    # flight. If we are killed, it is killed too, as its Redis ends with us. Redis keeps the messages in flight for the next
    # start.
    return subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=dying_with_parent(signal.SIGKILL))


@click.command(epilog="Example: kp-scorer down --remove")
@click.option("--remove", is_flag=True, help="Remove the data of `up` and what is cached, after asking for confirmation.")
@yes_option
def down(remove: bool, yes: bool) -> bool:
    """Stop the Redis and the workers that `up` runs for this user, and list their data on this machine; --remove deletes them.

    Workers first finish the traces in flight. The package and its environment stay.
    """
    print_note("stopped the embedded Redis and its workers" if _stop() else "no embedded Redis is running for this user")
    folders = {state_dir(): "records, decisions, the novelty log", cache_dir(): "compiled rules of the check for secrets"}
    existing = [path for path in folders if path.exists()]
    for path in existing:
        size_bytes = sum(file.lstat().st_size for file in path.rglob("*"))
        print_note(f"{path}: {folders[path]}, {size_bytes / 1e6:,.1f} MB")
    if not existing:
        print_note("nothing is kept on this machine")
    elif not remove:
        print_note("`kp-scorer down --remove` removes them")
    elif not (yes or click.confirm("Remove all of that for good?", err=True)):
        return True
    else:
        remove_data(state_dir() / "data")
        for path in existing:
            if path.is_symlink():
                raise SettingsError(f"{path} is a link: remove it, and what it leads to")
            try:
                shutil.rmtree(path)
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror}") from None
            print_note(f"removed {path}")
    return False


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


@click.command(epilog="Example: kp-scorer demo")
@settings_options
def demo(settings: Settings) -> bool:
    """Start an embedded Redis and a worker, submit the package's sample traces, print the decisions, and stop everything.

    To try it on traces of your own, run `score FILE`.
    """
    # More log lines would hide the table.
    log = settings.log.model_copy(update={"level": "error"})
    # SIGTERM, too, must leave neither a worker nor the server behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Decide one trace at a time, in the order of the file: a trace is compared with those before it, so each run gives the same
    # decisions.
    worker = settings.worker.model_copy(update={"concurrency": 1})
    samples = resources.files("kp_scorer.samples").joinpath("traces.jsonl").read_text("utf-8")
    traces = list(map(json.loads, samples.splitlines()))
    with tempfile.TemporaryDirectory(prefix="kp-scorer-") as data_dir, embedded_redis(Path(data_dir)) as url:
        print_note("started an embedded Redis and a worker, which loads its embedder")
        # The demo replaces configured URLs, as it must not reach anyone's queue.
        broker, redis = (section.model_copy(update={"url": url}) for section in (settings.broker, settings.redis))
        settings = settings.model_copy(update={"log": log, "broker": broker, "redis": redis, "worker": worker})
        with worker_processes(settings, ports=[0]) as (process,), Client(settings) as client:
            client.submit_many(traces)
            print_note(f"submitted {len(traces)} traces")
            completed = _watch(client, [trace["id"] for trace in traces], process)
    table, counts, behind = DecisionTable(), Counter[str](accepted=0, rejected=0), BehindFailures(settings)
    for status in completed:
        counts[OUTCOME_WORDS[status.decision.outcome] if status.decision else status.state] += 1
        if status.decision:
            table.print_decision(status.decision)
            behind.add(status.decision)
    print_text(f"{len(traces)} traces: {', '.join(f'{count} {words}' for words, count in counts.items())}\n")
    behind.note()
    print_text("a score looks at one trace; the few that cover what is asked: kp-scorer keep FILE --best 10%\n")
    print_text("next, with traces of your own: kp-scorer score FILE\n")
    return not all(status.decision for status in completed)


def _watch(client: Client, trace_ids: Sequence[str], worker: Process) -> list[Status]:
    """Wait until all traces are decided or dead, and return their states; raise ServiceUnavailable if that takes too long."""
    deadline, completed = time.monotonic() + _DEMO_TIMEOUT_S, dict[str, Status]()
    with progress("scored") as advance:
        while left := [trace_id for trace_id in trace_ids if trace_id not in completed]:
            if worker.poll() is not None:
                raise ServiceUnavailable("the worker ended; its log above says why")
            if time.monotonic() > deadline:
                raise ServiceUnavailable(f"{len(left)} traces are not decided after {_DEMO_TIMEOUT_S:g} s")
            for status in client.as_completed(left, timeout_s=1.0):
                note_if_unmeasured(status.decision)
                completed[status.trace_id] = status
                advance(len(completed), len(trace_ids))
    return [completed[trace_id] for trace_id in trace_ids]
