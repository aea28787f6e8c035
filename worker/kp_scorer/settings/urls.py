"""Parses the URLs of servers strictly. No error quotes any part of a URL, because any part may be a password."""

import re
import ssl
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from pydantic_core import MultiHostUrl

SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
BROKER_SCHEMES: Final = ("redis", "rediss", *SENTINEL_SCHEMES, "amqp", "amqps", "pyamqp")
REDIS_SCHEMES: Final = ("redis", "rediss", *SENTINEL_SCHEMES)
TLS_SCHEMES: Final = frozenset({"rediss", "rediss+sentinel", "amqps"})

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_SENTINEL_PARAMETERS: Final = ("primary", "sentinel_user", "sentinel_password")
_SENTINEL_PORT: Final = 26_379
_SHAPE: Final = (
    "expected SCHEME://USER:PASSWORD@HOST:PORT/PATH; in the user and the password write / as %2F, # as %23, ? as %3F, "
    "@ as %40, % as %25"
)
# Libraries read these in different ways: as part of a password, or as the end of the host or the path.
_AMBIGUOUS: Final = re.compile(r"[\s#\\]|[/?@].*@|%(?![0-9A-Fa-f]{2})")

Address = tuple[str, int | None]


class Sentinels(NamedTuple):
    """The Redis Sentinels that know the primary's address: its name there, and their own user and password, empty if none."""

    addresses: Sequence[Address]
    primary: str
    user: str
    password: str


class ServerUrl(NamedTuple):
    """The parts of a URL, unescaped."""

    scheme: str
    user: str
    password: str
    host: str  # With sentinels, host and port are those of the first.
    port: int | None
    path: str  # Redis' database or RabbitMQ's virtual host; empty for the default.
    database: int
    tls_files: dict[str, str]  # Paths by redis-py's names: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``.
    sentinels: Sentinels | None

    @property
    def is_tls(self) -> bool:
        """True if the connection is encrypted and the server's certificate verified."""
        return self.scheme in TLS_SCHEMES

    def without_parameters(self) -> str:
        """Return the URL in a form that all libraries read in the same way: escaped, with one address and no parameters."""
        return f"{self.scheme.removesuffix('+sentinel')}://{self.authority()}/{quote(self.path, safe='')}"

    def authority(self) -> str:
        """Return user, password, host and port, escaped."""
        credentials = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        return f"{credentials}{'@' if credentials else ''}{self.host}{f':{self.port}' if self.port else ''}"


def parse_url(url: str, schemes: Sequence[str]) -> ServerUrl:
    """Parse the URL of a server.

    Raises:
        ValueError: it has none of the schemes, is ambiguous, or names a parameter or a file that cannot be used.
    """
    scheme, _, after_scheme = url.partition("://")
    if scheme not in schemes:
        raise ValueError(f"expected a URL that begins with one of {', '.join(schemes)}")
    try:
        parsed = _parse(scheme, after_scheme)
        addresses = [(host["host"] or "", host["port"]) for host in parsed.hosts()]
        user, password = (unquote(parsed.hosts()[0][part] or "", errors="strict") for part in ("username", "password"))
        path = unquote((parsed.path or "")[1:], errors="strict")
    except ValueError:
        raise ValueError(_SHAPE) from None
    if len(addresses) > 1 and scheme not in SENTINEL_SCHEMES:
        raise ValueError(_SHAPE)
    if user and not password:
        # Logs show the user, which here is often a password.
        raise ValueError(f"expected a password for the user; a password without a user follows a colon; {_SHAPE}")
    parameters = dict(parsed.query_params())
    names = (*(_SENTINEL_PARAMETERS if scheme in SENTINEL_SCHEMES else ()), *(_TLS_FILES if scheme in TLS_SCHEMES else ()))
    if not parameters.keys() <= set(names):
        # Not even ssl_cert_reqs is accepted, as certificates are always verified.
        raise ValueError(f"expected {'no parameters but ' + ', '.join(names) if names else 'no parameters'} after a ?")
    database = path if scheme.startswith("redis") else ""
    if not re.fullmatch(r"[0-9]{0,9}", database):
        raise ValueError(f"expected the number of a database, or none; {_SHAPE}")
    sentinels = _sentinels(addresses, parameters) if scheme in SENTINEL_SCHEMES else None
    host, port = sentinels.addresses[0] if sentinels else addresses[0]
    return ServerUrl(scheme, user, password, host, port, path, int(database or 0), _tls_files(parameters), sentinels)


def _parse(scheme: str, after_scheme: str) -> MultiHostUrl:
    credentials, at, location = after_scheme.rpartition("@")
    if location[:1] in ("", "/", "?", ":"):
        location = "localhost" + location
    # A comma separates addresses, except in a password.
    parsed = MultiHostUrl(f"{scheme}://{credentials.replace(',', '%2C')}{at}{location}")
    path = parsed.path or ""
    # RabbitMQ's default virtual host is written as two slashes; any other slash in a name is escaped.
    is_one_name = path == "//" or "/" not in path[1:]
    are_hosts = all(re.fullmatch(r"[\w.-]+|\[[\w:.%]+\]", host["host"] or "") and host["port"] != 0 for host in parsed.hosts())
    if not after_scheme.isprintable() or _AMBIGUOUS.search(after_scheme) or not is_one_name or not are_hosts:
        raise ValueError
    return parsed


def _sentinels(addresses: Sequence[Address], parameters: dict[str, str]) -> Sentinels:
    primary, user, password = (parameters.get(name, "") for name in _SENTINEL_PARAMETERS)
    if not primary:
        raise ValueError("expected ?primary=NAME, by which the sentinels know the primary")
    if user and not password:
        raise ValueError("sentinel_user: expected sentinel_password too")
    return Sentinels([(host, port or _SENTINEL_PORT) for host, port in addresses], primary, user, password)


def _tls_files(parameters: dict[str, str]) -> dict[str, str]:
    """Check and return the files of TLS: a connection that fails because of one would look like a server that is down."""
    files: dict[str, str] = {name: parameters[name] for name in _TLS_FILES if name in parameters}
    for name, file in files.items():
        if not Path(file).is_file():
            raise ValueError(f"{name}: there is no such file")
    if "ssl_keyfile" in files and "ssl_certfile" not in files:
        raise ValueError("ssl_keyfile: expected ssl_certfile too")
    context, refusal = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ""
    try:
        if "ssl_ca_certs" in files:
            refusal = "ssl_ca_certs: expected a file of certificates in PEM, which can be read"
            context.load_verify_locations(files["ssl_ca_certs"])
        if "ssl_certfile" in files:
            refusal = "ssl_certfile: expected a certificate in PEM and, there or in ssl_keyfile, its key without a password"
            # Without a password OpenSSL would ask for one on the terminal.
            context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"), password="")
    except OSError:
        raise ValueError(refusal) from None
    return files


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host; False for a name other than ``localhost``."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
