"""A hostile peer costs the server bounded memory and time, and gets nothing but an answer that names what is wrong."""

import gzip
import json
import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException, HTTPSConnection, parse_headers
from pathlib import Path
from select import select
from typing import Any, Final

import pytest
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.http_server import (
    CONTAINER_BYTES,
    SERVE,
    HttpServer,
    chat_span,
    export_of,
    new_run,
    open_server,
    packed_zeros,
)
from tests.support.processes import PATIENCE_S, free_port, slowness, wait_until
from tests.support.servers import RedisServer, redis_servers
from tests.support.shipped import Shipped
from tests.support.tls import Authority

MIB: Final = 2**20
RESIDENT_BYTES: Final = 600 * MIB
"""Well below the memory of the containers in ``deploy``."""
SECRET: Final = "canary-7f3a"
TOKEN: Final = "a-token-of-this-test"
ANOTHER: Final = "a-token-of-somebody-else"
PROTOBUF: Final = "application/x-protobuf"
BODY_S, HEADERS_S = 12.0, 10.0
"""The server waits this long for each in these tests; elsewhere it waits for 20 s and 15 s."""
LIMITS: Final = (
    "ServeSettings.run_spans=20 ServeSettings.runs=10 "
    f"serve.bodies._BODY_WITHIN_S={BODY_S} serve.server._REQUEST_WITHIN_S={HEADERS_S}"
)

# The server itself sets these bounds, so one kind of Redis is enough, also to show that the server's user may do all this.
pytestmark = pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)


