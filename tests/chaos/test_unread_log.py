"""A log that nobody reads, as when its driver stalls, neither stops a worker nor delays its end."""

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.logs import BackgroundHandler
from kp_scorer.settings.loading import as_environment

from tests.support.arena import Arena, submit, traces, wait_until_ended
from tests.support.crashing_worker import STALLS
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, PATIENCE_S, SOON_STALLED, free_port, launch_worker, wait_until
from tests.support.prometheus import scraped

_PIPE_BYTES: Final = 4_096
_STALLED: Final = 4


@contextmanager
def unread(path: Path) -> Iterator[int]:
    """Make a pipe at a path, with room for a few lines, and read nothing from it; yield its descriptor."""
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield pipe
    finally:
        os.close(pipe)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_worker_decides_and_ends_while_nobody_reads_its_log(arena: Arena) -> None:
    settings = arena.settings(metrics__port=free_port())
    with unread(arena.directory / "log"), Client(settings) as client:
        worker = launch_worker(settings, arena.directory / "log", FAST_WORKER)
        try:
            wait_until_ended(settings, submit(client, traces(100)))
            assert scraped(settings)["kp_scorer_log_lines_dropped_total"] == 0.0, "they do not fit"
            worker.process.terminate()
            assert worker.process.wait(PATIENCE_S) == 0
        finally:
            worker.process.kill()


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_stalled_worker_ends_while_nobody_reads_its_log(arena: Arena) -> None:
    settings = arena.settings()
    with unread(arena.directory / "log") as pipe, Client(settings) as client:
        os.write(pipe, bytes(_PIPE_BYTES))
        worker = launch_worker(settings, arena.directory / "log", CRASHING_WORKER, {"STALL_S": "300", **SOON_STALLED})
        try:
            submit(client, traces(1, STALLS))
            assert worker.process.wait(PATIENCE_S) == _STALLED
        finally:
            worker.process.kill()


UNWATCHED: Final = """
from kp_scorer.process.watchdog import Watchdog
from tests.support.crashing_worker import main

Watchdog._run = lambda self: None
main()
"""


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_stalled_worker_without_its_watchdog_ends_too(arena: Arena) -> None:
    settings = arena.settings()
    with Client(settings) as client:
        submit(client, traces(1, STALLS))
    done = subprocess.run(
        [sys.executable, "-c", UNWATCHED],
        env=os.environ | as_environment(settings) | {"KP_METRICS_PORT": "0", "STALL_S": "300", **SOON_STALLED},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == _STALLED, done.stderr
    assert '"event": "worker_stalled"' in done.stderr


def test_lines_without_room_are_dropped_and_counted_when_later_lines_are_read(tmp_path: Path) -> None:
    with unread(tmp_path / "log") as pipe:
        os.write(pipe, bytes(_PIPE_BYTES))
        handler = BackgroundHandler(pipe, most_lines=10)
        counted: list[None] = []
        handler.count_dropped = lambda: counted.append(None)
        root = logging.getLogger()
        root.addHandler(handler)
        try:
            for number in range(1_000):
                root.warning("line %d", number)
            assert 800 < len(counted) < 1_000
            os.read(pipe, _PIPE_BYTES)
            handler.flush()
            wait_until(lambda: b"log_lines_dropped" in os.read(pipe, _PIPE_BYTES))
        finally:
            root.removeHandler(handler)


def test_lines_for_a_full_disk_are_counted_and_announced_once_there_is_room(tmp_path: Path) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    handler = BackgroundHandler(descriptor)
    counted: list[None] = []
    handler.count_dropped = lambda: counted.append(None)
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        for number in range(3):
            root.warning("line %d", number)
        wait_until(lambda: len(counted) == 3)
        with (tmp_path / "log").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
        root.warning("the next line")
        wait_until(lambda: (tmp_path / "log").read_text("utf-8").splitlines() == ["the next line", "log_lines_dropped"])
        assert len(counted) == 3
    finally:
        root.removeHandler(handler)
        os.close(descriptor)


def test_loggers_that_were_used_before_the_thread_began_write_through_it(tmp_path: Path) -> None:
    script = """
import structlog
from kp_scorer.logs import configure_logs
from kp_scorer.settings.sections import LogSettings
log = structlog.get_logger("kp_scorer.test")
configure_logs(LogSettings())
log.info("before")
configure_logs(LogSettings(), in_background=True)
for _ in range(1_000):
    log.info("after")
"""
    with unread(tmp_path / "log") as pipe:
        subprocess.run([sys.executable, "-c", script], stderr=pipe, check=True, timeout=PATIENCE_S)
