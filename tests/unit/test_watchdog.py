"""What runs beside the consumer: the watchdog, which ends a stalled process alone, and periodic tasks."""

import subprocess
import sys
import threading

import pytest
from kp_scorer.process.watchdog import EXIT_CODE, PeriodicTasks, StallTimer

from tests.support.processes import wait_until

STALLED = """
import time
from kp_scorer.process.watchdog import StallTimer, Watchdog
watchdog, moving, stalled = Watchdog(lambda: None), StallTimer(), StallTimer()
watchdog.watch("moving", moving.elapsed_s, 1.5)
{watch}
stalled.start()
for _ in range(60):
    moving.start()
    time.sleep(0.05)
"""


def run(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_a_stalled_part_ends_the_process_and_is_logged() -> None:
    done = run(STALLED.format(watch='watchdog.watch("stage", stalled.elapsed_s, 0.2)'))
    assert done.returncode == EXIT_CODE
    assert "worker_stalled" in done.stdout + done.stderr
    assert "stage" in done.stdout + done.stderr


DYING = """
import time
from kp_scorer.process.watchdog import VitalThread, Watchdog

class Panic(BaseException):
    pass

def die(stall):
    raise Panic("of what the trace says")

watchdog, thread = Watchdog(lambda: None), VitalThread({target}, "the thread")
watchdog.watch_threads([thread])
thread.start()
thread.join()
time.sleep(1.5)
"""


def test_a_vital_thread_that_dies_ends_the_process_and_is_logged_without_its_error_message() -> None:
    done = run(DYING.format(target="die"))
    assert done.returncode == EXIT_CODE
    assert "the thread" in done.stdout
    assert "Panic" in done.stdout
    assert "of what the trace says" not in done.stdout + done.stderr


@pytest.mark.parametrize("code", [DYING.format(target="bool"), STALLED.format(watch="")])
def test_a_thread_that_returns_and_a_part_that_makes_progress_do_not_end_the_process(code: str) -> None:
    assert run(code).returncode == 0


def test_a_stall_timer_that_does_not_run_is_at_0() -> None:
    timer = StallTimer()
    assert timer.elapsed_s() == 0.0
    timer.start()
    wait_until(timer.elapsed_s, timeout_s=5)
    timer.stop()
    assert timer.elapsed_s() == 0.0


def test_a_task_that_waits_for_its_server_keeps_no_other_from_ending() -> None:
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        answered.wait(60)

    tasks = PeriodicTasks()
    before = tasks.start("before", lambda: None, 0.001)
    waiting = tasks.start("waiting", ask, 0.001)
    after = tasks.start("after", lambda: None, 0.001)
    assert asked.wait(60)
    ending = threading.Thread(target=tasks.__exit__)
    ending.start()
    try:
        wait_until(lambda: not before.is_alive() and not after.is_alive())
        assert waiting.is_alive()
        assert ending.is_alive()
    finally:
        answered.set()
    ending.join(60)
    assert not waiting.is_alive()
