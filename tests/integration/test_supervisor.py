"""A worker tells systemd when it takes work, that it is well, and that it stops; nobody else, and not for another process."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.process.supervisor import Supervisor
from kp_scorer.settings import Settings
from structlog.testing import capture_logs

from tests.support.processes import FAST_WORKER, launch_worker, wait_until

SILENCE_S: Final = 0.5
"""What a test waits for what must not come."""


class Systemd:
    """The receiving end of ``NOTIFY_SOCKET``."""

    def __init__(self, address: str) -> None:
        """Listen at a path, or at a name in the abstract namespace."""
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(30)

    def heard(self) -> str:
        """The next thing that it is told."""
        return self._socket.recv(4_096).decode()

    def hears_nothing(self) -> bool:
        """Whether nothing is on its way."""
        self._socket.settimeout(SILENCE_S)
        try:
            self.heard()
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Systemd]:
    listener = Systemd(str(tmp_path / "notify") if request.param == "path" else f"@kp-scorer-test-{os.getpid()}")
    yield listener
    listener.close()


@pytest.mark.parametrize("systemd", ["path"], indirect=True)
def test_a_worker_tells_systemd_of_its_life(settings: Settings, systemd: Systemd, tmp_path: Path) -> None:
    # As long as the interpreter needs to start, the worker is not there to be fed.
    variables = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1000000"}
    worker = launch_worker(settings, tmp_path / "worker.log", FAST_WORKER, variables)
    try:
        worker.wait_until_ready()
        heard = [systemd.heard()]
        while "READY=1" not in heard:
            heard.append(systemd.heard())
        assert set(heard) <= {"WATCHDOG=1", "READY=1"}
        assert systemd.heard() == "WATCHDOG=1"
        assert systemd.heard() == "WATCHDOG=1"
        worker.process.terminate()
        wait_until(lambda: systemd.heard() == "STOPPING=1", timeout_s=30)
    finally:
        worker.stop()
    assert worker.process.returncode == 0
    assert worker.events("supervisor_not_told") == []


def test_what_is_told_arrives_wherever_systemd_listens(systemd: Systemd) -> None:
    told = Supervisor({"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "60000000"})
    told.ready()
    told.feed()
    told.feed()
    told.stopping()
    # Fed twice at once, within half of the time, it is told once.
    assert [systemd.heard() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "STOPPING=1"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "often"}])
def test_who_does_not_watch_this_process_is_not_fed(systemd: Systemd, watchdog: dict[str, str]) -> None:
    Supervisor({"NOTIFY_SOCKET": systemd.address, **watchdog}).feed()
    assert systemd.hears_nothing()


def test_without_systemd_nobody_is_told_and_nothing_is_logged() -> None:
    with capture_logs() as lines:
        Supervisor({"WATCHDOG_USEC": "1"}).feed()
        Supervisor({}).ready()
    assert lines == []


def test_a_systemd_that_has_gone_is_logged_and_harms_nothing(tmp_path: Path) -> None:
    with capture_logs() as lines:
        Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert [(line["event"], line["state"]) for line in lines] == [("supervisor_not_told", "READY=1")]
