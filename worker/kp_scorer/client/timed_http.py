"""Gives an HTTP request one deadline. The timeout of a socket begins anew with each byte that the other side sends or takes."""

import time
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from socket import socket
from typing import Any, Final
from urllib.request import HTTPHandler, HTTPSHandler, Request

_PIECE_BYTES: Final = 16_384  # TLS takes at most this many bytes at once.


class _Connection(HTTPConnection):
    def connect(self) -> None:
        self.deadline = time.monotonic() + (self.timeout or 0.0)
        super().connect()

    def send(self, data: Any) -> None:
        if not self.sock:
            self.connect()
        for start in range(0, len(data), _PIECE_BYTES):
            _limit(self.sock, self.deadline)
            super().send(data[start : start + _PIECE_BYTES])

    def response_class(self, sock: socket, *arguments: Any, **options: Any) -> HTTPResponse:  # type: ignore[override]
        response = HTTPResponse(sock, *arguments, **options)
        response.fp = BufferedReader(_Reader(response.fp.detach(), sock, self.deadline))
        return response


class _TlsConnection(_Connection, HTTPSConnection):
    pass


class _Reader(RawIOBase):
    def __init__(self, raw: RawIOBase, sock: socket, deadline: float) -> None:
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        _limit(self._sock, self._deadline)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class TimedHandler(HTTPHandler, HTTPSHandler):
    """Opens URLs so that a request and its answer share one timeout. Connecting, and TLS' handshake, may each take as long."""

    def do_open(self, http_class: Any, req: Request, **options: Any) -> HTTPResponse:
        """Send the request over a connection with a deadline."""
        return super().do_open(_TlsConnection if http_class is HTTPSConnection else _Connection, req, **options)


def _limit(sock: socket, deadline: float) -> None:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
