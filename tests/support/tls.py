"""Certificates made for a test, and a listener that notes what it is told before it has proved who it is."""

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A private certificate authority, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        """Make its key and its certificate; skip the test where there is no openssl."""
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl on the PATH")
        directory.mkdir()
        self._directory = directory
        self.certificate = directory / "authority.pem"
        self._key = directory / "authority.key"
        self._openssl("req", "-x509", *_KEY, "-subj", "/CN=authority", "-keyout", self._key, "-out", self.certificate)

    def server(self, *names: str, days: int = 2, asks_clients: bool = False) -> ssl.SSLContext:
        """What a server needs that proves to have these names (``DNS:localhost``); with ``days`` below 0, it has expired.

        One that asks clients takes none without a certificate of this authority.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.pair("server", *names, days=days))
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.certificate)
        return context

    def pair(self, owner: str, *names: str, days: int = 2) -> tuple[Path, Path]:
        """Make a certificate and its key, in files named after their owner."""
        key, request, certificate = (self._directory / f"{owner}.{suffix}" for suffix in ("key", "csr", "pem"))
        subject = ("-subj", f"/CN={owner}", *(("-addext", f"subjectAltName={','.join(names)}") if names else ()))
        self._openssl("req", *_KEY, *subject, "-keyout", key, "-out", request)
        issuer = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-copy_extensions", "copy")
        self._openssl("x509", "-req", "-in", request, *issuer, "-days", str(days), "-out", certificate)
        return certificate, key

    @staticmethod
    def _openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)


class Listener:
    """Accepts connections on a port of its own, notes what comes, and hangs up after the first of it."""

    def __init__(self) -> None:
        """Listen."""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._listen, name="listener", daemon=True)
        self.port: int = self._socket.getsockname()[1]
        self.heard: list[bytes] = []

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.heard.append(connection.recv(65_536))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Closing alone would leave the thread in its accept.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)
