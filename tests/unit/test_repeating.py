"""What a worker repeats beside its messages, and how it ends that."""

import threading

from kp_scorer.process.repeating import Chores

from tests.support.processes import wait_until


def test_one_that_waits_for_its_server_keeps_no_other_from_ending() -> None:
    asked, answered = threading.Event(), threading.Event()

    def ask() -> None:
        asked.set()
        answered.wait(60)

    chores = Chores()
    before = chores.start("before", lambda: None, 0.001)
    waiting = chores.start("waiting", ask, 0.001)
    after = chores.start("after", lambda: None, 0.001)
    assert asked.wait(60)
    ending = threading.Thread(target=chores.__exit__)
    ending.start()
    try:
        wait_until(lambda: not before.is_alive() and not after.is_alive())
        assert waiting.is_alive()
        assert ending.is_alive()
    finally:
        answered.set()
    ending.join(60)
    assert not waiting.is_alive()
