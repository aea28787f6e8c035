"""Makes certificates for a test, and listens for what clients send before the server has proved its identity."""

import socketserver
import ssl
import threading
from pathlib import Path
from typing import Any, Final, Self

from tests.support.processes import output_of
from tests.support.required import required

_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Authority:
    """A private certificate authority, in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        """Make the key and the certificate of an authority."""
        required("openssl")
        directory.mkdir()
        self._directory = directory
        self.certificate = directory / "authority.pem"
        self._key = directory / "authority.key"
        # Python 3.13 and later reject an authority without this extension.
        subject = ("-subj", "/CN=authority", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        output_of("openssl", "req", "-x509", *_KEY, *subject, "-keyout", self._key, "-out", self.certificate)

    def server(self, *names: str, days: int = 2, asks_clients: bool = False) -> ssl.SSLContext:
        """Return the context of a server with these names (``DNS:localhost``). With 0 ``days``, its certificate has expired.

        With ``asks_clients`` it refuses clients without a certificate of this authority.
        """
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.pair("server", *names, days=days))
        if asks_clients:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.certificate)
        return context

    def pair(self, owner: str, *names: str, days: int = 2) -> tuple[Path, Path]:
        key, request, certificate = (self._directory / f"{owner}.{suffix}" for suffix in ("key", "csr", "pem"))
        subject = ("-subj", f"/CN={owner}", *(("-addext", f"subjectAltName={','.join(names)}") if names else ()))
        output_of("openssl", "req", *_KEY, *subject, "-keyout", key, "-out", request)
        issuer = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-copy_extensions", "copy")
        output_of("openssl", "x509", "-req", "-in", request, *issuer, "-days", str(days), "-out", certificate)
        return certificate, key


class Listener(socketserver.TCPServer):
    """A server that accepts connections, by default on a free port, records what arrives first, and closes them."""

    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        self.port: int = self.server_address[1]
        self.heard: list[bytes] = []

    def finish_request(self, request: Any, client_address: Any) -> None:
        self.heard.append(request.recv(65_536))

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="listener", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
