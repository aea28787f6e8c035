"""Messages that cannot be finished yet: held on to, so that no more are taken, and no delivery is used up for an outage."""

import os
import time
from typing import Any, Final, Self

import structlog
from celery.app.trace import fast_trace_task, trace_task_ret
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request
from celery.worker.state import task_ready

from kp_scorer.broker.task_message import TaskMessage
from kp_scorer.errors import ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.logs import raised_at
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.watchdog import StallTimer

PAUSE_S: Final = 1.0
"""How long to wait before an outage is looked at again."""

log = structlog.get_logger("kp_scorer.process.holding")


class SubmissionRequest(Request):  # type: ignore[misc]  # celery ships no types
    """Celery's request of a task, by which the task comes to know its message and when that came. It always lets go of it."""

    def __init__(self, message: TaskMessage, **options: Any) -> None:
        """Take what Celery gives."""
        super().__init__(message, **options)
        self.request_dict.update(message=message, received_s=time.monotonic())

    def info(self, safe: bool = False) -> dict[str, Any]:
        """What monitors are shown: never the arguments, which are the trace."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown

    def run_in(self, pool: Any) -> None:
        """Run the task in a thread of the pool.

        Not by the name that Celery has for it: the class that it makes of this one for each task has its own way, which lets go
        of the message only if no error leaves the code around the task, and none that is not an Exception leaves the task.
        """
        pool.apply_async(self._run, callback=ignore)

    def _run(self) -> None:
        """Run the task, and let go of the message whatever comes of it."""
        try:
            self.on_accepted(os.getpid(), time.monotonic())
            trace = fast_trace_task if self.app.use_fast_trace_task else trace_task_ret
            self.on_success(trace(self.type, self.id, self.request_dict, self.body, None, None, app=self.app))
        except BaseException as error:
            log.error("trace_given_back", detail=type(error).__name__, where=raised_at(error))
            # Otherwise monitors would be told for ever that it is at work.
            task_ready(self)
            # The queue delivers it again at once; without a pause this would spin.
            time.sleep(PAUSE_S)
            raise
        finally:
            # Nothing happens if that is done already.
            self.reject(requeue=True)


def ignore(result: object) -> None:
    """What Celery's pool calls with a result."""


class Holding:
    """One message in hand. While the context is open the watchdog looks whether anything is done with the message."""

    def __init__(self, lifecycle: Lifecycle, message: Any, received_s: float, event: str) -> None:
        """Hold a kombu message that came at ``received_s`` by the monotonic clock; ``event`` says in the log that it waits."""
        self._lifecycle = lifecycle
        self._message = message
        self._received_s = received_s
        self._event = event
        self._told = ""
        self._still = StallTimer()

    def __enter__(self) -> Self:
        self._still.start()
        self._lifecycle.at_work.add(self._still)
        return self

    def __exit__(self, *_: object) -> None:
        self._lifecycle.at_work.discard(self._still)

    def wait(self, error: ScorerError) -> None:
        """Wait a moment before another try at what failed with ``error``.

        Raises:
            Reject: the worker is to end, so the message is to be given back.
            Ignore: the broker would soon take the message away, so it was sent again and is to be acknowledged.
        """
        self._still.start()
        if str(error) != self._told:
            self._told = str(error)
            log.warning(self._event, detail=self._told)
        if self._lifecycle.stopping.wait(PAUSE_S):
            raise Reject("given back", requeue=True) from None
        held_s = time.monotonic() - self._received_s
        if held_s > self._lifecycle.hold_s:
            self._send_again(held_s)

    def _send_again(self, held_s: float) -> None:
        try:
            self._lifecycle.runtime.send_again(self._message)
        except (ServiceUnavailable, SettingsError):
            # It is still in hand, and due again.
            return
        log.info("message_sent_again", held_s=round(held_s))
        raise Ignore("sent again")
