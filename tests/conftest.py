"""Fixtures with the real services that the tests share, and hooks for a run of the whole suite."""

import gc
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import redis
from kombu import Connection
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys

from tests.support import forking, suite
from tests.support.arena import Arena, BrokerName
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.paths import REFERENCE_TRACES
from tests.support.rabbitmq import RABBITMQ_URL, RabbitMQ, own_queues, own_virtual_host, rabbitmq_in_use
from tests.support.servers import embedded_default

LEFT = pytest.StashKey[list[str]]()
STATES = count()

# Examples that are slow on a busy machine are no failure. Each run draws others, so that a few per run are many in all.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=False,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        suite.begin()
    # Set the seed before Hypothesis' own hook reads it.
    config.option.hypothesis_seed = config.option.hypothesis_seed or os.environ[suite.RUN]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a process outlives the suite. Fixtures and the processes of pytest have ended by then."""
    forking.stop()
    if not hasattr(session.config, "workerinput"):
        session.config.stash[LEFT] = left = suite.end_processes()
        session.exitstatus = session.exitstatus or int(bool(left))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for line in suite.skipped_lines(terminalreporter.stats.get("skipped", [])) + config.stash.get(LEFT, []):
        terminalreporter.write_line(line)


def pytest_report_header(config: pytest.Config) -> str:
    return f"hypothesis seed: {config.option.hypothesis_seed}; --hypothesis-seed={config.option.hypothesis_seed} draws the same"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have the most slow tests: each runs in one process, and no other should wait for it at the end.

    Files with tests that need RabbitMQ to themselves run after those, because they would have to wait for each other.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    for path in {item.path for item in items if "impatient_rabbitmq" in getattr(item, "fixturenames", ())}:
        del slow[path]
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    # The modules and tests of the suite are some 350,000 objects, which every garbage collection would otherwise visit.
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither the developer's variables nor an embedded Redis that runs on this machine may leak into a test."""
    for name in os.environ:
        if name.startswith("KP_"):
            monkeypatch.delenv(name)
    # Few tests write there, and making a folder for each of thousands of tests takes some ten seconds.
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.getbasetemp() / f"state-{next(STATES)}"))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this run a cache folder of its own, so that nothing cached on this machine affects the tests."""
    own = tmp_path_factory.getbasetemp()
    # If pytest runs several processes, they share this folder, which lies beside theirs.
    directory = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "cache"
    directory.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis server for the whole session."""
    with embedded_default(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to an empty Redis; whatever a test leaves there under our prefix must have a TTL, or another bound."""
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushdb()
        yield connection
        assert _boundless(connection, Keys("kp")) == []


def _boundless(connection: redis.Redis, keys: Keys) -> list[bytes]:
    """Return the keys that have neither a TTL nor another bound.

    Pending traces must not expire, however long their queue is: their records get a TTL, and leave the index, when they end.
    Pinned sets stay until somebody removes them. The other keys that may lack a TTL exist only once, whatever is submitted.
    """
    pending: Any = connection.zrange(keys.pending, 0, -1)
    bounded = {keys.pending, keys.counts, keys.dropped, keys.tallies, keys.outcome_secret}
    bounded |= {keys.record(trace_id.decode()) for trace_id in pending}
    bounded |= {key.decode() for key in connection.scan_iter(keys.any_pinned_set)}
    owned: Any = connection.keys(f"{keys.prefix}:*")
    # PTTL returns -1 without a TTL, and -2 if the key has gone since it was listed, as a report goes with its worker.
    return [key for key in owned if connection.pttl(key) == -1 and key.decode() not in bounded]


@pytest.fixture
def limit_memory(redis_client: redis.Redis) -> Iterator[Callable[[int], object]]:
    """A function that limits the memory of the session's Redis, in bytes, until the test is over."""
    yield lambda limit_bytes: redis_client.config_set("maxmemory", limit_bytes)
    redis_client.config_set("maxmemory", 0)


@pytest.fixture
def settings(redis_url: str, redis_client: redis.Redis) -> Settings:
    """Default settings on the session's Redis, which is empty when the test begins."""
    return load_settings({"broker.url": redis_url, "redis.url": redis_url})


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[tuple[Settings, redis.Redis]]:
    """Settings for a Redis of the test's own, on which no worker of another test calls scripts, and a connection to it."""
    with embedded_default(tmp_path) as url, redis.Redis.from_url(url) as connection:
        yield load_settings({"broker.url": url, "redis.url": url}), connection


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    """The URL of a virtual host on this machine's RabbitMQ, a new one if we may create it; CI must have a RabbitMQ."""
    try:
        with Connection(RABBITMQ_URL, connect_timeout=5) as connection:
            connection.connect()
    except OSError as error:
        if os.environ.get("CI"):
            pytest.fail(f"no RabbitMQ at TEST_RABBITMQ_URL, or on its default port: {error}")
        pytest.skip("no RabbitMQ runs here: install Debian's package rabbitmq-server, or name one with TEST_RABBITMQ_URL")
    with own_virtual_host(RABBITMQ_URL) as url:
        yield url


@pytest.fixture
def rabbitmq(rabbitmq_url: str, settings: Settings) -> Iterator[RabbitMQ]:
    """RabbitMQ with queues of this test's own, and settings that name them."""
    with rabbitmq_in_use(), RabbitMQ(rabbitmq_url, settings.redis.url) as server:
        yield server


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """The scorer's store in the session's Redis."""
    with Store.open(settings) as opened:
        yield opened


@pytest.fixture
def keys(settings: Settings) -> Keys:
    return Keys(settings.redis.prefix)


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest) -> BrokerName:
    """The broker of this case; a test that concerns one broker only is parametrised with that."""
    name: BrokerName = request.param
    return name


@pytest.fixture
def on_broker(broker: BrokerName, request: pytest.FixtureRequest) -> SettingsWith:
    """A function that makes settings for the broker of this case: ``on_broker(worker__concurrency=4)``."""
    if broker == "redis":
        return partial(with_changed, request.getfixturevalue("settings"))
    server: RabbitMQ = request.getfixturevalue("rabbitmq")
    return server.settings


@pytest.fixture
def arena(broker: BrokerName, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """A store and a broker of the test's own, which it may break."""
    url = str(request.getfixturevalue("rabbitmq_url")) if broker == "rabbitmq" else ""
    in_use = rabbitmq_in_use() if url else nullcontext()
    with in_use, Arena(broker, url, tmp_path, own_queues()) as opened:
        yield opened


@pytest.fixture(scope="session")
def expected_scores() -> dict[str, float]:
    """The score that each real trace must get when all are scored in order; without real traces, the test is skipped."""
    path = REFERENCE_TRACES / "expected.jsonl"
    if not path.is_file():
        pytest.skip(f"there are no real traces in {REFERENCE_TRACES}; name their folder with REFERENCE_TRACES")
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return {str(row["id"]): float(row["score"]) for row in rows}
