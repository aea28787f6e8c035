"""Real services for the tests: a Redis of their own, and workers in processes of their own."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.processes import Worker, start_worker
from worker.embedded import embedded_redis
from worker.keys import Keys
from worker.settings import Settings, load_settings

REPOSITORY = Path(__file__).parent.parent
SHARED_TRACES = REPOSITORY.parent / "shared" / "traces"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither the developer's variables nor an embedded Redis that runs on this machine may leak into a test."""
    for name in os.environ:
        if name.startswith("KP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session", autouse=True)
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this session's converted models are kept: the model is converted once, whatever this machine has in store."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory))
        yield directory / "kp-scorer"


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis server for the whole session."""
    with embedded_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A connection to an empty Redis; whatever a test leaves there under our prefix must have a TTL."""
    with redis.Redis.from_url(redis_url) as connection:
        connection.flushdb()
        yield connection
        owned: Any = connection.keys("kp:*")
        assert [key for key in owned if connection.pttl(key) < 0] == [], "keys with neither TTL nor bound"


@pytest.fixture
def settings(redis_url: str, client: redis.Redis) -> Settings:
    """Default settings on the session's Redis, emptied."""
    return load_settings({"broker.url": redis_url, "redis.url": redis_url})


@pytest.fixture
def keys(settings: Settings) -> Keys:
    """Names of the keys that the settings lead to."""
    return Keys(settings.redis.prefix)


@pytest.fixture
def worker(settings: Settings, tmp_path: Path) -> Iterator[Worker]:
    """One worker process that is ready for work."""
    with start_worker(settings, tmp_path / "worker.log") as started:
        yield started


@pytest.fixture(scope="session")
def real_traces() -> list[dict[str, object]]:
    """The real traces, where they lie beside the checkout."""
    return [dict(row) for row in _shared_rows("traces.jsonl")]


@pytest.fixture(scope="session")
def expected_scores() -> dict[str, float]:
    """The score that each real trace must get when all are scored in order."""
    return {str(row["id"]): float(row["score"]) for row in _shared_rows("expected.jsonl")}


def _shared_rows(name: str) -> "list[dict[str, str]]":
    path = SHARED_TRACES / name
    if not path.is_file():
        pytest.skip("the real traces do not lie beside this checkout")
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
