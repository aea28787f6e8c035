"""The threads beside the consumer: the timers that the watchdog reads, and periodic tasks."""

import threading
import time

from kp_scorer.process.watchdog import PeriodicTasks, StallTimer

from tests.support.processes import PATIENCE_S, wait_until


def test_a_stall_timer_runs_from_its_last_start_and_is_at_0_when_it_does_not_run() -> None:
    timer = StallTimer()
    assert timer.elapsed_s() == 0.0
    timer.start()
    wait_until(lambda: timer.elapsed_s() > 0.5)
    before_s = time.monotonic()
    timer.start()
    assert timer.elapsed_s() <= time.monotonic() - before_s
    timer.stop()
    assert timer.elapsed_s() == 0.0


def test_a_task_that_waits_for_its_server_does_not_delay_the_end_of_others() -> None:
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        answered.wait(PATIENCE_S)

    tasks = PeriodicTasks()
    before = tasks.start("before", lambda: None, 0.001)
    waiting = tasks.start("waiting", ask, 0.001)
    after = tasks.start("after", lambda: None, 0.001)
    assert asked.wait(PATIENCE_S)
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
