"""A URL that asks for TLS gets it, with a certificate that is verified, or nothing is said to the server."""

import re
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, unavailable_if_broker_fails
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.processes import FAST_WORKER, start_worker
from tests.support.proxy import Proxy
from tests.support.rabbitmq import own_queues
from tests.support.tls import Authority, Listener
from tests.support.traces import fresh_samples

Pair = tuple[Path, Path]
"""A certificate and its key."""

SECRET: Final = "s3cret-of-the-server"
QUICK: Final = {"broker.timeout_s": 2, "redis.timeout_s": 2}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module", params=["another host", "expired", "another authority"])
def untrusted(request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    """A server with a certificate that proves nothing."""
    if request.param == "another host":
        return authority.server("DNS:elsewhere")
    if request.param == "expired":
        return authority.server("DNS:localhost", days=-1)
    return Authority(tmp_path_factory.mktemp("tls") / "other").server("DNS:localhost")


def secure(url: str, port: int, authority: Authority, own: Pair | None = None) -> str:
    """The URL of the same server by TLS, at a port of localhost, for a client that has a certificate of its ``own`` or none."""
    found = re.fullmatch(r"(\w+)://(.*@)?[^/]*(/.*)?", url)
    assert found
    shown = f"&ssl_certfile={own[0]}&ssl_keyfile={own[1]}" if own else ""
    return f"{found[1]}s://{found[2] or ''}localhost:{port}{found[3] or ''}?ssl_ca_certs={authority.certificate}{shown}"


def front_port(front: Proxy) -> int:
    return int(front.url.rpartition(":")[2].partition("/")[0])


def reach_broker(settings: Settings) -> None:
    with make_celery(settings) as app:
        declare_queues(app, submission_queues(settings).in_order)


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
of_each_connection = pytest.mark.parametrize("reach", [reach_broker, reach_broker_to_read, reach_store, reach_results])
of_each_broker = pytest.mark.parametrize("reach", [reach_broker, reach_broker_to_read])


@of_each_connection
def test_who_proves_who_it_is_on_redis_is_reached(reach: Reach, authority: Authority, redis_url: str) -> None:
    with Proxy(redis_url, authority.server("DNS:localhost")) as front:
        url = secure(redis_url, front_port(front), authority)
        reach(load_settings({"broker.url": url, "redis.url": url, **QUICK}))


@of_each_connection
def test_who_proves_nothing_on_redis_is_told_nothing(
    reach: Reach, untrusted: ssl.SSLContext, authority: Authority, redis_url: str
) -> None:
    with Proxy(redis_url, untrusted) as front:
        url = secure(redis_url, front_port(front), authority)
        with pytest.raises(ServiceUnavailable):
            reach(load_settings({"broker.url": url, "redis.url": url, **QUICK}))


@of_each_broker
def test_who_proves_nothing_on_rabbitmq_is_told_nothing(
    reach: Reach, untrusted: ssl.SSLContext, authority: Authority, rabbitmq_url: str, redis_url: str
) -> None:
    with Proxy(rabbitmq_url, untrusted) as front:
        url = secure(rabbitmq_url, front_port(front), authority)
        with pytest.raises(ServiceUnavailable):
            reach(load_settings({"broker.url": url, "redis.url": redis_url, **QUICK}))


@pytest.mark.parametrize("shown", ["nothing", "of another authority"])
@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_client_that_the_server_does_not_take_ends_in_time(
    broker: str, shown: str, authority: Authority, redis_url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    own = None if shown == "nothing" else Authority(tmp_path / "other").pair("client")
    url = redis_url if broker == "redis" else request.getfixturevalue("rabbitmq_url")
    with Proxy(url, authority.server("DNS:localhost", asks_clients=True)) as front:
        settings = load_settings(
            {"broker.url": secure(url, front_port(front), authority, own), "redis.url": redis_url, **QUICK}
        )
        since = time.monotonic()
        with pytest.raises(ServiceUnavailable, match=r"^queues: cannot use the broker"):
            reach_broker(settings)
        assert time.monotonic() - since < 3 * settings.broker.timeout_s


def test_files_that_prove_nothing_are_refused_at_once(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.pair("one"), authority.pair("other")
    encrypted = tmp_path / "encrypted.key"
    openssl: list[str | Path] = ["openssl", "pkey", "-in", one[1], "-aes256", "-passout", "pass:word", "-out", encrypted]
    subprocess.run(openssl, check=True, capture_output=True, timeout=60)
    for pair in ((one[0], other[1]), (one[1], one[0]), (one[0], encrypted)):
        with pytest.raises(SettingsError, match=r"^broker\.url: ssl_certfile: expected a certificate in PEM and, there or in"):
            load_settings({"broker.url": secure("redis://localhost", 1, authority, pair)})
    with pytest.raises(SettingsError, match=r"^redis\.url: ssl_ca_certs: expected a file of certificates in PEM"):
        load_settings({"redis.url": f"rediss://localhost?ssl_ca_certs={one[1]}"})


@pytest.fixture
def plain() -> Iterator[Listener]:
    with Listener() as listener:
        yield listener


@of_each_connection
def test_a_server_without_tls_hears_no_secret_of_redis(reach: Reach, plain: Listener) -> None:
    url = f"rediss://user:{SECRET}@localhost:{plain.port}/0"
    with pytest.raises(ServiceUnavailable):
        reach(load_settings({"broker.url": url, "redis.url": url, **QUICK}))
    assert_only_hello(plain)


@of_each_broker
def test_a_server_without_tls_hears_no_secret_of_rabbitmq(reach: Reach, plain: Listener, redis_url: str) -> None:
    url = f"amqps://user:{SECRET}@localhost:{plain.port}//"
    with pytest.raises(ServiceUnavailable):
        reach(load_settings({"broker.url": url, "redis.url": redis_url, **QUICK}))
    assert_only_hello(plain)


def assert_only_hello(plain: Listener) -> None:
    assert plain.heard
    # The first message of TLS, a handshake, and nothing else.
    assert all(said[:1] == b"\x16" and SECRET.encode() not in said for said in plain.heard if said)


def test_a_plain_url_cannot_be_told_to_use_tls_halfway(authority: Authority) -> None:
    for parameters in ("ssl_cert_reqs=none", "ssl_check_hostname=false", "ssl_cert_reqs=optional"):
        with pytest.raises(Exception, match="always verified"):
            load_settings({"redis.url": f"rediss://localhost?{parameters}"})
    with pytest.raises(Exception, match="expected no parameters"):
        load_settings({"redis.url": f"redis://localhost?ssl_ca_certs={authority.certificate}"})
    with pytest.raises(Exception, match="ssl_ca_certs: there is no such file"):
        load_settings({"redis.url": "rediss://localhost?ssl_ca_certs=/nowhere.pem"})


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_a_worker_and_a_client_do_everything_by_tls(
    broker: str, authority: Authority, settings: Settings, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trusted, own = authority.server("DNS:localhost", asks_clients=True), authority.pair("client")
    broker_url = settings.broker.url if broker == "redis" else request.getfixturevalue("rabbitmq_url")
    with Proxy(settings.redis.url, trusted) as store, Proxy(broker_url, trusted) as front:
        urls = {
            "broker.url": secure(broker_url, front_port(front), authority, own),
            "redis.url": secure(settings.redis.url, front_port(store), authority, own),
        }
        secured = load_settings({**urls, **own_queues()})
        with start_worker(secured, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(secured) as client:
            (trace, another, asked) = fresh_samples(3)
            assert client.wait(client.submit(trace), timeout_s=30).trace_id == trace["id"]
            # A connection that breaks is made anew, by TLS too.
            front.cut()
            store.cut()
            assert client.wait(client.submit(another), timeout_s=30).trace_id == another["id"]
            with make_celery(secured) as app:
                options = {} if broker == "redis" else {"exchange": secured.queues.traces}
                result = app.send_task(TASK_NAME, args=[asked], ignore_result=False, **options)
                assert result.get(timeout=30)["trace_id"] == asked["id"]
        assert worker.process.returncode == 0
