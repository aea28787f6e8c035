"""The server takes OpenTelemetry's exports over gRPC, from its own exporters and from hand-made frames."""

import gzip
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from kp_scorer.errors import SettingsError
from kp_scorer.serve.server import serve
from kp_scorer.settings import Settings
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tests.support.changed_settings import settings_at, with_changed
from tests.support.http_server import (
    HttpServer,
    chat_span,
    export_of,
    in_protobuf,
    new_run,
    open_server,
    packed_zeros,
    text_message,
)
from tests.support.processes import at_work, free_port, wait_until
from tests.support.tls import Authority

TOKENS = ("a-token-of-this-test", "another-token-of-it")
SERVICE = "/opentelemetry.proto.collector.{}.v1.{}Service/Export"


class GrpcServer:
    def __init__(self, server: HttpServer, port: int, log: Path) -> None:
        self.server, self.port, self.log = server, port, log

    def ask(self, body: bytes, signal: str = "trace", token: str = TOKENS[0], **options: Any) -> bytes:
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options=[("grpc.enable_retries", 0)]) as channel:
            export = channel.unary_unary(SERVICE.format(signal, signal.title()))
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            answer: bytes = export(body, metadata=metadata, **{"timeout": 60, **options})
            return answer

    def refusal(self, body: bytes, **options: Any) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as raised:
            self.ask(body, **options)
        return raised.value


@contextmanager
def served(settings: Settings, folder: Path, **changed: object) -> Iterator[GrpcServer]:
    tokens, port = folder / "tokens", free_port()
    tokens.write_text("\n".join(TOKENS))
    tokens.chmod(0o600)
    with open_server(settings, folder / "server.log", serve__tokens=str(tokens), serve__grpc_port=port, **changed) as server:
        yield GrpcServer(server, port, folder / "server.log")


@pytest.fixture(scope="module")
def server(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcServer]:
    settings, folder = settings_at(redis_url.removesuffix("/0") + "/4"), tmp_path_factory.mktemp("served")
    with at_work(settings, folder), served(settings, folder) as server:
        yield server


