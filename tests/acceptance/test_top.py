"""What an operator is shown of workers and queues by `kp-scorer top`."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store, WorkerReport
from kp_scorer.store.keys import Keys

from tests.support.commands import COMMAND, run
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.traces import fresh_samples


def reports(settings: Settings) -> list[WorkerReport]:
    with Store.open(settings) as store:
        return store.workers.reports()


def shown(settings: Settings, *options: str) -> str:
    """What `top` prints where stderr is no terminal."""
    done = run("top", *options, KP_BROKER_URL=settings.broker.url, KP_REDIS_URL=settings.redis.url)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


def test_workers_and_what_they_did_are_shown(settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    traces = fresh_samples(10)
    assert "no worker has said anything for 5 s" in shown(settings)
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        client.submit_many(traces)
        for _ in client.as_settled([str(trace["id"]) for trace in traces], timeout_s=30):
            pass
        (report,) = wait_until(lambda: [each for each in reports(settings) if each.held.count == 10 and not each.not_ready])
        assert report.node.startswith(f"fast-{worker.process.pid}@")
        assert (report.window_entries, report.queued.count, report.embedder) == (10, 10, "word-hash python")
        assert sum(count for counted in report.decisions.values() for count in counted.values()) == 10
        # Whatever a worker of another version, or nobody of ours, writes there.
        redis_client.zadd(Keys("kp").workers, {"other": time.time() * 1_000 + 5_000})
        redis_client.set(Keys("kp").worker("other"), b"\xff{", px=5_000)
        (line,) = [line for line in shown(settings, "--once").splitlines() if report.node in line]
        assert re.search(r"\b10\b.*\byes\b", line)
    # One that has ended is not shown for longer than its lease.
    wait_until(lambda: not reports(settings), timeout_s=10)


def test_on_a_terminal_it_goes_on_until_ctrl_c(settings: Settings) -> None:
    leader, terminal = pty.openpty()
    variables = os.environ | {"KP_BROKER_URL": settings.broker.url, "KP_REDIS_URL": settings.redis.url, "TERM": "xterm"}
    process = subprocess.Popen(
        [*COMMAND, "top", "--every", "0.5"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env=variables,
        # What runs in the background of a script has it ignored, and what it starts has, too.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(terminal)
    said: list[str] = []
    try:
        # Rates are there from the second look on.
        wait_until(lambda: "/s)" in _read_on(leader, said), timeout_s=30)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: _read_on(leader, said) and process.poll() is not None, timeout_s=20)
    finally:
        process.kill()
        process.communicate()
        os.close(leader)
    assert process.returncode == 0
    assert "no worker has said anything for 5 s" in "".join(said)


def _read_on(leader: int, said: list[str]) -> str:
    """All that was said on the terminal by now."""
    try:
        while select.select([leader], [], [], 0)[0]:
            said.append(os.read(leader, 65_536).decode(errors="replace"))
    except OSError:
        # The other end is closed.
        pass
    return "".join(said)
