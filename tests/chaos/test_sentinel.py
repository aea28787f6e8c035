"""A primary that is killed under load: sentinels have its replica take over, and all follow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings

from tests.support.arena import IMPATIENT, decided_of, slowly, submit, supervised, traces, wait_until_ended
from tests.support.outcomes import check
from tests.support.processes import wait_until
from tests.support.sentinels import Sentinels
from tests.support.servers import RedisServer

TRACES: Final = 400
REPLICATED: Final = 250
"""How many are on the replica, and known to be there, before the primary is killed."""

AT_RISK: Final = 50
"""How many are acknowledged by the primary in its last moments."""


class Watched(NamedTuple):
    """A primary and its replica, which sentinels watch."""

    primary: RedisServer
    replica: RedisServer
    settings: Settings


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    directories = [tmp_path / name for name in ("primary", "replica", "sentinels")]
    for directory in directories:
        directory.mkdir()
    with RedisServer(directories[0]) as primary, RedisServer(directories[1]) as replica:
        replica.follow(primary)
        with Sentinels(directories[2], primary) as sentinels:
            sentinels.wait_until_agreed()
            yield Watched(
                primary, replica, load_settings({"broker.url": sentinels.url, "redis.url": sentinels.url, **IMPATIENT})
            )


@pytest.mark.slow
def test_a_replica_takes_over_from_a_primary_killed_under_load(watched: Watched, tmp_path: Path) -> None:
    """What the replica had is decided once; what only the primary had may be unknown, which its submitter can see."""
    settings, load = watched.settings, traces(TRACES)
    on_replica = load_settings({"broker.url": watched.replica.url, "redis.url": watched.replica.url})
    with supervised(settings, tmp_path / "workers", 2, slowly) as fleet, Client(settings) as client:
        # Before there is anything to decide: one of them may be ready long before the other.
        fleet.wait_until_ready()
        submitted = submit(client, load[:REPLICATED])
        wait_until(lambda: fleet.logged("trace_decided") > 20)
        watched.primary.replicated(watched.replica)
        safe = set(submitted)
        submitted += submit(client, load[REPLICATED : REPLICATED + AT_RISK])
        with Client(on_replica) as reader:
            # A decision that the replica does not have may have been published, and is then made anew.
            undecided = set(submitted) - decided_of(reader, submitted)
        assert undecided & safe, "too late to test anything"
        watched.primary.kill()
        wait_until(watched.replica.is_primary)
        # Once the connections have followed, what the replica did not get is unknown.
        submitted += submit(client, load[REPLICATED + AT_RISK :])
        lost = {trace_id for trace_id, status in zip(submitted, client.look_up(submitted), strict=True) if status is None}
        assert lost <= set(submitted) - safe
        submit(client, [trace for trace in load if trace["id"] in lost])
        wait_until_ended(settings, submitted)
        asked = traces(TRACES + 1)[-1]
        with make_celery(settings) as app:
            result = app.send_task(TASK_NAME, args=[asked], ignore_result=False)
            assert result.get(timeout=10)["trace_id"] == asked["id"]
        wait_until(lambda: _is_idle(watched))
        assert set(fleet.stop()) == {0}
        assert fleet.ends == [], "workers must outlive a failover"
    check(settings, [*submitted, asked["id"]], decided_twice=undecided, store_lost_writes=True)


def _is_idle(watched: Watched) -> bool:
    queue = watched.settings.queues.traces
    with watched.replica.connect() as client:
        return not any((client.llen(queue), client.llen(f"{queue}.taking"), client.hlen(f"{queue}.in_hand")))
