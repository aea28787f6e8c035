"""The URL of a server, taken apart once and strictly. No error quotes any of it: what is not understood may be a password."""

import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote

SENTINEL_SCHEMES: Final = ("redis+sentinel", "rediss+sentinel")
BROKER_SCHEMES: Final = ("redis", "rediss", *SENTINEL_SCHEMES, "amqp", "amqps", "pyamqp")
REDIS_SCHEMES: Final = ("redis", "rediss", *SENTINEL_SCHEMES, "unix")
TLS_SCHEMES: Final = frozenset({"rediss", "rediss+sentinel", "amqps"})

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
# What redis-py and Celery would also take for less; here it may be said, and cannot be changed.
_TLS_VERIFIED: Final = {"ssl_cert_reqs": ("required", "CERT_REQUIRED"), "ssl_check_hostname": ("true", "True")}
# A user or password with one of these, unescaped, would be taken for a host, a path or parameters.
_PARTS: Final = re.compile(
    r"(?:(?P<user>[^:@/?#\s]*)(?::(?P<password>[^@/?#\s]*))?@)?"
    r"(?P<addresses>[^@/?#\s]*)"
    r"(?P<path>/[^@?#\s]*)?(?:\?(?P<query>[^@?#\s]*))?"
)
_ADDRESS: Final = re.compile(r"(?P<host>[\w.-]*|\[[\w:.%]+\])(?::(?P<port>\d{1,5}))?")
_SHAPE: Final = (
    "expected SCHEME://USER:PASSWORD@HOST:PORT/PATH; in the user and the password write / as %2F, # as %23, ? as %3F, "
    "@ as %40, % as %25"
)

_SOCKET: Final = "expected unix:///PATH/OF/THE/SOCKET"
_ESCAPE: Final = re.compile("%[0-9A-Fa-f]{2}")

_PRIMARY, _SENTINEL_USER, _SENTINEL_PASSWORD = _OF_SENTINELS = ("primary", "sentinel_user", "sentinel_password")
_SENTINEL_PORT: Final = 26_379


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    """Empty for a socket."""
    port: int | None


class Sentinels(NamedTuple):
    """Whom to ask where the primary is."""

    addresses: Sequence[Address]
    primary: str
    """What they call it."""
    user: str
    """Theirs, as is the password; empty if they ask for none."""
    password: str


class ServerUrl(NamedTuple):
    """What a URL says."""

    scheme: str
    """redis, rediss, redis+sentinel, rediss+sentinel, unix, amqp, amqps or pyamqp."""
    user: str
    password: str
    host: str
    """Empty for a socket. With sentinels, the first of them, as is the port."""
    port: int | None
    path: str
    """Redis' database, RabbitMQ's virtual host, or the path of a socket; empty for the default one."""
    database: int
    tls_files: dict[str, str]
    """Paths by the names that redis-py gives them: ``ssl_ca_certs``, ``ssl_certfile``, ``ssl_keyfile``."""
    sentinels: Sentinels | None
    """None where the address is the server's own."""

    @property
    def is_tls(self) -> bool:
        """Whether the server must prove who it is before it is told anything."""
        return self.scheme in TLS_SCHEMES

    def without_parameters(self) -> str:
        """The URL in the one form that all libraries read alike: escaped, of one address, with nothing after a "?"."""
        path = self.path if self.scheme == "unix" else "/" + quote(self.path, safe="")
        return f"{self.scheme.removesuffix('+sentinel')}://{self.authority()}{path}"

    def authority(self) -> str:
        """User, password, host and port, escaped."""
        credentials = quote(self.user, safe="") + (f":{quote(self.password, safe='')}" if self.password else "")
        port = f":{self.port}" if self.port else ""
        return f"{credentials}{'@' if credentials else ''}{self.host}{port}"


