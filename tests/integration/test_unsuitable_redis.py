"""What a worker says at its start of a Redis that is set up badly."""

from pathlib import Path

import pytest
import redis
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.suitability import shortcomings

from tests.support.processes import FAST_WORKER, start_worker
from tests.support.servers import RedisServer


def test_a_worker_names_what_its_redis_is_not_set_up_for_and_the_remedy(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.config_set("maxmemory", 10**9)
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("appendonly", "no")
        queues_elsewhere = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": server.url})})
        with start_worker(queues_elsewhere, tmp_path / "worker.log", command=FAST_WORKER) as worker:
            said = [(line["service"], line["detail"].partition(": set ")[2]) for line in worker.events("redis_unsuitable")]
    redis_client.config_set("maxmemory", 0)
    assert said == [("broker", "maxmemory-policy noeviction"), ("broker", "maxmemory"), ("broker", "appendonly yes")]


def test_how_full_it_is_may_be_kept_from_a_user(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server, server.connect() as client:
        client.config_set("maxmemory", 10**9)
        client.acl_setuser("kept-out", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-info"])
        kept_out = server.url.replace("redis://", "redis://kept-out:any@")
        for url, is_told in ((server.url, True), (kept_out, False)):
            with Store.open(load_settings({"broker.url": url, "redis.url": url})) as store:
                assert (store.memory_used() is not None) == is_told
                assert 0 <= (store.memory_used() or 0.0) < 0.1


@pytest.mark.parametrize(
    ("version", "is_old"), [("5.0.14", True), ("6.0.20", True), ("6.2.0", False), ("7.0.15", False), ("10.0.1", False)]
)
def test_a_redis_that_is_too_old_is_named(version: str, is_old: bool) -> None:
    well = {"maxmemory": 1, "used_memory": 0, "maxmemory_policy": "noeviction", "aof_enabled": 1}
    assert list(shortcomings(well | {"redis_version": version})) == (
        [f"Redis {version} is too old: install 6.2 or later"] if is_old else []
    )