@pytest.mark.parametrize("compression", list(grpc.Compression))
def test_a_run_that_the_exporter_sends_is_decided(server: GrpcServer, compression: grpc.Compression) -> None:
    exporter = OTLPSpanExporter(
        f"http://127.0.0.1:{server.port}", headers={"authorization": f"Bearer {TOKENS[0]}"}, compression=compression
    )
    provider = TracerProvider(resource=Resource({"service.name": "tide-agent", "kp.domain": "code"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("agent").start_as_current_span("chat") as chat:
        chat.set_attributes({"gen_ai.operation.name": "chat", "gen_ai.input.messages": text_message("user", "High water?")})
        chat.set_attributes({"gen_ai.output.messages": text_message("assistant", "At 04:12.")})
    provider.shutdown()
    run_id = f"{chat.get_span_context().trace_id:032x}"
    decision = server.server.status(run_id, authorization=f"Bearer {TOKENS[0]}")["decision"]
    assert (decision["domain"], decision["agent_id"]) == ("code", "tide-agent")


def test_logs_and_metrics_are_answered_as_spans_are(server: GrpcServer) -> None:
    for signal in ("trace", "logs", "metrics"):
        assert server.ask(b"", signal) == b""
    nameless = chat_span(new_run()) | {"traceId": "0" * 32}
    partial = ExportTraceServiceResponse.FromString(server.ask(in_protobuf(export_of(nameless)))).partial_success
    assert (partial.rejected_spans, partial.error_message) == (1, "spans without ids")


@pytest.mark.parametrize(
    ("body", "token", "code"),
    [
        # A message larger than its token admits is neither read nor unpacked.
        (bytes(8_300_000), "", grpc.StatusCode.UNAUTHENTICATED),
        (b"", "a-token-of-nobody-here", grpc.StatusCode.UNAUTHENTICATED),
        (b"no message", TOKENS[0], grpc.StatusCode.INVALID_ARGUMENT),
        (b"\x1f\x8bno gzip", TOKENS[0], grpc.StatusCode.INVALID_ARGUMENT),
        (gzip.compress(b"", mtime=0)[:-1], TOKENS[0], grpc.StatusCode.INVALID_ARGUMENT),
        # Two streams: the spans of the second one would be lost.
        (gzip.compress(b"", mtime=0) * 2, TOKENS[0], grpc.StatusCode.INVALID_ARGUMENT),
        (packed_zeros(256), TOKENS[0], grpc.StatusCode.INVALID_ARGUMENT),
        (bytes(8_500_000), TOKENS[0], grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
def test_a_refused_export_has_the_code_of_its_status(
    server: GrpcServer, body: bytes, token: str, code: grpc.StatusCode
) -> None:
    before = server.server.process.peak_bytes()
    assert server.refusal(body, token=token).code() == code
    assert server.server.process.peak_bytes() - before < 150 * 2**20


def test_without_room_exporters_are_told_when_to_send_again(settings: Settings, tmp_path: Path) -> None:
    with served(settings, tmp_path, serve__total_bytes=1) as full:
        refusal = full.refusal(in_protobuf(export_of(chat_span(new_run()))))
    assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    ((name, details),) = refusal.trailing_metadata()
    status, retry = Status.FromString(details), RetryInfo()
    assert (name, status.code, status.message) == ("grpc-status-details-bin", 8, refusal.details())
    assert status.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 2


def _frame(kind: int, stream: int, content: bytes, flags: int = 0) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def _export_frames(stream: int, token: str, message: bytes, flags: int) -> bytes:
    """Return the HTTP/2 frames of an export or of a part of one. With flag 1, ``message`` ends the stream."""
    path = SERVICE.format("trace", "Trace")
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "kp", "te": "trailers"}
    headers |= {"content-type": "application/grpc", "authorization": f"Bearer {token}"}
    texts = [text.encode() for pair in headers.items() for text in pair]
    # Each pair is sent as a literal without indexing.
    literals = [(b"" if number % 2 else b"\0") + bytes([len(text)]) + text for number, text in enumerate(texts)]
    return _frame(1, stream, b"".join(literals), 4) + _frame(0, stream, message, flags)


@contextmanager
def _peer(server: GrpcServer, window_bytes: int, *frames: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port)) as peer:
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, struct.pack(">HI", 4, window_bytes))
        peer.sendall(preface + b"".join(frames))
        yield peer


def test_peers_that_neither_read_nor_send_on_keep_no_other_token_out(server: GrpcServer) -> None:
    export = in_protobuf(export_of(chat_span(new_run())))
    unread = [_export_frames(1 + 2 * number, TOKENS[0], bytes(5), flags=1) for number in range(99)]
    stalled = _export_frames(1, TOKENS[0], b"\0" + struct.pack(">I", 8_000_000) + bytes(1_000), flags=0)
    with ExitStack() as opened:
        for _ in range(12):
            # Eleven such peers would already hold as many requests as the server takes at once.
            opened.enter_context(_peer(server, 0, *unread))
        wait_until(lambda: "too many requests" in server.log.read_text())
        assert server.refusal(export).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.ask(export, token=TOKENS[1]) == b""
    wait_until(lambda: _is_admitted(server, export))
    with ExitStack() as opened:
        for _ in range(12):
            opened.enter_context(_peer(server, 65_535, stalled))
        with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
            wait_until(lambda: server.ask(export, timeout=2) is None)
        assert server.ask(export, token=TOKENS[1], timeout=10) == b""


def test_exports_that_their_peers_give_up_are_not_worked_on_at_once(server: GrpcServer) -> None:
    costly = in_protobuf(export_of(*(chat_span(new_run()) | {"attributes": [{}] * 400_000} for _ in range(2))))
    before = server.server.process.peak_bytes()
    for _ in range(8):
        assert server.refusal(costly, timeout=0.4).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    # The server answers once it no longer works on those.
    assert server.ask(in_protobuf(export_of(chat_span(new_run())))) == b""
    assert server.server.process.peak_bytes() - before < 250 * 2**20


def _is_admitted(server: GrpcServer, export: bytes) -> bool:
    with suppress(grpc.RpcError):
        return server.ask(export) == b""
    return False


def test_requests_in_progress_are_answered_at_sigterm(settings: Settings, tmp_path: Path) -> None:
    terminated, export = threading.Event(), in_protobuf(export_of(chat_span(new_run())))

    def late() -> Iterator[bytes]:
        terminated.wait()
        yield export

    with served(settings, tmp_path) as server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_unary(SERVICE.format("trace", "Trace")).future(
            late(), metadata=(("authorization", f"Bearer {TOKENS[0]}"),), timeout=60
        )
        # An answer on the same connection shows that the server has received the other call, too.
        channel.unary_unary(SERVICE.format("trace", "Trace"))(b"", metadata=(("authorization", f"Bearer {TOKENS[0]}"),))
        server.server.process.process.terminate()
        wait_until(lambda: _is_closed(server.port))
        terminated.set()
        assert call.result() == b""


def _is_closed(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return False
    return True


def _is_ready(channel: Any) -> bool:
    with channel, suppress(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(timeout=1)
        return True
    return False


def test_failed_handshakes_end_no_process_and_write_no_lines(settings: Settings, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    certificate, key = authority.pair("server", "DNS:localhost")
    with served(settings, tmp_path, serve__certificate=str(certificate), serve__key=str(key)) as server:
        for number in range(1_000):
            with socket.create_connection(("127.0.0.1", server.port)) as peer:
                peer.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else bytes(3_000))
        credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
        # The last of the connections above may still be open.
        wait_until(lambda: _is_ready(grpc.secure_channel(f"localhost:{server.port}", credentials)))
        assert "ssl" not in server.log.read_text()


def test_a_port_in_use_is_named(settings: Settings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        changed = with_changed(settings, serve__port=0, serve__grpc_port=listener.getsockname()[1])
        with pytest.raises(SettingsError, match=r"^serve\.grpc_port: cannot listen on 127\.0\.0\.1:"):
            serve(changed)
