"""Messages that cannot be finished yet: held on to, so that no more are taken, and no delivery is used up for an outage."""

import time
from typing import Any, Final

import structlog
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from kp_scorer.errors import ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.process.lifecycle import Lifecycle

PAUSE_S: Final = 1.0
"""How long to wait before an outage is looked at again."""

log = structlog.get_logger("kp_scorer.process.holding")


class RequestWithMessage(Request):  # type: ignore[misc]  # celery ships no types
    """Celery's request of a task, by which the task comes to know its message and when that came."""

    def __init__(self, message: Any, **options: Any) -> None:
        """Take what Celery gives."""
        super().__init__(message, **options)
        self.request_dict.update(message=message, received_s=time.monotonic())


class Holding:
    """One message in hand."""

    def __init__(self, lifecycle: Lifecycle, message: Any, received_s: float, event: str) -> None:
        """Hold a kombu message that came at ``received_s`` by the monotonic clock; ``event`` says in the log that it waits."""
        self._lifecycle = lifecycle
        self._message = message
        self._received_s = received_s
        self._event = event
        self._told = ""

    def wait(self, error: ScorerError) -> None:
        """Wait a moment before another try at what failed with ``error``.

        Raises:
            Reject: the worker is to end, so the message is to be given back.
            Ignore: the broker would soon take the message away, so it was sent again and is to be acknowledged.
        """
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
