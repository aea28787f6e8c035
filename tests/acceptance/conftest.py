"""One worker process for all acceptance tests, on a Redis database of its own; loading the model takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings, load_settings

from tests.support.processes import Worker, start_worker


@pytest.fixture(scope="session")
def shared_settings(redis_url: str) -> Settings:
    """Settings of the running worker; its database is never emptied, so tests use ids of their own."""
    url = redis_url.removesuffix("/0") + "/1"
    return load_settings({"broker.url": url, "redis.url": url})


@pytest.fixture(scope="session")
def shared_worker(shared_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    log: Path = tmp_path_factory.mktemp("shared") / "worker.log"
    with start_worker(shared_settings, log) as worker:
        yield worker


@pytest.fixture
def client(shared_worker: Worker, shared_settings: Settings) -> Iterator[Client]:
    assert shared_worker.process.poll() is None, shared_worker.text()
    with Client(shared_settings) as opened:
        yield opened


@pytest.fixture
def shared_store(shared_settings: Settings) -> Iterator[Store]:
    """What the running worker keeps in Redis."""
    with Store.open(shared_settings) as opened:
        yield opened


@pytest.fixture
def shared_redis(shared_settings: Settings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(shared_settings.redis.url) as opened:
        yield opened
