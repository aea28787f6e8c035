"""A process that stands still is ended, and one that moves on is not."""

import subprocess
import sys

from kp_scorer.process.watchdog import EXIT_CODE, StallTimer

from tests.support.processes import wait_until

STALLED = """
import time
from kp_scorer.process.watchdog import StallTimer, Watchdog
watchdog, moving, still = Watchdog(lambda: None), StallTimer(), StallTimer()
watchdog.watch("moving", moving.elapsed_s, 1.5)
{watch}
still.start()
for _ in range(60):
    moving.start()
    time.sleep(0.05)
"""


def run(watch: str) -> "subprocess.CompletedProcess[str]":
    return run_code(STALLED.format(watch=watch))


def run_code(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_what_stands_still_ends_the_process_and_says_what_it_was() -> None:
    done = run('watchdog.watch("still", still.elapsed_s, 0.2)')
    assert done.returncode == EXIT_CODE
    assert "worker_stalled" in done.stdout + done.stderr
    assert "still" in done.stdout + done.stderr


DYING = """
import os
import time
from kp_scorer.process.watchdog import VitalThread, Watchdog

class Panic(BaseException):
    pass

def die():
    raise Panic("of what the trace says")

watchdog, thread = Watchdog(lambda: None), VitalThread({target}, "the thread")
watchdog.watch_threads([thread])
thread.start()
thread.join()
time.sleep(1.5)
"""


def test_a_vital_thread_that_dies_ends_the_process_and_says_which_it_was_but_not_what_its_error_said() -> None:
    done = run_code(DYING.format(target="die"))
    assert done.returncode == EXIT_CODE
    assert "the thread" in done.stdout
    assert "Panic" in done.stdout
    assert "of what the trace says" not in done.stdout + done.stderr


def test_a_vital_thread_may_return() -> None:
    assert run_code(DYING.format(target="os.getpid")).returncode == 0


def test_what_moves_on_may_go_on_for_ever() -> None:
    assert run("").returncode == 0


def test_a_stall_timer_that_does_not_run_stands_at_nothing() -> None:
    timer = StallTimer()
    assert timer.elapsed_s() == 0.0
    timer.start()
    wait_until(timer.elapsed_s, timeout_s=5)
    timer.stop()
    assert timer.elapsed_s() == 0.0