@pytest.fixture
def server(
    request: pytest.FixtureRequest,
    shipped_redis: Shipped,
    redis_client: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[HttpServer]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n{ANOTHER}\n")
    monkeypatch.setenv("CONSTANTS", LIMITS)
    changed = {"serve__tokens": str(tokens), **getattr(request, "param", {})}
    with open_server(shipped_redis.settings("serve"), tmp_path / "server.log", **changed) as opened:
        yield opened
        assert SECRET not in opened.process.text()
        assert opened.process.peak_bytes() < RESIDENT_BYTES
    assert shipped_redis.refused() == []


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as opened:
        yield opened


def post(server: HttpServer, body: object, path: str = "/v1/traces", **headers: str) -> Any:
    return server.ask("POST", path, body, **{"authorization": f"Bearer {TOKEN}", **headers})


def begun(server: HttpServer, token: str, length: int, encoding: str = "identity") -> socket.socket:
    """Send the headers of a request; return its connection."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    headers = {"Host": "server", "Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    headers |= {"Content-Encoding": encoding, "Content-Length": str(length)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"POST /traces HTTP/1.1\r\n{lines}\r\n".encode())
    return connection


@pytest.mark.parametrize(("count", "size"), [(6, 8 * MIB + 1), (300, 2)], ids=["large", "many"])
def test_stalled_requests_of_one_token_refuse_no_other(server: HttpServer, count: int, size: int) -> None:
    with ExitStack() as open_sockets:

        def stall_until_refused(more: int) -> bool:
            for _ in range(more):
                connection = open_sockets.enter_context(begun(server, TOKEN, size))
                # The server may refuse it meanwhile.
                with suppress(ConnectionError):
                    connection.sendall(b"[" * (size - 1))
            return bool(post(server, b"[]", "/traces").status == 429)

        stall_until_refused(count)
        # While the server reads several of these together, it may refuse more of them than have no room, so begin others.
        wait_until(lambda: stall_until_refused(1))
        assert post(server, b"[]", "/traces", authorization=f"Bearer {ANOTHER}").status == 202
        assert post(server, b"[]" + b" " * 7 * MIB, "/traces", authorization=f"Bearer {ANOTHER}").status == 202
        assert server.ask("GET", "/livez").status == 200


def test_packed_requests_of_one_token_keep_no_other_waiting(server: HttpServer) -> None:
    packed = packed_zeros(8)
    with ExitStack() as open_sockets:
        peers = [open_sockets.enter_context(begun(server, TOKEN, len(packed), "gzip")) for _ in range(100)]
        for peer in peers:
            peer.sendall(packed)
        assert post(server, b"[]", "/traces", authorization=f"Bearer {ANOTHER}").status == 202
        answered, _, _ = select(peers, [], [], 0)
        assert len(answered) < 50


def test_costly_requests_of_one_token_keep_no_other_waiting(server: HttpServer) -> None:
    costly = gzip.compress(export_with(b"\x4a\x00" * 500_000))
    with ThreadPoolExecutor(8) as pool:
        working = [pool.submit(post, server, costly, content_type=PROTOBUF, content_encoding="gzip") for _ in range(8)]
        wait_until(lambda: any(each.done() for each in working))
        assert post(server, export_of(chat_span(new_run())), authorization=f"Bearer {ANOTHER}").status == 200
        assert not all(each.done() for each in working)
    assert {each.result().status for each in working} == {200}


@pytest.fixture
def _many_files() -> Iterator[None]:
    """Let this process open as many files as it may: a user's limit is often 1,024, and each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A supervisor may allow no more than 1,024 files.
@pytest.mark.usefixtures("_many_files")
@pytest.mark.parametrize("files", ["512:4096", "1024:1024", "128:128"])
def test_connections_use_up_no_descriptors_that_others_need(files: str, settings: Settings, tmp_path: Path) -> None:
    command = ("tests.support.limited", str(CONTAINER_BYTES), files, *SERVE)
    grpc_port = free_port()
    with (
        open_server(settings, tmp_path / "server.log", *command, serve__grpc_port=grpc_port) as server,
        ExitStack() as sockets,
    ):
        for port in (server.port, grpc_port) * 600:
            sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
        assert server.ask("POST", "/v1/traces", export_of(chat_span(new_run()))).status == 200
        assert "out of system resource" not in server.process.text()
        assert server.process.events("serve_ready")[0]["connections"] == min(512, int(files.partition(":")[2]) // 4)


def test_requests_of_one_token_that_wait_for_redis_keep_no_probe_out(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    monkeypatch.setenv("CONSTANTS", "serve.server._MOST_CONNECTIONS=32 serve.bodies.REQUESTS=16")
    request = f"GET /traces/kp:trace:a HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with RedisServer(tmp_path) as hung:
        changed = {"redis__url": hung.url, "broker__url": hung.url, "serve__tokens": str(tokens)}
        with open_server(settings, tmp_path / "server.log", **changed) as server, ExitStack() as sockets:
            hung.pause()
            for _ in range(48):
                peer = sockets.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
                peer.sendall(request)
            assert server.ask("GET", "/livez").status == 200
            hung.kill()


# A long quiet time ensures that no run is converted, and makes room, while others begin.
@pytest.mark.parametrize("server", [{"serve__quiet_s": 600.0, "serve__total_bytes": 8 * MIB}], indirect=True, ids=["small"])
@pytest.mark.parametrize("size", [1, 900_000], ids=["runs", "bytes"])
def test_open_runs_of_one_token_leave_room_for_those_of_another(server: HttpServer, store: Store, size: int) -> None:
    def begin(token: str, *, run_id: str = "", size: int = size) -> int:
        span = chat_span(run_id or new_run(), "f" * 16, said="x" * size)
        return int(post(server, export_of(span), authorization=f"Bearer {token}").status)

    begun = {token: [begin(token) for _ in range(12)].count(200) for token in (TOKEN, ANOTHER)}
    # A token may begin runs while it holds less than half of what others leave of the 10 runs and of four fifths of the 8 MiB.
    assert begun == ({TOKEN: 5, ANOTHER: 3} if size == 1 else {TOKEN: 4, ANOTHER: 2})
    # A token's open runs accept further spans, whatever other tokens begin, until they take half of all bytes.
    (first, *_) = [run.run_id for run in store.runs.collected()]
    for token in (TOKEN, ANOTHER):
        assert begin(token, run_id=first, size=1) == 200
    if size > 1:
        assert [begin(TOKEN, run_id=first) for _ in range(2)] == [200, 429]
    for run in list(store.runs.collected()):
        assert store.runs.finish(run.run_id, "left_out")
    assert begin(TOKEN) == 200


@contextmanager
def chunked_request(server: HttpServer, token: str = TOKEN) -> Iterator[socket.socket]:
    """Begin a request whose body comes in chunks; yield its connection."""
    headers = {"Host": "server", "Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | {"Transfer-Encoding": "chunked"}).items())
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"POST /traces HTTP/1.1\r\n{lines}\r\n".encode())
        yield connection


@pytest.mark.parametrize("token", [TOKEN, "a-token-that-nobody-has"])
def test_body_in_tiny_chunks_ends_its_connection(server: HttpServer, token: str) -> None:
    # A million such chunks, even without a valid token, once kept the server from answering anyone for ten seconds.
    with chunked_request(server, token) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"1\r\n \r\n" * MIB)
    assert post(server, b"[]", "/traces").status == 202


def test_body_that_is_broken_behind_its_answer_is_no_line_of_the_log(server: HttpServer) -> None:
    with chunked_request(server, "a-token-that-nobody-has") as connection:
        connection.sendall(b"1\r\n[\r\n")
        assert connection.recv(1_000).startswith(b"HTTP/1.1 401")
        connection.sendall(b"no chunk\r\n")
        with suppress(ConnectionError):
            # The rest of the answer may come first.
            while connection.recv(1_000):
                pass
    assert server.ask("GET", "/nowhere").status == 404
    # The log is written in order, so once it has this line it has all earlier ones.
    wait_until(lambda: [each for each in server.process.events("request_refused") if each["status"] == 404])
    assert "Fatal error" not in server.process.text()


def test_many_requests_in_a_row_take_no_memory(server: HttpServer) -> None:
    count, request = 3_000, b"GET /" + b"x" * 14_000 + b" HTTP/1.1\r\nHost: server\r\n\r\n"
    before = server.process.peak_bytes()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        sending = threading.Thread(target=connection.sendall, args=(request * count,))
        sending.start()
        answers = connection.makefile("rb")
        for _ in range(count):
            assert answers.readline().startswith(b"HTTP/1.1 404")
            headers = parse_headers(answers)
            answers.read(int(headers["content-length"]))
        sending.join()
    assert server.process.peak_bytes() - before < 20 * MIB


def test_answers_that_one_token_does_not_read_take_little_memory(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, kept, path = tmp_path / "tokens", tmp_path / "kept.jsonl", "/similar?task=tide&k=100"
    tokens.write_text(f"{TOKEN}\n{ANOTHER}\n")
    row = {
        "trace_id": "kp:trace:a",
        "task": "tide",
        "domain": "code",
        "success": True,
        "messages": [{"content": "x" * 200_000}],
    }
    kept.write_text(f"{json.dumps(row)}\n" * 100)
    monkeypatch.setenv("CONSTANTS", "serve.answers._READ_WITHIN_S=8")
    changed = {"serve__tokens": str(tokens), "serve__kept": str(kept), "embedding__embedder": "words"}
    request = f"GET {path} HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    with open_server(settings, tmp_path / "server.log", **changed) as server, ExitStack() as sockets:
        before, statuses = server.process.peak_bytes(), []
        for _ in range(8):
            peer = sockets.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
            # Each peer sends another request behind the first one.
            peer.sendall(request * 2)
            statuses.append(peer.recv(12)[-3:])
        assert set(statuses) == {b"200", b"429"}
        assert len(server.ask("GET", path, authorization=f"Bearer {ANOTHER}").json["runs"]) == 100
        assert server.process.peak_bytes() - before < 200 * MIB
        wait_until(lambda: server.ask("GET", path, authorization=f"Bearer {TOKEN}").status == 200)


def is_answered(server: HttpServer, request: bytes) -> bool:
    """Return whether a connection that has just begun gets an answer, although another one follows."""
    address = ("127.0.0.1", server.port)
    with suppress(ConnectionError, HTTPException), socket.create_connection(address, PATIENCE_S) as connection:
        assert server.ask("GET", "/livez").status == 200
        connection.sendall(request)
        return connection.recv(12) == b"HTTP/1.1 200"
    return False


def test_answer_whose_peer_goes_away_is_no_line_of_the_log(server: HttpServer) -> None:
    # The rows of the answer take a megabyte, which is sent in parts.
    body = json.dumps([{}] * 10_000).encode()
    for _ in range(3):
        with begun(server, TOKEN, len(body)) as peer:
            peer.sendall(body)
            peer.recv(1)
            # Without waiting for the rest, reset the connection.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert post(server, b"[]", "/traces").status == 202
    assert "socket.send()" not in server.process.text()


def test_peers_that_read_no_answer_keep_nobody_out(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTANTS", "serve.server._MOST_CONNECTIONS=16")
    request = b"GET /openapi.json HTTP/1.1\r\nHost: server\r\n\r\n"
    with open_server(settings, tmp_path / "server.log") as server, ExitStack() as sockets:
        for _ in range(16):
            peer = sockets.enter_context(socket.socket())
            # With a small buffer, few answers are enough to keep the server from writing another.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            peer.connect(("127.0.0.1", server.port))
            peer.sendall(request * 300)
        # Until the buffers are full, the server works on these requests.
        wait_until(lambda: is_answered(server, request))


def test_body_in_chunks_of_a_usual_size_is_read(server: HttpServer) -> None:
    with chunked_request(server) as connection:
        connection.sendall((b"400\r\n" + b" " * 1_024 + b"\r\n") * 5_000 + b"2\r\n[]\r\n0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 202")


def delimited(number: int, *contents: bytes) -> bytes:
    """Return a length-delimited field of a Protobuf message."""
    content = b"".join(contents)
    length, left = bytearray(), len(content)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes([number << 3 | 2, *length, left]) + content


def export_with(attributes: bytes) -> bytes:
    ids = delimited(1, bytes(range(16))), delimited(2, bytes(range(8)))
    return delimited(1, delimited(2, delimited(2, *ids, attributes)))


def nested(levels: int) -> bytes:
    """Return an attribute whose value is a list nested ``levels`` deep."""
    value = delimited(1, SECRET.encode())
    for _ in range(levels):
        value = delimited(5, delimited(1, value))
    return delimited(9, delimited(1, b"deep"), delimited(2, value))


@pytest.mark.slow
def test_no_run_costs_more_than_its_bounds(server: HttpServer) -> None:
    # Send spans with empty attributes, which take 16 MiB as JSON.
    run_id = new_run()
    for number in range(1, 16):
        ids = delimited(1, bytes.fromhex(run_id)), delimited(2, bytes([number] * 8))
        parent = delimited(4, bytes([number + 1] * 8)) if number < 15 else b""
        span = delimited(1, delimited(2, delimited(2, *ids, parent, b"\x4a\x00" * 340_000)))
        # The run may be dead before its last span, the root, arrives.
        assert post(server, span, content_type=PROTOBUF).status == 200
    path, headers = f"/traces/kp:trace:otel:{run_id}", {"authorization": f"Bearer {TOKEN}"}
    wait_until(lambda: server.ask("GET", path, **headers).status == 200)
    status = server.ask("GET", path, **headers).json
    assert (status["reason"], status["detail"]) == ("invalid", "$: expected at most 300000 values")


@pytest.mark.slow
def test_handshakes_that_never_end_cost_little(settings: Settings, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files = dict(zip(("serve__certificate", "serve__key"), map(str, authority.pair("server", "DNS:localhost")), strict=True))
    hello = ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=authority.certificate)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost").do_handshake()
    beginning = hello.read()
    with open_server(settings, tmp_path / "server.log", **files) as server, ExitStack() as sockets:
        before = server.process.peak_bytes()
        for _ in range(600):
            sockets.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(beginning)
        connection = HTTPSConnection("localhost", server.port, context=context, timeout=PATIENCE_S)
        connection.request("GET", "/livez")
        assert connection.getresponse().status == 200
        connection.close()
        assert server.process.peak_bytes() - before < 100 * MIB


@pytest.mark.slow
def test_no_request_costs_more_than_its_bounds(
    server: HttpServer, store: Store, pool: ThreadPoolExecutor, request: pytest.FixtureRequest
) -> None:
    begun = time.monotonic()
    beginning = f"POST /traces HTTP/1.1\r\nHost: server\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    slow = {
        "headers": (beginning, HEADERS_S),
        "body": (beginning + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{", BODY_S),
        "nothing": (b"", HEADERS_S),
    }
    sockets = {name: socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) for name in slow}
    for each in sockets.values():
        request.addfinalizer(each.close)
    for name, (sent, _) in slow.items():
        sockets[name].sendall(sent)
    ends = {name: pool.submit(lambda each: (each.recv(100), time.monotonic()), each) for name, each in sockets.items()}

    # A peer that sends too much, or has no valid token, gets its answer once it has sent everything.
    large = b"[" * 8 * MIB
    assert post(server, large + b"[").status == 413
    assert post(server, large, authorization="Bearer none").status == 401
    assert post(server, packed_zeros(256), content_type=PROTOBUF, content_encoding="gzip").status == 413
    assert post(server, gzip.compress(b"{}")[:-1], content_encoding="gzip").status == 400
    assert post(server, b"{}", content_encoding="gzip").status == 400
    assert post(server, b"{}", content_encoding="br").status == post(server, b"{}", content_type="text/plain").status == 415
    no_key = b'{"resourceSpans": [{"resource": {"attributes": [{"key": ["%s"]}]}}]}' % SECRET.encode()
    for body in (b"[" * MIB, b'{"resourceSpans":' * 1_000, b'{"resourceSpans": "%s"}' % SECRET.encode(), b"[1]", no_key):
        refused = post(server, body)
        assert refused.status == 400
        assert SECRET.encode() not in refused.body
        assert post(server, body, "/traces").status in (400, 422)
    assert post(server, b"\xff" * 100, content_type=PROTOBUF).status == 400
    for levels in (40, 300):
        assert post(server, export_with(nested(levels)), content_type=PROTOBUF).status == 200
    # Send attributes without key or value: first as many as the server reads, in two requests at once, and then more.
    costly = export_with(b"\x4a\x00" * 498_000)
    answers = pool.map(lambda count: post(server, costly * count, content_type=PROTOBUF).status, (2, 2, 8))
    assert list(answers) == [200, 200, 200]
    # Send a span with four million ids; nothing but its ids is read.
    assert post(server, export_with(b"\x0a\x00" * 4_000_000), content_type=PROTOBUF).status == 200
    # Send empty messages at each level around spans, and in a resource; the server once parsed all of them at once.
    empties = b"\x0a\x00" * 4_000_000, b"\x12\x00" * 4_000_000
    for export in (empties[0], *(delimited(1, each) for each in empties), delimited(1, delimited(2, empties[1]))):
        assert post(server, export, content_type=PROTOBUF).status == 400
    assert post(server, delimited(1, delimited(1, empties[0])), content_type=PROTOBUF).status == 200
    # Each span stores a copy of some attributes of its resource, so those of long ones are refused.
    refused = post(server, export_of(chat_span(new_run()), kp__domain="code" * 300))
    assert refused.json["partialSuccess"]["rejectedSpans"] == "1"
    assert post(server, export_of(*[{}] * 20_001)).status == 400
    assert post(server, b"\n" * 5 * MIB, "/traces", content_type="application/x-ndjson").status == 413
    assert server.ask("POST", "/v1/traces", b"{}", authorization="Bearer " + TOKEN[:-1]).status == 401

    huge = new_run()
    spans = [chat_span(huge, "00000000000000aa", said=SECRET) for _ in range(25)]
    assert post(server, export_of(*spans[:20])).json == {}
    assert post(server, export_of(*spans[20:], chat_span(huge))).json["partialSuccess"]["rejectedSpans"] == "6"
    many = [post(server, export_of(chat_span(new_run(), "00000000000000aa"))).status for _ in range(15)]
    assert {200, 429} == set(many)
    letters = wait_until(lambda: [each for each in store.dead_letters.read() if each.trace_id.endswith(huge)])
    assert letters[0].detail.startswith("$: expected spans that can be decoded, at most 20 and 16777216 bytes")

    for name, (_, within_s) in slow.items():
        answer_bytes, ended = ends[name].result()
        assert answer_bytes.startswith(b"HTTP/1.1 408") if name == "body" else answer_bytes == b""
        # The costly requests keep a busy machine from answering at once.
        assert ended - begun < within_s + 30 or ended - begun < within_s + 30 * slowness()
    for _ in range(600):
        request.addfinalizer(socket.create_connection(("127.0.0.1", server.port)).close)
    assert server.ask("GET", "/livez").status == 200
