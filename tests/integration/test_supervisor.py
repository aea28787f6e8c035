"""A worker notifies systemd that it is ready and stopping and, if systemd watches it, that it is alive."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kp_scorer.process.watchdog import Supervisor
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from structlog.testing import capture_logs

from tests.support.changed_settings import with_changed
from tests.support.commands import COMMAND
from tests.support.processes import FAST_WORKER, PATIENCE_S, free_port, opened, start_worker, wait_until
from tests.support.required import required


class Systemd:
    """The receiving end of ``NOTIFY_SOCKET``, under a name in the abstract namespace."""

    def __init__(self) -> None:
        self.address = f"@kp-scorer-test-{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.address[1:]}")
        self._socket.settimeout(30)
        self.close = self._socket.close

    def receive(self) -> str:
        """Wait for the next notification."""
        return self._socket.recv(4_096).decode()


@pytest.fixture
def systemd() -> Iterator[Systemd]:
    with closing(Systemd()) as listening:
        yield listening


def test_a_worker_notifies_systemd_of_its_life(settings: Settings, systemd: Systemd, tmp_path: Path) -> None:
    # The interval is long enough for the interpreter to start, as the worker cannot notify the watchdog meanwhile.
    variables = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "1000000"}
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER, variables=variables) as worker:
        notifications = [systemd.receive()]
        while "READY=1" not in notifications:
            notifications.append(systemd.receive())
        assert set(notifications) <= {"WATCHDOG=1", "READY=1"}
        assert [systemd.receive() for _ in range(2)] == ["WATCHDOG=1"] * 2
        worker.process.terminate()
        wait_until(lambda: systemd.receive() == "STOPPING=1")
    assert worker.process.returncode == 0
    assert worker.events("supervisor_not_told") == []


@pytest.mark.parametrize("order", [(signal.SIGHUP, signal.SIGTERM), (signal.SIGTERM, signal.SIGHUP)])
def test_a_worker_that_is_told_to_stop_ends_even_if_it_is_told_to_restart(
    order: tuple[signal.Signals, ...], settings: Settings, systemd: Systemd
) -> None:
    variables = os.environ | as_environment(with_changed(settings, embedding__embedder="none", metrics__port=0))
    with opened(*COMMAND, "worker", env=variables | {"NOTIFY_SOCKET": systemd.address}, stderr=subprocess.DEVNULL) as worker:
        wait_until(lambda: systemd.receive() == "READY=1")
        for each in order:
            worker.send_signal(each)
        assert worker.wait(PATIENCE_S) == 0


def test_systemd_is_notified_no_more_often_than_it_asks(systemd: Systemd) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "60000000"})
    # Two feeds within half the interval send one notification.
    supervisor.feed()
    supervisor.feed()
    supervisor.notify("STOPPING=1")
    assert [systemd.receive() for _ in range(2)] == ["WATCHDOG=1", "STOPPING=1"]


@pytest.mark.parametrize("watchdog", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "often"}])
def test_a_systemd_that_does_not_watch_this_process_is_not_notified(systemd: Systemd, watchdog: dict[str, str]) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": systemd.address, **watchdog})
    supervisor.feed()
    supervisor.notify("READY=1")
    assert systemd.receive() == "READY=1"


def test_without_systemd_nothing_is_sent_or_logged() -> None:
    with capture_logs() as lines:
        Supervisor({"WATCHDOG_USEC": "1"}).feed()
        Supervisor({}).notify("READY=1")
    assert lines == []


def test_a_systemd_that_is_gone_is_logged_and_ignored(tmp_path: Path) -> None:
    with capture_logs() as lines:
        Supervisor({"NOTIFY_SOCKET": str(tmp_path / "gone")}).notify("READY=1")
    assert [(line["event"], line["state"]) for line in lines] == [("supervisor_not_told", "READY=1")]


def test_the_first_process_of_a_container_ends_when_told_to_while_it_starts(tmp_path: Path) -> None:
    container = (required("unshare", "util-linux"), "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    if subprocess.run([*container, "true"], check=False, capture_output=True).returncode:
        pytest.skip("nobody here may make a namespace of processes")
    # Nothing answers there, so the start waits for a minute.
    variables = os.environ | {"KP_BROKER_URL": f"redis://127.0.0.1:{free_port()}/0", "KP_METRICS_PORT": "0"}
    log = tmp_path / "worker.log"
    with log.open("wb") as output, opened(*container, *COMMAND, "worker", env=variables, stderr=output) as outer:
        wait_until(lambda: b"service_unavailable" in log.read_bytes())
        (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text("utf-8").split()
        os.kill(int(first), signal.SIGTERM)
        assert outer.wait(PATIENCE_S) == 128 + signal.SIGTERM
