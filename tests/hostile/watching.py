"""What monitors are told while something happens: the events of tasks, and answers to questions about them."""

import json
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kombu.exceptions import OperationalError
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.settings import Settings


class Monitor:
    """Listens, and asks again and again, in threads of its own."""

    def __init__(self, settings: Settings) -> None:
        """Watch the workers of these settings."""
        self.events: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self._app = make_celery(settings)
        self._ended = threading.Event()
        self._listening = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._listen, self._ask)]

    def text(self) -> str:
        """All that it was told, as JSON."""
        return json.dumps([self.events, self.answers], ensure_ascii=False, default=repr)

    def shown(self, question: str) -> list[dict[str, Any]]:
        """The tasks in all answers to a question: active, reserved or scheduled."""
        return [task for asked, answer in self.answers if asked == question for tasks in answer.values() for task in tasks]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        assert self._listening.wait(30)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)
        self._app.close()

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.events.append})
            with receiver.consumer_context() as (_, channel, _):
                self._listening.set()
                while not self._ended.is_set():
                    with suppress(TimeoutError):
                        channel.connection.client.drain_events(timeout=0.2)

    def _ask(self) -> None:
        inspect = self._app.control.inspect(timeout=2, limit=1)
        while not self._ended.is_set():
            for question in ("active", "reserved", "scheduled"):
                # A broker that is busy for some seconds answers the next one.
                with suppress(OperationalError, TimeoutError):
                    self.answers.append((question, getattr(inspect, question)() or {}))
