"""The watchdog knows for how long nothing has been done with a message in hand."""

import threading
import time
from types import SimpleNamespace

import pytest
from celery.exceptions import Reject
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.holding import Holding
from kp_scorer.process.watchdog import StallTimer


def test_message_in_hand_ages_until_something_is_tried_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("kp_scorer.process.watchdog.time", SimpleNamespace(monotonic=lambda: now[0]))
    lifecycle = SimpleNamespace(at_work=set[StallTimer](), stopping=threading.Event(), hold_s=3_600.0)
    lifecycle.stopping.set()
    with Holding(lifecycle, SimpleNamespace(), time.monotonic(), "trace_waits") as holding:  # type: ignore[arg-type]
        (timer,) = lifecycle.at_work
        now[0] += 500
        assert timer.elapsed_s() == 500
        with pytest.raises(Reject):
            holding.wait(ServiceUnavailable("away"))
        assert timer.elapsed_s() == 0
    assert not lifecycle.at_work
