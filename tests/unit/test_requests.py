"""A request lets go of its message, whatever comes of the task."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.concurrency.thread import TaskPool
from celery.exceptions import Reject
from kombu.message import Message
from kp_scorer.broker.task_message import TASK_NAME, TaskMessage
from kp_scorer.process.holding import SubmissionRequest

SECRET = "Xylophonia"


class NativePanicError(BaseException):
    """What a native library raises that is no Exception."""


def done_with_message_of(task: Callable[[], None], *, accepted: Callable[[], None] = lambda: None) -> list[str]:
    """Run a task as a worker does, and give what was done with its message: acknowledged, or given back."""
    app = Celery("test", set_as_current=False, backend="cache+memory://")

    def score_trace(trace: Any) -> None:
        task()

    registered = app.task(
        score_trace, name=TASK_NAME, acks_late=True, ignore_result=True, shared=False, Request=SubmissionRequest
    )
    app.finalize()
    pool = TaskPool(1, app=app)
    pool.start()
    done: list[str] = []

    def run(request: Any) -> None:
        assert SECRET not in repr(request.info())
        request.on_accepted = lambda *_: accepted()
        request.run_in(pool)

    # Celery makes a class of its own of ours here.
    handle = registered.start_strategy(app, consumer_with(pool, run))
    sent = Message(channel=SimpleNamespace(), delivery_tag="1", headers={})
    message = TaskMessage(sent, "id", [{"secret": SECRET}], {})
    give_back = partial(given_back, done)
    handle(message, None, lambda *_: done.append("acknowledged"), give_back, [])
    pool.executor.shutdown()
    app.close()
    return done


def given_back(done: list[str], log: object, errors: object, requeue: bool) -> None:
    """Note that a message was given back, or dropped."""
    done.append("given back" if requeue else "dropped")


def consumer_with(pool: TaskPool, run: Callable[[Any], None]) -> SimpleNamespace:
    """What a task's strategy wants of the consumer."""
    return SimpleNamespace(
        pool=pool,
        on_task_request=run,
        hostname="test",
        connection_errors=(),
        event_dispatcher=None,
        timer=SimpleNamespace(call_at=None),
        apply_eta_task=None,
        disable_rate_limits=True,
        task_buckets={},
        controller=SimpleNamespace(state=SimpleNamespace(revoked=set())),
        _limit_task=None,
        _limit_post_eta=None,
    )


def raising(error: BaseException) -> Callable[[], None]:
    """Make what raises an error."""

    def fail() -> None:
        raise error

    return fail


def test_a_task_that_ends_well_acknowledges() -> None:
    assert done_with_message_of(lambda: None) == ["acknowledged"]


@pytest.mark.parametrize("error", [Reject("given back", requeue=True), NativePanicError(), MemoryError(), SystemExit()])
def test_a_task_that_does_not_gives_back(error: BaseException) -> None:
    assert done_with_message_of(raising(error)) == ["given back"]


def test_an_error_before_the_task_gives_back() -> None:
    assert done_with_message_of(lambda: None, accepted=raising(OSError("no events can be sent"))) == ["given back"]
