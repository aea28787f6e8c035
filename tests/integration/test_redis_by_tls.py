"""Redis as it is shipped, with its lines for TLS: each user does its part, and who shows no certificate does nothing."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import load_settings
from kp_scorer.store import Store

from tests.support.commands import run
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.shipped import Shipped
from tests.support.tls import Authority
from tests.support.traces import fresh_samples


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def server(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shipped]:
    """The server of this machine: the embedded one is built without TLS."""
    executable = shutil.which("redis-server")
    if executable is None or b"tls-port" not in Path(executable).read_bytes():
        pytest.skip("there is no redis-server with TLS on the PATH")
    shipped = Shipped(tmp_path_factory.mktemp("shipped"), executable, authority=authority)
    yield shipped
    shipped.stop()


def test_every_user_does_its_part_by_tls(server: Shipped, tmp_path: Path) -> None:
    one, two = fresh_samples(2)
    with (
        start_worker(server.settings("worker"), tmp_path / "worker.log", command=FAST_WORKER) as worker,
        Client(server.settings("client")) as client,
    ):
        assert client.wait(client.submit(one), timeout_s=30).trace_id == one["id"]
        with server.connect("producer") as producer:
            producer.lpush("traces", json.dumps(two))
        wait_until(lambda: len(worker.events("trace_decided")) == 2)
    operator = server.url("operator")
    assert run("stats", KP_BROKER_URL=operator).returncode == 0
    assert len(run("decisions", KP_BROKER_URL=operator).stdout.splitlines()) == 2
    assert server.refused() == []


def test_a_client_without_a_certificate_is_refused(server: Shipped, authority: Authority) -> None:
    url = server.url("worker").partition("?")[0] + f"?ssl_ca_certs={authority.certificate}"
    # What the server says of it may come too late: it closes the connection in the same breath.
    with Store.open(load_settings({"redis.url": url})) as store, pytest.raises(ServiceUnavailable, match=r"^redis\.url: Conn"):
        store.ping()
