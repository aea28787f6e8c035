"""What `kp-scorer health` says of a worker while all goes well, while its Redis is away, and when it is told to stop."""

import json
import os
import signal
from pathlib import Path
from typing import Any

from kp_scorer.settings import load_settings

from tests.support.commands import run
from tests.support.processes import FAST_WORKER, Worker, launch_worker, start_worker, wait_until
from tests.support.servers import RedisServer


class Probe:
    """Asks for the worker's health as a supervisor does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, what: str, *options: str) -> tuple[int, list[str]]:
        done = run("health", what, *options, KP_HEALTH_DIRECTORY=str(self._directory))
        row: dict[str, Any] = json.loads(done.stdout)
        assert row[what] == (done.returncode == 0)
        assert [f"not {what}: {reason}" for reason in row["reasons"]] == done.stderr.splitlines()
        return done.returncode, row["reasons"]


def test_a_worker_that_waits_for_its_redis_is_live_and_not_ready_until_that_is_back(tmp_path: Path) -> None:
    noted = tmp_path / "health"
    probe = Probe(noted)
    (tmp_path / "redis").mkdir()
    assert probe("live")[0] == 1
    with RedisServer(tmp_path / "redis") as server:
        settings = load_settings({"broker.url": server.url, "redis.url": server.url, "health.directory": str(noted)})
        with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
            wait_until(lambda: probe("ready")[0] == 0, timeout_s=20)
            assert probe("live") == (0, [])
            server.kill()
            reasons = wait_until(lambda: probe("ready")[1], timeout_s=20)
            assert {reason.partition(":")[0] for reason in reasons} <= {"redis", "broker"}
            assert probe("live") == (0, [])
            server.start()
            wait_until(lambda: probe("ready")[0] == 0, timeout_s=30)
            _told_to_stop(worker, probe)
    assert list(noted.iterdir()) == []


def _told_to_stop(worker: Worker, probe: Probe) -> None:
    """What is said until it has ended, as far as it is seen, and after that."""
    worker.process.terminate()
    allowed = ({"it was told to stop"}, {"no worker of this user has noted how it is"})
    wait_until(lambda: worker.process.poll() is not None or (found := set(probe("ready")[1])) in allowed or not found)
    assert worker.process.wait(30) == 0
    assert probe("ready")[0] == 1


def test_a_worker_that_was_killed_is_told_from_one_that_runs(tmp_path: Path) -> None:
    noted = tmp_path / "health"
    probe = Probe(noted)
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server:
        settings = load_settings({"broker.url": server.url, "redis.url": server.url, "health.directory": str(noted)})
        killed = launch_worker(settings, tmp_path / "killed.log", FAST_WORKER)
        killed.wait_until_ready()
        # A process that its parent has not waited for still has an id.
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        assert probe("live") == (1, [f"process {killed.process.pid} has ended"])
        with start_worker(settings, tmp_path / "one.log", command=FAST_WORKER) as one:
            # It has removed what the other one left.
            assert [path.name for path in noted.glob("*.json")] == [f"worker-{one.process.pid}.json"]
            with start_worker(settings, tmp_path / "two.log", command=FAST_WORKER) as two:
                both = run("health", "live", KP_HEALTH_DIRECTORY=str(noted))
                assert {json.loads(line)["pid"] for line in both.stdout.splitlines()} == {one.process.pid, two.process.pid}
                assert both.returncode == 0
                assert probe("live", "--pid", str(two.process.pid)) == (0, [])
                assert probe("live", "--file", str(noted / f"worker-{one.process.pid}.json")) == (0, [])
