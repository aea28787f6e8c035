"""Redis, RabbitMQ and a worker as they are shipped, with their users and limits."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.arena import IMPATIENT, Arena
from tests.support.fleet import Fleet, start_fleet
from tests.support.processes import CONTAINER_WORKER, free_port
from tests.support.rabbitmq import RABBITMQ_URL, Users, documented_users, own_virtual_host, rabbitmq_in_use
from tests.support.servers import RedisServer, default_server, redis_servers
from tests.support.shipped import Shipped

REDIS_PATHS: Final = [parameter.values[0] for parameter in redis_servers()]
MEMORY: Final = "maxmemory 1gb\n"
"""The limit that deploy/compose.yaml sets."""


class ShippedRedis(RedisServer):
    """The shipped Redis as an arena's store, which the tests inspect as its administrator."""

    def __init__(self, directory: Path, executable: str) -> None:
        super().__init__(directory, executable)
        self.shipped = Shipped(directory, executable, more=MEMORY)
        self.url = self.shipped.url("administrator")

    def start(self, *more: str) -> None:
        """Do nothing: the shipped Redis has started already."""
        assert not more, "it has the configuration that is shipped"

    def kill(self) -> None:
        self.shipped.stop()


class ShippedArena(Arena):
    """An arena in which producers, clients and workers each connect as the user for their role."""

    def __init__(self, store: ShippedRedis, directory: Path, broker_url: str, users: Users | None) -> None:
        super().__init__("rabbitmq" if users else "redis", broker_url, directory, {}, store)
        self._of_store, self._of_broker = store.shipped, users or store.shipped
        self.producer_url = self._of_broker.url("producer")
        self.share = slice(None)
        """The slice of the common attacks that is carried out in this arena."""

    def settings_of(self, user: str, **changed: object) -> Settings:
        urls = {"broker.url": self._of_broker.url(user), "redis.url": self._of_store.url(user)}
        # Be more patient than in the chaos tier: nothing is broken here, but a broker may be busy for a second.
        return load_settings({**urls, **IMPATIENT, "broker.timeout_s": 5.0, **changed})


@pytest.fixture(scope="session", params=redis_servers())
def shipped_redis(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    """The Redis that the tests of this tier share, except for those that start their own."""
    shipped = Shipped(tmp_path_factory.mktemp("shipped"), request.param, more=MEMORY)
    yield shipped
    shipped.stop()


@pytest.fixture(scope="session")
def redis_url(shipped_redis: Shipped) -> str:
    """The administrator's URL, with which the tests inspect and change the shared Redis."""
    return shipped_redis.url("administrator")


@pytest.fixture
def settings(shipped_redis: Shipped, redis_client: redis.Redis) -> Settings:
    """The settings of a worker on the shared Redis, which is empty when the test begins."""
    return shipped_redis.settings("worker")


@pytest.fixture
def client(shipped_redis: Shipped, store: Store) -> Iterator[Client]:
    """A client of the shared Redis, into which a worker has loaded the scripts."""
    store.ledger.load_scripts()
    with Client(shipped_redis.settings("client")) as opened:
        yield opened


@pytest.fixture
def as_operator(shipped_redis: Shipped, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the commands of this test as an operator."""
    monkeypatch.setenv("KP_BROKER_URL", shipped_redis.url("operator"))


@pytest.fixture(params=[*redis_servers(), "rabbitmq"])
def shipped_arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShippedArena]:
    with ExitStack() as stack:
        broker_url, users = "", None
        if request.param == "rabbitmq":
            request.getfixturevalue("rabbitmq_url")
            stack.enter_context(rabbitmq_in_use())
            broker_url = stack.enter_context(own_virtual_host(RABBITMQ_URL))
            users = stack.enter_context(documented_users(broker_url, ""))
        store = ShippedRedis(tmp_path, default_server() if users else request.param)
        arena = stack.enter_context(ShippedArena(store, tmp_path, broker_url, users))
        if not users:
            # Redis servers differ in what they permit, not in what they carry, so the attacks are divided among them.
            on_redis = [path for path in REDIS_PATHS if path]
            arena.share = slice(on_redis.index(request.param), None, len(on_redis))
        yield arena


@pytest.fixture
def fleet(shipped_arena: ShippedArena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """One worker that counts words, in the memory of its container. It exports spans to a collector that does not exist."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    settings = shipped_arena.settings_of("worker", **{"embedding.embedder": "words"})
    with start_fleet(settings, shipped_arena.directory / "logs", 1, CONTAINER_WORKER) as started:
        # With the administrator's settings, the tests inspect what the worker leaves behind.
        started.settings = shipped_arena.settings()
        yield started
