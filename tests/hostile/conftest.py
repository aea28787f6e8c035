"""The arena of each case, on both brokers, with a worker that has little memory and few permissions."""

from collections.abc import Iterator

import pytest

from tests.support.arena import Arena
from tests.support.fleet import Fleet, start_fleet
from tests.support.ports import free_port
from tests.support.processes import SMALL_WORKER


@pytest.fixture
def fleet(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """One worker, whose user of the store may touch nothing but our own keys: no results of Celery's. It records spans."""
    # There is no collector.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with arena.redis.connect() as admin:
        admin.execute_command("ACL", "SETUSER", "scorer", "on", ">secret", "~kp:*", "+@all")
    url = arena.redis.url.replace("//", "//scorer:secret@")
    # Nothing is broken here: a broker that is busy for a second shall be waited for.
    settings = arena.settings(
        redis__url=url, broker__timeout_s=5.0, worker__concurrency=16, worker__batch_size=32, otel__enabled=True
    )
    with start_fleet(settings, arena.directory / "logs", 1, SMALL_WORKER) as started:
        yield started
