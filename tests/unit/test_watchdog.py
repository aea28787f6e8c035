"""A process that stands still is ended, and one that moves on is not."""

import subprocess
import sys
import time

from worker.watchdog import EXIT_CODE, Stopwatch

STALLED = """
import time
from worker.watchdog import Stopwatch, Watchdog
watchdog, moving, still = Watchdog(), Stopwatch(), Stopwatch()
watchdog.watch("moving", moving.elapsed_s, 1.5)
{watch}
still.start()
for _ in range(60):
    moving.start()
    time.sleep(0.05)
"""


def run(watch: str) -> "subprocess.CompletedProcess[str]":
    code = STALLED.format(watch=watch)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_what_stands_still_ends_the_process_and_says_what_it_was() -> None:
    done = run('watchdog.watch("still", still.elapsed_s, 0.2)')
    assert done.returncode == EXIT_CODE
    assert "worker_stalled" in done.stdout + done.stderr
    assert "still" in done.stdout + done.stderr


def test_what_moves_on_may_go_on_for_ever() -> None:
    assert run("").returncode == 0


def test_a_stopwatch_that_does_not_run_stands_at_nothing() -> None:
    watch = Stopwatch()
    assert watch.elapsed_s() == 0.0
    watch.start()
    time.sleep(0.01)
    assert 0.01 <= watch.elapsed_s() < 5.0
    watch.stop()
    assert watch.elapsed_s() == 0.0
