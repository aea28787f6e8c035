"""``kp-scorer up``: an embedded Redis and workers on it."""

import time
from collections.abc import Callable
from typing import Final, NoReturn

import click

from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import NO_EMBEDDER, print_note
from kp_scorer.cli.processes import Process, start_worker, worker_processes
from kp_scorer.embedding import is_embedder_installed
from kp_scorer.errors import SettingsError
from kp_scorer.local.embedded import embedded_redis, running_url, state_dir
from kp_scorer.settings import Settings

_RESTART_PAUSE_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.2


@click.command(epilog="Example: kp-scorer up --workers 2, then in another terminal: kp-scorer submit traces.jsonl --wait")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many worker processes.")
@settings_options
def up(workers: int, settings: Settings) -> None:
    """Run an embedded Redis and workers until Ctrl-C; other commands use this Redis by default."""
    if settings.broker.url or settings.redis.url:
        raise SettingsError("broker.url, redis.url: `up` brings its own Redis; leave them unset, or run `kp-scorer worker`")
    if running_url():
        raise SettingsError("up: an embedded Redis is running already for this user; the other commands use it")
    with embedded_redis(state_dir() / "data", advertise=True) as url, worker_processes(settings, url, workers) as processes:
        print_note(f"embedded Redis and {workers} worker(s) are starting; Ctrl-C stops them")
        if not is_embedder_installed(settings.embedding):
            print_note(NO_EMBEDDER)
        try:
            _supervise(processes, lambda place: start_worker(settings, url, workers, place))
        except KeyboardInterrupt:
            print_note("stopping: workers finish what they have in flight")


def _supervise(processes: list[Process], start: Callable[[int], Process]) -> NoReturn:
    """Replace workers that die; raise SettingsError if one cannot start."""
    while True:
        for index, process in enumerate(processes):
            code = process.poll()
            if code == SettingsError.exit_code:
                raise SettingsError("a worker could not start; its log says why")
            if code is not None:
                print_note(f"worker {process.pid} ended with {code}; starting another")
                time.sleep(_RESTART_PAUSE_S)
                processes[index] = start(index)
        time.sleep(_LOOK_EVERY_S)
