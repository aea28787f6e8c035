"""Answers of the span collector, and peers that connect to the port, cost a worker bounded memory and few threads."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

import pytest
from kp_scorer import monitoring
from kp_scorer.client import Client
from kp_scorer.monitoring import http_server
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import MetricsSettings
from prometheus_client import CollectorRegistry

from tests.support.collector import answering
from tests.support.http_server import packed_zeros
from tests.support.processes import PATIENCE_S, SMALL_WORKER, ending_within, free_port, start_worker, wait_until
from tests.support.servers import redis_servers
from tests.support.traces import short_traces

MIB: Final = 2**20
RESIDENT_BYTES: Final = 400 * MIB
ANSWER_MIB: Final = 4_096
UNPACKED_MIB: Final = 600
PEERS: Final = 60
AT_ONCE: Final = 8
TIMEOUT_S: Final = 1.0
"""The port waits this long for a peer in these tests; elsewhere it waits for five seconds."""
DISCONNECTED_WITHIN_S: Final = 3.0

Answer = Callable[[BaseHTTPRequestHandler], None]


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    _send_zeros(handler)


def redirected(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(307)
    handler.send_header("Location", "/elsewhere")
    _send_zeros(handler)


def _send_zeros(handler: BaseHTTPRequestHandler) -> None:
    handler.send_header("Content-Length", str(ANSWER_MIB * MIB))
    handler.end_headers()
    for _ in range(ANSWER_MIB):
        handler.wfile.write(bytes(MIB))


def packed(handler: BaseHTTPRequestHandler) -> None:
    body = packed_zeros(UNPACKED_MIB)
    handler.send_response(200)
    handler.send_header("Content-Encoding", "gzip")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)
@pytest.mark.parametrize("answer", [endless, redirected, packed])
def test_an_answer_of_the_collector_is_not_read(settings: Settings, client: Client, tmp_path: Path, answer: Answer) -> None:
    ended = threading.Event()

    def answer_all(request: BaseHTTPRequestHandler, _: bytes) -> None:
        with suppress(OSError):
            answer(request)
        # The test goes on even if the worker hung up without reading the answer.
        ended.set()

    with answering(answer_all) as url:
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER, variables=variables) as worker:
            for traces in (short_traces(2, seed=1), short_traces(2, seed=2)):
                client.submit_many(traces)
                assert len(list(client.as_completed([str(trace["id"]) for trace in traces], timeout_s=PATIENCE_S))) == 2
                assert ended.wait(PATIENCE_S)
            assert worker.peak_bytes() < RESIDENT_BYTES
    assert worker.process.returncode == 0


class SlowCollector:
    """A collector whose metrics are slow, and which counts the threads that wait for them."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.waiting = self.most_waiting = 0

    def collect(self) -> Iterator[Any]:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        self.is_open.wait(PATIENCE_S)
        self.waiting -= 1
        return iter(())


@pytest.fixture
def collector() -> SlowCollector:
    return SlowCollector()


@pytest.fixture
def port(collector: SlowCollector, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(monitoring, "_TIMEOUT_S", TIMEOUT_S)
    registry = CollectorRegistry()
    registry.register(collector)
    collector.is_open.set()
    settings = MetricsSettings(port=free_port())
    with http_server(settings, registry, list, list):
        collector.most_waiting = 0
        yield settings.port
        collector.is_open.set()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def status_of(port: int, path: str) -> bytes:
    with connected(port) as probe:
        probe.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        return probe.recv(100).split()[1]


def test_many_scrapes_at_once_take_few_threads(port: int, collector: SlowCollector) -> None:
    collector.is_open.clear()
    with ExitStack() as stack:
        for _ in range(PEERS):
            stack.enter_context(connected(port)).sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: collector.waiting >= AT_ONCE)
        time.sleep(1)
        assert collector.most_waiting <= AT_ONCE
        collector.is_open.set()
        wait_until(lambda: status_of(port, "/metrics") == b"200")


@pytest.mark.parametrize("sent", [b"GET /livez HTTP/1.1\r\n" + b"a: b\r\n" * MIB, b"G" * MIB])
def test_a_request_without_an_end_is_not_kept(port: int, sent: bytes) -> None:
    with connected(port) as peer:
        with suppress(ConnectionError):
            peer.sendall(sent)
        assert is_disconnected(peer)
    assert status_of(port, "/livez") == b"200"


def test_a_peer_that_sends_ever_so_slowly_is_disconnected(port: int) -> None:
    with connected(port) as peer:
        started = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - started < DISCONNECTED_WITHIN_S:
                peer.sendall(b"G")
                time.sleep(0.2)
        assert is_disconnected(peer)
    assert status_of(port, "/livez") == b"200"


def is_disconnected(peer: socket.socket) -> bool:
    """Return whether the port has ended the connection without an answer."""
    try:
        return not peer.recv(1)
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_peers_that_do_not_read_keep_no_probe_out(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(PEERS):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            peer.connect(("127.0.0.1", port))
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        with ending_within(DISCONNECTED_WITHIN_S):
            assert status_of(port, "/livez") == b"200"