def parse_url(url: str, schemes: Sequence[str]) -> ServerUrl:
    """Take a URL apart.

    Raises:
        ValueError: it has none of these schemes, is not the URL of one server, asks for TLS without verified certificates, or
            names a file that does not exist. The message holds nothing of the URL but names of its parameters.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in schemes:
        raise ValueError(f"expected a URL that begins with one of {', '.join(schemes)}")
    found = _PARTS.fullmatch(rest)
    # Bytes that are no text, from a variable, could not be escaped.
    if found is None or not url.isprintable():
        raise ValueError(_SHAPE)
    addresses = [_address(address) for address in found["addresses"].split(",")]
    if len(addresses) > 1 and scheme not in SENTINEL_SCHEMES:
        raise ValueError(_SHAPE)
    if found["user"] and not found["password"]:
        # It would be printed as a user, and is often a password.
        raise ValueError(f"a user needs a password, and a password alone stands behind a colon; {_SHAPE}")
    if scheme == "unix" and addresses != [Address("", None)]:
        raise ValueError(_SOCKET)
    path, database = _path(scheme, found["path"] or "")
    parameters = dict(parse_qsl(found["query"] or "", keep_blank_values=True))
    if scheme == "unix":
        database = _database(parameters.pop("db", ""))
    sentinels = _sentinels(addresses, parameters) if scheme in SENTINEL_SCHEMES else None
    host, port = sentinels.addresses[0] if sentinels else addresses[0]
    if scheme != "unix":
        host = host or "localhost"
    user, password = _unescaped(found["user"] or ""), _unescaped(found["password"] or "")
    return ServerUrl(scheme, user, password, host, port, path, database, _tls_files(scheme, parameters), sentinels)


def _address(address: str) -> Address:
    found = _ADDRESS.fullmatch(address)
    if found is None or (found["port"] and not 0 < int(found["port"]) < 65_536):
        raise ValueError(_SHAPE)
    return Address(found["host"], int(found["port"]) if found["port"] else None)


def _sentinels(addresses: Sequence[Address], parameters: dict[str, str]) -> Sentinels:
    """Take what is said of the sentinels out of the parameters."""
    primary, user, password = (parameters.pop(name, "") for name in _OF_SENTINELS)
    if not primary:
        raise ValueError(f"expected ?{_PRIMARY}=NAME, by which the sentinels know the primary")
    if user and not password:
        raise ValueError(f"{_SENTINEL_USER}: expected {_SENTINEL_PASSWORD} too")
    return Sentinels(
        [Address(host or "localhost", port or _SENTINEL_PORT) for host, port in addresses], primary, user, password
    )


def _path(scheme: str, path: str) -> tuple[str, int]:
    if scheme == "unix":
        if not path:
            raise ValueError(_SOCKET)
        return _unescaped(path), 0
    if scheme.startswith("redis"):
        return path[1:], _database(path[1:])
    # Two slashes name the default virtual host, as do none.
    if "/" in path[1:] and path != "//":
        raise ValueError(_SHAPE)
    return _unescaped(path[1:]), 0


def _unescaped(part: str) -> str:
    try:
        if _ESCAPE.sub("", part).count("%") == 0:
            return unquote(part, errors="strict")
    except UnicodeDecodeError:
        pass
    raise ValueError(_SHAPE)


def _database(number: str) -> int:
    if not re.fullmatch(r"[0-9]{0,9}", number):
        raise ValueError(f"expected the number of a database, or none; {_SHAPE}")
    return int(number or 0)


def _tls_files(scheme: str, parameters: dict[str, str]) -> dict[str, str]:
    known = (*_TLS_FILES, *_TLS_VERIFIED) if scheme in TLS_SCHEMES else ("db",) if scheme == "unix" else ()
    if scheme in SENTINEL_SCHEMES:
        known = (*_OF_SENTINELS, *known)
    if not parameters.keys() <= set(known):
        raise ValueError(f"expected {'no parameters but ' + ', '.join(known) if known else 'no parameters'} after a ?")
    for name, verified in _TLS_VERIFIED.items():
        if name in parameters and parameters[name] not in verified:
            raise ValueError(f"{name}: certificates are always verified; name a private authority's with ssl_ca_certs")
    files: dict[str, str] = {name: parameters[name] for name in _TLS_FILES if name in parameters}
    for name, file in files.items():
        if not Path(file).is_file():
            raise ValueError(f"{name}: there is no such file")
    if "ssl_keyfile" in files and "ssl_certfile" not in files:
        raise ValueError("ssl_keyfile: expected ssl_certfile too")
    _check_tls_files(files)
    return files


def _check_tls_files(files: dict[str, str]) -> None:
    """Have files refused that no connection could be made with, which would look like a server that is away."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if "ssl_ca_certs" in files:
            context.load_verify_locations(files["ssl_ca_certs"])
    except OSError:
        raise ValueError("ssl_ca_certs: expected a file of certificates in PEM, which can be read") from None
    try:
        if "ssl_certfile" in files:
            # Without a password OpenSSL would ask for one, on the terminal.
            context.load_cert_chain(files["ssl_certfile"], files.get("ssl_keyfile"), password="")
    except OSError:
        raise ValueError(
            "ssl_certfile: expected a certificate in PEM and, there or in ssl_keyfile, its key without a password"
        ) from None
