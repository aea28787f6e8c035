"""A user with few permissions takes only bounded memory beyond Redis' maxmemory, as far as its version has bounds."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from tests.support.processes import wait_until
from tests.support.servers import redis_servers
from tests.support.shipped import Shipped, major_version

MB: Final = 1_000_000
RESIDENT_MB: Final = 350


@pytest.fixture(params=redis_servers())
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shipped]:
    shipped = Shipped(tmp_path, request.param, more="maxmemory 200mb\n")
    yield shipped
    shipped.stop()


def _connect(server: Shipped, user: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    connection.sendall(_command(b"AUTH", user.encode(), server.password(user).encode()))
    assert connection.recv(100) == b"+OK\r\n"
    return connection


def _command(*parts: bytes) -> bytes:
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)


def _is_closed(act: Callable[[], object]) -> bool:
    try:
        act()
    except ConnectionError:
        return True
    return False


def _resident_mb(server: Shipped) -> int:
    return int(psutil.Process(server.process.pid).memory_info().rss) // MB


def test_unfinished_commands_are_bounded_by_redis_7_alone(server: Shipped) -> None:
    argument = b"$%d\r\n%s\r\n" % (30 * MB, b"x" * 30 * MB)
    with _connect(server, "producer") as connection:

        def send() -> None:
            connection.sendall(b"*100\r\n$5\r\nLPUSH\r\n$6\r\ntraces\r\n")
            for _ in range(14):
                connection.sendall(argument)

        if major_version(str(server.process.args[0])) < 7:  # type: ignore[index]
            send()
            wait_until(lambda: _resident_mb(server) > RESIDENT_MB)
        else:
            assert _is_closed(send)
            assert _resident_mb(server) < RESIDENT_MB


def test_commands_that_wait_behind_a_blocked_one_take_bounded_memory(server: Shipped) -> None:
    with _connect(server, "reader") as connection:

        def send() -> None:
            connection.sendall(_command(b"BRPOP", b"decisions.none", b"0"))
            for _ in range(500):
                connection.sendall(b"x" * MB)

        assert _is_closed(send)
    with server.connect("administrator") as admin:
        assert int(admin.info("memory")["used_memory_peak"]) < RESIDENT_MB * MB
    # With jemalloc 5.3.1 Redis keeps what it has freed for ten seconds.
    wait_until(lambda: _resident_mb(server) < RESIDENT_MB)


def test_replies_that_nobody_reads_are_bounded(server: Shipped) -> None:
    with server.connect("client") as client:
        client.hset("kp:trace:large", "decision", b"x" * 10 * MB)
    with _connect(server, "client") as connection:
        connection.sendall(_command(b"HGET", b"kp:trace:large", b"decision") * 100)
        wait_until(lambda: _is_closed(lambda: connection.sendall(b"PING\r\n")))
    assert _resident_mb(server) < RESIDENT_MB
