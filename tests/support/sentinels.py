"""Sentinels that watch a test's primary, and soon have a replica take its place."""

import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import redis
from kp_scorer.local import redis_executable

from tests.support.processes import free_port, wait_until
from tests.support.servers import RedisServer

PRIMARY: Final = "scorer"
"""Their name of the primary."""

_PASSWORD: Final = "of-the-sentinels"
_COUNT: Final = 3
_QUORUM: Final = 2


class Sentinels:
    """Three of them, on ports of their own, with a password of their own."""

    def __init__(self, directory: Path, primary: RedisServer) -> None:
        """Watch ``primary``; they start when the context is entered, and keep what they write in ``directory``."""
        self._directory = directory
        self._primary = primary
        self._ports = [free_port() for _ in range(_COUNT)]
        self._open = ExitStack()
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        self.url = f"redis+sentinel://{hosts}/0?primary={PRIMARY}&sentinel_password={_PASSWORD}"

    def wait_until_agreed(self) -> None:
        """Wait until each knows the others and a replica that can take over."""
        wait_until(lambda: all(self._knows_all(port) for port in self._ports), timeout_s=30)

    def _knows_all(self, port: int) -> bool:
        with redis.Redis(port=port, password=_PASSWORD, socket_timeout=5) as client:
            try:
                primary = client.sentinel_master(PRIMARY)
                replicas = client.sentinel_slaves(PRIMARY)
            except redis.ConnectionError:
                return False
        linked = [replica for replica in replicas if replica["master-link-status"] == "ok" and not replica["is_disconnected"]]
        return primary["num-other-sentinels"] == _COUNT - 1 and len(linked) == 1

    def _start(self, port: int) -> None:
        file = self._directory / f"sentinel-{port}.conf"
        lines = [
            *(f"port {port}", "bind 127.0.0.1", f'dir "{self._directory}"'),
            *(f"requirepass {_PASSWORD}", f"sentinel sentinel-pass {_PASSWORD}"),
            f"sentinel monitor {PRIMARY} 127.0.0.1 {self._primary.port} {_QUORUM}",
            # So that a failover begins soon.
            *(f"sentinel down-after-milliseconds {PRIMARY} 500", f"sentinel failover-timeout {PRIMARY} 3000"),
        ]
        file.write_text("\n".join(lines), "utf-8")
        with file.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen([redis_executable(), str(file), "--sentinel"], stdout=log, stderr=log)
        self._open.callback(process.wait)
        self._open.callback(process.kill)

    def __enter__(self) -> Self:
        for port in self._ports:
            self._start(port)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
