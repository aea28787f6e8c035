"""Workers and clients follow a Redis that hands over to its replica, behind a moving address or behind Sentinel."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.changed_settings import settings_at
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, PATIENCE_S, at_work, free_port, wait_until
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.shipped import Shipped
from tests.support.tls import Authority
from tests.support.traces import fresh_samples, short_traces

SLOW = {"EMBED_S": "0.1"}
"""With this variable, embedding a batch takes a tenth of a second."""


def hand_over(address: Proxy, primary: RedisServer, replica: RedisServer) -> None:
    """Swap primary and replica, and redirect new connections to the new primary; existing connections stay where they are."""
    address.redirect(replica.url)
    primary.hand_over(replica)


def test_worker_and_client_follow_to_the_new_primary_and_lose_no_trace_in_flight(tmp_path: Path) -> None:
    *traces, last = short_traces(301, seed=2)
    with (
        RedisServer(tmp_path / "first") as first,
        RedisServer(tmp_path / "second") as second,
        Proxy(first.url) as address,
    ):
        second.follow(first)
        settings = settings_at(address.url, worker__concurrency=24)
        with (
            at_work(settings, tmp_path, command=CRASHING_WORKER, variables=SLOW) as (worker, client),
            Store.open(settings) as store,
        ):
            for trace in traces:
                client.submit(trace)
            wait_until(lambda: len(worker.events("trace_decided")) > 20)
            hand_over(address, first, second)
            assert store.ledger.counts().decided < 300, "too late to tell anything"
            wait_until(lambda: store.ledger.counts() == (300, 0, 300, 0))
            # The second handover finds an idle worker.
            wait_until(lambda: len(worker.events("trace_decided")) >= 300)
            hand_over(address, second, first)
            client.wait(client.submit(last), timeout_s=PATIENCE_S)
        assert worker.process.returncode == 0
        assert {decision["trace_id"] for decision in published(settings)} == {trace["id"] for trace in [*traces, last]}


PASSWORD: Final = "of-the-sentinel"


class Guarded:
    """A primary, its replica and the sentinel that watches them."""

    def __init__(self, directory: Path, executable: str, leaving: ExitStack) -> None:
        """Start the servers; ``leaving`` stops them."""
        for name in ("primary", "replica", "sentinel"):
            (directory / name).mkdir()
        authority = Authority(directory / "authority")
        more = "tls-replication yes\nreplica-announce-ip localhost\nmasteruser replica\nmasterauth replica\n"
        self.primary = Shipped(directory / "primary", executable, authority=authority, more=more)
        leaving.callback(self.primary.stop)
        more += f"replicaof localhost {self.primary.port}\n"
        self.replica = Shipped(directory / "replica", executable, authority=authority, more=more, users=self.primary.users())
        leaving.callback(self.replica.stop)
        self._port = free_port()
        self._watch(directory / "sentinel", executable, leaving)

    def settings(self, user: str, password: str = PASSWORD) -> Settings:
        """Return the settings of a user who knows the sentinel's address and password."""
        parameters = f"primary=scorer&sentinel_password={password}&{self.primary.files()}"
        url = f"rediss+sentinel://{user}:{self.primary.password(user)}@localhost:{self._port}/0?{parameters}"
        return settings_at(url)

    def ask(self, *command: str) -> str:
        """Return the sentinel's answer to a command; empty until the sentinel listens."""
        files = ("--cacert", "authority.pem", "--cert", "server.pem", "--key", "server.key")
        line = ["redis-cli", "--no-auth-warning", "--tls", *files, "-p", str(self._port), "-a", PASSWORD, *command]
        return subprocess.run(line, cwd=self._folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S).stdout

    def _watch(self, directory: Path, executable: str, leaving: ExitStack) -> None:
        self._folder = directory
        for name in ("authority.pem", "server.pem", "server.key"):
            shutil.copy(directory.parent / "primary" / name, directory)
        lines = [
            *("port 0", f"tls-port {self._port}", "tls-cert-file server.pem", "tls-key-file server.key"),
            *("tls-ca-cert-file authority.pem", "tls-auth-clients yes", "tls-replication yes", f"requirepass {PASSWORD}"),
            *("sentinel resolve-hostnames yes", "sentinel announce-hostnames yes"),
            f"sentinel monitor scorer localhost {self.primary.port} 1",
            *("sentinel auth-user scorer sentinel", "sentinel auth-pass scorer sentinel"),
        ]
        (directory / "sentinel.conf").write_text("\n".join(lines), "utf-8")
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen([executable, "sentinel.conf", "--sentinel"], cwd=directory, stdout=log, stderr=log)
        leaving.callback(process.wait)
        leaving.callback(process.kill)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    executable = shutil.which("redis-server")
    if executable is None or shutil.which("redis-cli") is None or b"tls-port" not in Path(executable).read_bytes():
        pytest.skip("there is no redis-server with TLS on the PATH: install Debian's package redis-server")
    with ExitStack() as leaving:
        yield Guarded(tmp_path_factory.mktemp("guarded"), executable, leaving)


@pytest.mark.slow
def test_a_worker_follows_to_a_replica_by_tls_with_the_users_for_that(guarded: Guarded, tmp_path: Path) -> None:
    wait_until(lambda: "num-slaves\n1\n" in guarded.ask("sentinel", "master", "scorer"))
    wait_until(lambda: "master-link-status\nok\n" in guarded.ask("sentinel", "replicas", "scorer"))
    before, after = fresh_samples(2)
    with at_work(guarded.settings("worker"), tmp_path) as (worker, _), Client(guarded.settings("client")) as client:
        assert client.wait(client.submit(before), timeout_s=PATIENCE_S).trace_id == before["id"]
        wait_until(lambda: guarded.ask("sentinel", "failover", "scorer").startswith("OK"))
        with guarded.replica.connect("administrator") as admin:
            wait_until(lambda: admin.info("replication")["role"] == "master")
        assert client.wait(client.submit(after), timeout_s=PATIENCE_S).trace_id == after["id"]
    assert worker.process.returncode == 0
    assert guarded.primary.refused() == guarded.replica.refused() == []


def test_an_error_names_the_sentinel_that_refuses(guarded: Guarded) -> None:
    wait_until(lambda: "num-slaves" in guarded.ask("sentinel", "master", "scorer"))
    with Store.open(guarded.settings("worker", "wrong")) as store, pytest.raises(ServiceUnavailable) as refused:
        store.ping()
    assert "none of 1 sentinels says where the primary 'scorer' is: AuthenticationError" in str(refused.value)


def test_a_client_without_a_certificate_is_refused(guarded: Guarded) -> None:
    url = guarded.primary.url("worker").partition("&")[0]
    # The server sends an error and closes the connection at once, so the client may see either.
    with Store.open(settings_at(url)) as store, pytest.raises(ServiceUnavailable, match=r"^redis\.url: Conn"):
        store.ping()
