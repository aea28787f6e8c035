"""The arena of each case, on both brokers, with a worker that has little memory and few permissions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.arena import Arena, BrokerName
from tests.support.fleet import Fleet, start_fleet
from tests.support.processes import SMALL_WORKER
from tests.support.rabbitmq import own_queues


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> BrokerName:
    """The broker of the case."""
    name: BrokerName = request.param
    return name


@pytest.fixture
def arena(broker: BrokerName, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """A store and a broker of the test's own."""
    url = str(request.getfixturevalue("rabbitmq_url")) if broker == "rabbitmq" else ""
    with Arena(broker, url, tmp_path, own_queues()) as opened:
        yield opened


@pytest.fixture
def fleet(arena: Arena) -> Iterator[Fleet]:
    """One worker, whose user of the store may touch nothing but our own keys: no results of Celery's."""
    with arena.redis.connect() as admin:
        admin.execute_command("ACL", "SETUSER", "scorer", "on", ">secret", "~kp:*", "+@all")
    url = arena.redis.url.replace("//", "//scorer:secret@")
    settings = arena.settings(redis__url=url, worker__concurrency=16, worker__batch_size=32)
    with start_fleet(settings, arena.directory / "logs", 1, SMALL_WORKER) as started:
        yield started
