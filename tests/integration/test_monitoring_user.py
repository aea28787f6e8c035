"""What a monitor on Celery as it is, such as Flower, may do as the user of Redis that Compose gives it."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from tests.support.processes import FAST_WORKER, start_worker
from tests.support.rendering import compose_secrets
from tests.support.shipped import Shipped


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Shipped]:
    """Redis with the users of Compose, which has 7.4: the one that the tests carry knows no permission only to read."""
    executable = shutil.which("redis-server")
    said = subprocess.run([executable, "--version"], capture_output=True, text=True, check=True).stdout if executable else ""
    if executable is None or not re.search(r"v=([789]|\d\d)\.", said):
        pytest.skip("there is no redis-server of version 7 or later on the PATH")
    directory, deploy = tmp_path / "redis", tmp_path / "deploy"
    directory.mkdir()
    deploy.mkdir()
    shipped = Shipped(directory, executable, users=(compose_secrets(deploy) / "users.acl").read_text("utf-8"))
    yield shipped
    shipped.stop()


def test_it_asks_workers_and_counts_what_waits_and_is_refused_nothing(server: Shipped, tmp_path: Path) -> None:
    with (
        start_worker(server.settings("worker"), tmp_path / "worker.log", command=FAST_WORKER),
        Celery("monitor", broker=server.url("monitor"), set_as_current=False) as app,
    ):
        inspect = app.control.inspect(timeout=3)
        (node,) = inspect.ping()
        assert [queue["name"] for queue in inspect.active_queues()[node]] == ["traces"]
        with app.connection_for_read() as connection:
            channel = connection.default_channel
            # What kombu does while it waits for answers in vain.
            channel.qos.restore_visible()
            # What Flower counts, whatever queues there are.
            for queue in ("traces", "celery"):
                assert sum(channel.client.llen(channel._q_for_pri(queue, step)) for step in channel.priority_steps) == 0
        assert server.refused() == []
        with server.connect("monitor") as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.lrange("traces", 0, -1)
        with server.connect("monitor") as client, pytest.raises(redis.exceptions.NoPermissionError):
            client.delete("unacked_index")
