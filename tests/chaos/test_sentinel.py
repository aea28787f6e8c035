"""When a primary is killed under load, the sentinels promote its replica, and workers and clients follow."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings

from tests.support.arena import IMPATIENT, decided_of, is_drained, submit, supervised, traces, wait_until_ended
from tests.support.outcomes import check
from tests.support.processes import PATIENCE_S, free_port, slowness, wait_until
from tests.support.servers import RedisServer, default_server

TRACES: Final = 400
REPLICATED: Final = 250
"""The number of traces that have certainly reached the replica before the primary is killed."""

AT_RISK: Final = 50
"""The number of traces that the primary acknowledges in its last moments."""

PRIMARY: Final = "scorer"
"""The name by which the sentinels know the primary."""

PASSWORD: Final = "of-the-sentinels"
SENTINELS: Final = 3
QUORUM: Final = 2


def slowly(place: int, life: int) -> dict[str, str]:
    """Return variables that slow workers down, so that most of the load is left when the primary is killed."""
    return {"EMBED_S": f"{0.4 * slowness():.1f}"}


class Watched(NamedTuple):
    primary: RedisServer
    replica: RedisServer
    settings: Settings


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    (sentinels := tmp_path / "sentinels").mkdir()
    ports = [free_port() for _ in range(SENTINELS)]
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    url = f"redis+sentinel://{hosts}/0?primary={PRIMARY}&sentinel_password={PASSWORD}"
    with RedisServer(tmp_path / "primary") as primary, RedisServer(tmp_path / "replica") as replica, ExitStack() as stack:
        replica.follow(primary)
        for port in ports:
            process = start_sentinel(sentinels, port, primary)
            stack.callback(process.wait)
            stack.callback(process.kill)
        wait_until(lambda: all(map(knows_all, ports)))
        yield Watched(primary, replica, load_settings({"broker.url": url, "redis.url": url, **IMPATIENT}))


def start_sentinel(directory: Path, port: int, primary: RedisServer) -> "subprocess.Popen[bytes]":
    file = directory / f"sentinel-{port}.conf"
    lines = [
        *(f"port {port}", "bind 127.0.0.1", f'dir "{directory}"'),
        *(f"requirepass {PASSWORD}", f"sentinel sentinel-pass {PASSWORD}"),
        f"sentinel monitor {PRIMARY} 127.0.0.1 {primary.port} {QUORUM}",
        # These settings make a failover begin soon.
        *(f"sentinel down-after-milliseconds {PRIMARY} 500", f"sentinel failover-timeout {PRIMARY} 3000"),
    ]
    file.write_text("\n".join(lines), "utf-8")
    with file.with_suffix(".log").open("wb") as log:
        return subprocess.Popen([default_server(), str(file), "--sentinel"], stdout=log, stderr=log)


def knows_all(port: int) -> bool:
    """Return whether a sentinel knows the others, and a replica that can take over."""
    with redis.Redis(port=port, password=PASSWORD, socket_timeout=5) as client:
        try:
            primary, replicas = client.sentinel_master(PRIMARY), client.sentinel_slaves(PRIMARY)
        except redis.ConnectionError:
            return False
    linked = [replica for replica in replicas if replica["master-link-status"] == "ok" and not replica["is_disconnected"]]
    return primary["num-other-sentinels"] == SENTINELS - 1 and len(linked) == 1


@pytest.mark.slow
def test_a_replica_takes_over_from_a_primary_killed_under_load(watched: Watched, tmp_path: Path) -> None:
    """Traces that the replica had are decided once; others may be unknown, which their submitter can see."""
    settings, load = watched.settings, traces(TRACES)
    on_replica = load_settings({"broker.url": watched.replica.url, "redis.url": watched.replica.url})
    with supervised(settings, tmp_path / "workers", 2, slowly) as fleet, Client(settings) as client:
        # Submit nothing before both are ready: the first might decide everything before the second starts.
        fleet.wait_until_ready()
        submitted = submit(client, load[:REPLICATED])
        wait_until(lambda: fleet.logged("trace_decided") > 20)
        watched.primary.replicated(watched.replica)
        safe = set(submitted)
        submitted += submit(client, load[REPLICATED : REPLICATED + AT_RISK])
        with Client(on_replica) as reader:
            # A decision that the replica lacks may have been published; its trace is then decided again.
            undecided = set(submitted) - decided_of(reader, submitted)
        assert undecided & safe, "too late to test anything"
        watched.primary.kill()
        wait_until(watched.replica.is_primary)
        # Submitting succeeds once the clients have followed the failover; traces that the replica lacks are then unknown.
        submitted += submit(client, load[REPLICATED + AT_RISK :])
        lost = {trace_id for trace_id, status in zip(submitted, client.look_up(submitted), strict=True) if status is None}
        assert lost <= set(submitted) - safe
        submit(client, [trace for trace in load if trace["id"] in lost])
        wait_until_ended(settings, submitted)
        asked = traces(TRACES + 1)[-1]
        with make_celery(settings) as app:
            result = app.send_task(TASK_NAME, args=[asked], ignore_result=False)
            assert result.get(timeout=PATIENCE_S)["trace_id"] == asked["id"]
        with watched.replica.connect() as on_new_primary:
            wait_until(lambda: is_drained(on_new_primary, settings.queues.first))
        assert set(fleet.stop()) == {0}
        assert fleet.ends == [], "workers must outlive a failover"
    check(settings, [*submitted, asked["id"]], decided_twice=undecided, store_lost_writes=True)
