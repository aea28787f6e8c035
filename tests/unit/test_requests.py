"""A request lets go of its message, whatever comes of the task."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject
from kombu.message import Message
from kp_scorer.broker.task_message import TASK_NAME, TaskMessage
from kp_scorer.process.holding import SubmissionRequest

SECRET = "Xylophonia"


class NativePanicError(BaseException):
    """What a native library raises that is no Exception."""


class InThisThread:
    """A pool that runs at once, and keeps an error to itself, as that of threads does."""

    def apply_async(self, target: Callable[[], object], callback: Callable[[object], None]) -> None:
        """Run the target."""
        with suppress(BaseException):
            callback(target())


def done_with_message_of(task: Callable[[], None], *, accepted: Callable[[], None] = lambda: None) -> list[Any]:
    """Run a task, and give what was done with its message: acknowledged, or given back."""
    app = Celery("test", set_as_current=False, backend="cache+memory://")

    def score_trace(trace: Any) -> None:
        task()

    registered = app.task(score_trace, name=TASK_NAME, acks_late=True, ignore_result=True, shared=False)
    app.finalize()
    done: list[Any] = []
    sent = Message(channel=SimpleNamespace(), delivery_tag="1", headers={})
    request = SubmissionRequest(
        TaskMessage(sent, "id", [{"secret": SECRET}], {}),
        app=app,
        task=registered,
        headers={"id": "id", "task": TASK_NAME},
        body=([{"secret": SECRET}], {}, None),
        decoded=True,
        on_ack=lambda *_: done.append("acknowledged"),
        on_reject=lambda log, errors, requeue: done.append("given back" if requeue else "dropped"),
    )
    assert SECRET not in repr(request.info())
    request.on_accepted = lambda *_: accepted()
    request.execute_using_pool(InThisThread())
    app.close()
    return done


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
