"""A URL that asks for TLS gets it with a verified certificate; otherwise, no server learns anything."""

import shutil
import ssl
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from kp_scorer.broker.calls import declare_queues, unavailable_if_broker_fails
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.arena import BrokerName
from tests.support.builders import first_queues
from tests.support.changed_settings import with_changed
from tests.support.http_server import open_server
from tests.support.processes import PATIENCE_S, at_work, ending_within, free_port, output_of, wait_until
from tests.support.prometheus import exposition, samples_of
from tests.support.proxy import Proxy
from tests.support.rabbitmq import PATIENT, own_queues
from tests.support.tls import Authority, Listener
from tests.support.traces import fresh_samples

Pair = tuple[Path, Path]
"""A certificate and its key."""

SECRET: Final = "s3cret-of-the-server"
QUICK: Final = {"broker.timeout_s": 2}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


class Front(NamedTuple):
    context: ssl.SSLContext
    is_proved: bool


@pytest.fixture(scope="module", params=["valid", "for another host", "expired", "of another authority"])
def front(request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Front:
    """A server with its certificate, and whether the certificate proves the server's identity."""
    match request.param:
        case "for another host":
            return Front(authority.server("DNS:elsewhere"), is_proved=False)
        case "expired":
            return Front(authority.server("DNS:localhost", days=0), is_proved=False)
        case "of another authority":
            other = Authority(tmp_path_factory.mktemp("tls") / "other")
            return Front(other.server("DNS:localhost"), is_proved=False)
    return Front(authority.server("DNS:localhost"), is_proved=True)


@pytest.fixture
def broker_url(broker: BrokerName, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{broker}_url"))


def secure(url: str, authority: Authority, own: Pair | None = None) -> str:
    """Return the URL of the same server by TLS and by its host name, with the client's ``own`` certificate if it has one."""
    client_files = f"&ssl_certfile={own[0]}&ssl_keyfile={own[1]}" if own else ""
    by_name = url.replace("://", "s://").replace("127.0.0.1", "localhost")
    return f"{by_name}?ssl_ca_certs={authority.certificate}{client_files}"


def reach_broker(settings: Settings) -> None:
    with make_celery(settings) as app:
        declare_queues(app, first_queues(settings).in_order)


def reach_broker_to_read(settings: Settings) -> None:
    with make_celery(settings) as app, unavailable_if_broker_fails("traces"), app.connection_for_read() as connection:
        assert connection.ensure_connection(max_retries=1, interval_start=0).default_channel


def reach_store(settings: Settings) -> None:
    with Store.open(settings) as store:
        store.ping()


def reach_results(settings: Settings) -> None:
    with make_celery(settings) as app, unavailable_if_broker_fails("results"):
        app.backend.client.ping()


Reach = Callable[[Settings], None]
of_each_connection = pytest.mark.parametrize(
    ("reach", "broker"),
    [
        *((reach, "redis") for reach in (reach_broker, reach_broker_to_read, reach_store, reach_results)),
        *((reach, "rabbitmq") for reach in (reach_broker, reach_broker_to_read)),
    ],
)


@of_each_connection
def test_a_server_is_used_only_if_its_certificate_is_valid(
    reach: Reach, broker_url: str, authority: Authority, front: Front, redis_url: str
) -> None:
    expected = nullcontext() if front.is_proved else pytest.raises(ServiceUnavailable)
    with Proxy(broker_url, front.context) as proxy, expected:
        reach(settings_with(secure(proxy.url, authority), redis_url))


def settings_with(broker_url: str, redis_url: str) -> Settings:
    """Return settings with a broker behind TLS. If the broker is Redis, it is the store, too."""
    is_redis = broker_url.startswith("rediss")
    return load_settings({"broker.url": broker_url, "redis.url": broker_url if is_redis else redis_url, **QUICK})


@of_each_connection
def test_no_password_is_sent_without_tls(reach: Reach, broker: BrokerName, redis_url: str) -> None:
    scheme = "rediss" if broker == "redis" else "amqps"
    with Listener() as plain, pytest.raises(ServiceUnavailable):
        reach(settings_with(f"{scheme}://user:{SECRET}@localhost:{plain.port}/0", redis_url))
    assert plain.heard
    # The server hears nothing but records of TLS's handshake, which comes first.
    assert all(chunk[:1] == b"\x16" and SECRET.encode() not in chunk for chunk in plain.heard if chunk)


@pytest.mark.parametrize("certificate", ["nothing", "of another authority"])
def test_a_client_that_the_server_refuses_raises_in_time(
    broker_url: str, certificate: str, authority: Authority, redis_url: str, tmp_path: Path
) -> None:
    own = None if certificate == "nothing" else Authority(tmp_path / "other").pair("client")
    with Proxy(broker_url, authority.server("DNS:localhost", asks_clients=True)) as front:
        settings = load_settings({"broker.url": secure(front.url, authority, own), "redis.url": redis_url, **QUICK})
        with (
            ending_within(3 * settings.broker.timeout_s),
            pytest.raises(ServiceUnavailable, match=r"^queues: cannot use the broker"),
        ):
            reach_broker(settings)


def test_files_that_are_no_certificate_and_its_key_are_refused(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.pair("first"), authority.pair("second")
    encrypted = tmp_path / "encrypted.key"
    openssl: list[str | Path] = ["openssl", "pkey", "-in", first[1], "-aes256", "-passout", "pass:word", "-out", encrypted]
    subprocess.run(openssl, check=True, capture_output=True, timeout=PATIENCE_S)
    for pair in ((first[0], second[1]), (first[1], first[0]), (first[0], encrypted)):
        with pytest.raises(SettingsError, match=r"^broker\.url: ssl_certfile: expected a certificate in PEM and, there or in"):
            load_settings({"broker.url": secure("redis://localhost", authority, pair)})
    with pytest.raises(SettingsError, match=r"^redis\.url: ssl_ca_certs: expected a file of certificates in PEM"):
        load_settings({"redis.url": f"rediss://localhost?ssl_ca_certs={first[1]}"})
    with pytest.raises(SettingsError, match="expected no parameters"):
        load_settings({"redis.url": f"redis://localhost?ssl_ca_certs={authority.certificate}"})
    with pytest.raises(SettingsError, match="ssl_ca_certs: there is no such file"):
        load_settings({"redis.url": "rediss://localhost?ssl_ca_certs=/nowhere.pem"})


def test_a_worker_and_a_client_work_and_reconnect_by_tls(
    broker: BrokerName, broker_url: str, authority: Authority, settings: Settings, tmp_path: Path
) -> None:
    trusted, own = authority.server("DNS:localhost", asks_clients=True), authority.pair("client")
    with Proxy(settings.redis.url, trusted) as store, Proxy(broker_url, trusted) as front:
        urls = {"broker.url": secure(front.url, authority, own), "redis.url": secure(store.url, authority, own)}
        secured = load_settings({**urls, **own_queues(), **PATIENT})
        with at_work(secured, tmp_path) as (worker, client):
            (trace, another, asked) = fresh_samples(3)
            assert client.wait(client.submit(trace), timeout_s=PATIENCE_S).trace_id == trace["id"]
            # After a broken connection, the new one uses TLS, too.
            front.cut()
            store.cut()
            assert client.wait(client.submit(another), timeout_s=PATIENCE_S).trace_id == another["id"]
            with make_celery(secured) as app:
                options = {} if broker == "redis" else {"exchange": secured.queues.first}
                result = app.send_task(TASK_NAME, args=[asked], ignore_result=False, **options)
                assert result.get(timeout=PATIENCE_S)["trace_id"] == asked["id"]
        assert worker.process.returncode == 0


def test_serve_uses_a_renewed_certificate_only_once_it_matches_its_key(settings: Settings, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.pair("server", "DNS:localhost")
    # Certificates write years from 2050 on in another form.
    renewed, its_key = authority.pair("renewed", "DNS:localhost", days=20_000)
    first, expires_s = certificate.read_text("ascii"), _expires_s(certificate)
    files = {"serve__certificate": str(certificate), "serve__key": str(key)}
    grpc_port, port = free_port(), free_port()
    metered = with_changed(settings, metrics__port=port - 1)
    with open_server(metered, tmp_path / "server.log", **files, serve__grpc_port=grpc_port) as server:

        def expiry_s() -> float:
            metric = "kp_scorer_serve_certificate_expiry_timestamp_seconds"
            return samples_of(exposition(f"http://127.0.0.1:{port}/metrics"))[metric]

        def shown() -> set[str]:
            addresses = [("127.0.0.1", port) for port in (server.port, grpc_port)]
            return {ssl.get_server_certificate(address, timeout=PATIENCE_S) for address in addresses}

        assert shown() == {first}
        shutil.copy(renewed, certificate)
        assert shown() == {first}
        wait_until(lambda: len(server.process.events("certificate_not_renewed")) == 2)
        assert expiry_s() == expires_s
        shutil.copy(its_key, key)
        assert expiry_s() == _expires_s(renewed) > expires_s + 18_000 * 86_400
        assert shown() == {renewed.read_text("ascii")}
        assert len(server.process.logged("certificate_renewed", 2)) == 2


def _expires_s(certificate: Path) -> float:
    _, _, end = output_of("openssl", "x509", "-in", certificate, "-noout", "-enddate").strip().partition("=")
    return ssl.cert_time_to_seconds(end)
