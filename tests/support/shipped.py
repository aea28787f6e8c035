"""Redis with the shipped configuration and users."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import redis
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.connection import connect

from tests.support.commands import run_in_shell
from tests.support.documents import blocks, code_with
from tests.support.processes import free_port, output_of, wait_until
from tests.support.servers import answers
from tests.support.tls import Authority

_AS_OF_7: Final = ("--maxmemory-clients", "256mb")
"""The arguments that the documents add for Redis 7.0 or later."""


class Shipped:
    """A Redis with the shipped configuration and users, set up as the documents say."""

    def __init__(
        self, directory: Path, executable: str, *, authority: Authority | None = None, more: str = "", users: str = ""
    ) -> None:
        """Start the server with ``more`` configuration; given an authority, use TLS and demand certificates of clients.

        By default it has the users of the package, and the administrator and Sentinel's user from the documents, all with new
        passwords.
        """
        self._directory = directory
        self._authority = authority
        self._more = more
        self._users = users
        self.port = free_port()
        self.process = self._start(executable)

    def url(self, user: str, host: str = "127.0.0.1") -> str:
        credentials = f"{user}:{self.password(user)}"
        if self._authority is None:
            return f"redis://{credentials}@{host}:{self.port}/0"
        return f"rediss://{credentials}@localhost:{self.port}/0?{self.files()}"

    def password(self, user: str) -> str:
        match = re.search(rf"^user {user} on >(\w+) ", self.users(), re.MULTILINE)
        assert match
        return match[1]

    def users(self) -> str:
        return (self._directory / "users.acl").read_text("utf-8")

    def files(self) -> str:
        """Return the parameters of a URL for TLS, with which a client shows the server's own certificate."""
        assert self._authority
        certificate, key = self._directory / "server.pem", self._directory / "server.key"
        return f"ssl_ca_certs={self._authority.certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"

    def settings(self, user: str) -> Settings:
        return load_settings({"broker.url": self.url(user), "redis.url": self.url(user)})

    def connect(self, user: str) -> redis.Redis:
        settings = self.settings(user)
        return connect(settings.redis, settings.broker.timeout_s)

    def refused(self) -> list[str]:
        """Return Redis' refusals since the last call, each with the user and the command or key.

        CLIENT SETINFO is left out: redis-py uses it to send its name and version, and Redis 7.0 cannot allow it alone.
        """
        with self.connect("administrator") as admin:
            entries: Any = admin.acl_log()
            admin.acl_log_reset()
        return [
            f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in entries if entry["object"][:6] != "client"
        ]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def _start(self, executable: str) -> "subprocess.Popen[bytes]":
        configuration, users = _files_as_documented()
        (self._directory / "redis.conf").write_text(configuration + self._more, "utf-8")
        (self._directory / "users.acl").write_text(self._users or users, "utf-8")
        arguments = ["redis.conf", *self._arguments(), *_AS_OF_7 * (major_version(executable) >= 7)]
        with (self._directory / "redis.log").open("wb") as log:
            process = subprocess.Popen([executable, *arguments], cwd=self._directory, stdout=log)
        with self.connect("administrator") as client:
            wait_until(lambda: process.poll() is not None or answers(client))
        assert process.poll() is None, (self._directory / "redis.log").read_text("utf-8")
        return process

    def _arguments(self) -> list[str]:
        if self._authority is None:
            return ["--port", str(self.port)]
        for suffix, file in zip(("pem", "key"), self._authority.pair("server", "DNS:localhost"), strict=True):
            shutil.copy(file, self._directory / f"server.{suffix}")
        shutil.copy(self._authority.certificate, self._directory / "authority.pem")
        configuration = self._directory / "redis.conf"
        lines = re.sub(r"^# (port 0|tls-.*)$", r"\1", configuration.read_text("utf-8"), flags=re.MULTILINE)
        configuration.write_text(lines.replace("tls-auth-clients no", "tls-auth-clients yes"), "utf-8")
        return ["--tls-port", str(self.port)]


@cache
def _files_as_documented() -> tuple[str, str]:
    """Return redis.conf and users.acl as the documents' commands make them, the same for all servers of a run."""
    commands, _, _ = code_with("PASSWORD-OF-$user").partition("redis-server")
    more = ("user administrator on", "user consumer on", "user replica on")
    added = [block for block in blocks("deploy/OPERATIONS.md") if block.startswith(more)]
    assert len(added) == len(more)
    with TemporaryDirectory() as directory:
        run_in_shell(commands, Path(directory)).check_returncode()
        configuration, users = (Path(directory, name).read_text("utf-8") for name in ("redis.conf", "users.acl"))
    return configuration, users + "".join(added).replace("PASSWORD-OF-", ">")


@cache
def major_version(executable: str) -> int:
    """Return the major version of a server: 7 for Redis 7.0.15. Valkey, which forked Redis 7.2, has higher ones."""
    match = re.search(r"\bv=(\d+)", output_of(executable, "--version"))
    assert match
    return int(match[1])
