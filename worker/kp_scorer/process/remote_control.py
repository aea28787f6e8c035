"""Celery's remote control: what anyone who reaches the broker may ask a worker, and what only a setting lets them tell it.

The mailbox and its messages are Celery's, so that `celery inspect` and monitors work. Reading them is ours: Celery would
decompress and unpickle what it is sent, match regular expressions of strangers, and publish its reply wherever the sender says.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

import structlog
from celery.bootsteps import StartStopStep
from celery.utils.collections import AttributeDict
from celery.worker.control import Panel
from kombu.common import ignore_errors
from pydantic import BaseModel, ValidationError

from kp_scorer.broker.publishing import described
from kp_scorer.broker.redis_transport.mailbox import LARGEST_REQUEST_BYTES
from kp_scorer.logs import raised_at
from kp_scorer.process.replies import Replies, Reply

Answer = Callable[[Any], Any]

log = structlog.get_logger("kp_scorer.process.remote_control")


class _ReplyTo(BaseModel):
    routing_key: UUID


class _Request(BaseModel):
    """A message in the mailbox. One that selects workers by a pattern is none: a pattern can take for ever to match."""

    method: str
    arguments: dict[str, Any] | None = None
    destination: list[str] | None = None
    pattern: None = None
    reply_to: _ReplyTo | None = None
    ticket: UUID | None = None


class RemoteControl(StartStopStep):  # type: ignore[misc]  # celery ships no types
    """The step of the consumer that listens to the mailbox. Where the broker refuses the mailbox, the worker does without."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        """Take the consumer that the step is a part of; the other arguments are Celery's."""
        super().__init__(consumer, **kwargs)
        self._app = consumer.app
        self._hostname = consumer.hostname
        self._commands = _celerys_commands() if consumer.obeys_commands else {}
        # What Celery gives its commands.
        self._state = AttributeDict(app=self._app, hostname=self._hostname, consumer=consumer, tset=set)
        self._replies = Replies(consumer.app)
        self._channel: Any = None

    def include_if(self, consumer: Any) -> bool:
        """Whether the broker can send to all workers at once."""
        return bool(consumer.app.conf.worker_enable_remote_control and consumer.conninfo.supports_exchange_type("fanout"))

    def start(self, consumer: Any) -> None:
        """Begin to listen."""
        try:
            self._channel = consumer.connection.channel()
            # py-amqp would decode the body by any codec that the sender names.
            self._channel.auto_decode = False
            queue = self._app.control.mailbox.get_queue(self._hostname)(self._channel)
            queue.declare()
            queue.consume("remote control", self._received, no_ack=True)
        except consumer.channel_errors as error:
            # As Redis does when it is full.
            log.warning("remote_control_unavailable", detail=described(error))

    def stop(self, consumer: Any) -> None:
        """Listen no more."""
        if self._channel is not None:
            ignore_errors(consumer, self._channel.close)
            self._channel = None

    shutdown = terminate = stop

    def _received(self, message: Any) -> None:
        """Do what a message asks for, whatever it holds, and whatever fails: an error here would end the worker."""
        try:
            request = _parsed(message.body)
            if not request.destination or self._hostname in request.destination:
                self._answer(request)
        except ValidationError:
            log.warning("control_message_ignored")
        except Exception as error:
            log.warning("control_message_failed", detail=type(error).__name__, where=raised_at(error))

    def _answer(self, request: _Request) -> None:
        name = request.method
        if name in _QUESTIONS:
            answer = _QUESTIONS[name](self._state)
        elif name in self._commands:
            answer = self._obey(name, request.arguments or {})
        else:
            # No name but Celery's is logged: a stranger chose it.
            log.warning("command_refused", command=name if name in Panel.data else "unknown")
            answer = {"error": "refused: this worker answers questions; worker.obey_commands makes it obey commands"}
        if request.reply_to:
            self._replies.put(Reply({self._hostname: answer}, request.reply_to.routing_key, request.ticket))

    def _obey(self, name: str, arguments: dict[str, Any]) -> Any:
        log.warning("command_obeyed", command=name)
        try:
            return self._commands[name](self._state, **arguments)
        except Exception as error:
            return {"error": type(error).__name__}


def _parsed(body: str | bytes) -> _Request:
    """Read the body of a message, which may be anything.

    Raises:
        ValidationError: it is no request.
    """
    return _Request.model_validate_json(body if len(body) <= LARGEST_REQUEST_BYTES else b"")


def _celerys_commands() -> dict[str, Callable[..., Any]]:
    """Those that change a worker."""
    return {name: Panel.data[name] for name, info in Panel.meta.items() if info.type == "control"}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that can hold no secret: neither URLs nor objects, whose text may contain one."""
    return {name: value for name, value in values.items() if isinstance(value, str | int | float) and "://" not in str(value)}


def _without_arguments(request: Mapping[str, Any]) -> dict[str, Any]:
    """What Celery says about a task in hand, without its trace."""
    shown = ("id", "name", "hostname", "time_start", "acknowledged", "worker_pid")
    return {"args": "", "kwargs": ""} | {name: request[name] for name in shown}


def _conf(state: Any) -> dict[str, Any]:
    return _plain(state.app.conf.table())


def _stats(state: Any) -> dict[str, Any]:
    stats: dict[str, Any] = Panel.data["stats"](state)
    return stats | {"broker": _plain(stats["broker"])}


def _active(state: Any) -> list[dict[str, Any]]:
    return [_without_arguments(request) for request in Panel.data["active"](state)]


def _reserved(state: Any) -> list[dict[str, Any]]:
    return [_without_arguments(request) for request in Panel.data["reserved"](state)]


def _scheduled(state: Any) -> list[dict[str, Any]]:
    return [waiting | {"request": _without_arguments(waiting["request"])} for waiting in Panel.data["scheduled"](state)]


_QUESTIONS: Final[Mapping[str, Answer]] = {
    # None takes an argument. Celery counts more among them, of which `hello` revokes tasks and `objgraph` writes a file.
    **{name: Panel.data[name] for name in ("active_queues", "clock", "ping", "registered", "revoked")},
    "active": _active,
    "conf": _conf,
    "reserved": _reserved,
    "scheduled": _scheduled,
    "stats": _stats,
}
