"""One worker process for all acceptance tests, on a Redis database of its own; loading the model takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Worker, start_worker
from worker.client import Client
from worker.settings import Settings, load_settings


@pytest.fixture(scope="session")
def fleet_settings(redis_url: str) -> Settings:
    """Settings of the running worker; its database is never emptied, so tests use ids of their own."""
    url = redis_url.removesuffix("/0") + "/1"
    return load_settings({"broker.url": url, "redis.url": url})


@pytest.fixture(scope="session")
def fleet(fleet_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """The worker, ready for work."""
    log: Path = tmp_path_factory.mktemp("fleet") / "worker.log"
    with start_worker(fleet_settings, log) as worker:
        yield worker


@pytest.fixture
def submitter(fleet: Worker, fleet_settings: Settings) -> Iterator[Client]:
    """A client of the running worker."""
    with Client(fleet_settings) as client:
        yield client
