"""What a submission's message holds, when it may hold anything: of all that a producer wrote, its id and its arguments go on.

A message calls the task as Celery's do, or it is plain: its body is the trace, and no header names a task.
"""

import json
import re
import uuid
from typing import Any, Final

from kombu.message import Message

from kp_scorer.broker.task_body import PACKED_BY, PACKED_BY_PRODUCER, argument_in, bounded_body, largest_body_bytes, raw_body
from kp_scorer.decoding import Limits, parse_json
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.store.keys import KEPT_S
from kp_scorer.trace import is_trace_id

TASK_NAME: Final = "score_trace"

DELIVERY_COUNT: Final = "x-delivery-count"
"""The header in which RabbitMQ, and our Redis transport, say how often a message was delivered before."""

SENT_MS: Final = "sent_ms"
"""The header in which our client says when it sent a message: Unix time by its own clock. Only figures come of it."""

_LATEST_MS: Final = 2**53

_TASK_ID: Final = re.compile(r"[!-~]{1,255}")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class TaskMessage(Message):  # type: ignore[misc]  # kombu ships no types
    """A submission as Celery gets to see it: all of it is ours but the id and the arguments, which were checked.

    Celery acts on much else that a producer may write: as headers tell it, it sends other tasks, stores, waits, drops and logs.
    """

    def __init__(self, sent: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Stand for the kombu message ``sent``; acknowledging the one acknowledges the other."""
        headers = {"task": TASK_NAME, "id": task_id, "argsrepr": "(trace,)", "kwargsrepr": "{}", "ignore_result": True}
        super().__init__(channel=sent.channel, delivery_tag=sent.delivery_tag, headers=headers)
        self.sent = sent
        self._arguments = {"args": args, "kwargs": kwargs}

    @property
    def payload(self) -> dict[str, Any]:
        """The body, in the form of which Celery knows that it is decoded."""
        return self._arguments


def task_in(message: Any, limits: Limits) -> TaskMessage:
    """What goes on of a kombu message that came by the queue of traces.

    Raises:
        InvalidTrace: it is too large to hold a valid trace, or has too many values, so it was not parsed.
        ValueError: it is no submission; says which part of it is not, without its content.
    """
    try:
        body = bounded_body(message, limits)
    except InvalidTrace:
        # It is not parsed, so only its headers and its first byte say whether it is a submission.
        if message.headers.get("task", TASK_NAME) != TASK_NAME or not ("task" in message.headers or _may_be_object(message)):
            raise ValueError(f"task: expected {TASK_NAME}") from None
        raise
    try:
        payload = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"body: expected JSON ({type(error).__name__})") from None
    if _is_plain(payload, message.headers):
        return TaskMessage(message, trace_id_of(payload) or str(uuid.uuid4()), [payload], {})
    # The first version of the protocol has in the body what the second has in the headers.
    names = {**payload, **message.headers} if isinstance(payload, dict) else message.headers
    if names.get("task") != TASK_NAME:
        raise ValueError(f"task: expected {TASK_NAME}")
    args, kwargs = _arguments_in(payload)
    task_id = names.get("id")
    named = isinstance(task_id, str) and _TASK_ID.fullmatch(task_id)
    return TaskMessage(message, str(task_id) if named else str(uuid.uuid4()), args, kwargs)


def call_headers(task: str, task_id: str, shown: str) -> dict[str, Any]:
    """The headers of Celery's message, protocol 2, that calls a task of any app; its logs show the arguments as ``shown``."""
    return {
        "lang": "py",
        "task": task,
        "id": task_id,
        "root_id": task_id,
        "parent_id": None,
        "group": None,
        "shadow": None,
        "eta": None,
        "expires": None,
        "retries": 0,
        "timelimit": [None, None],
        "argsrepr": shown,
        "kwargsrepr": "{}",
        "origin": "kp-scorer",
    }


def result_id(message: Any) -> str:
    """The id under which the producer of a kombu message waits for its end as the result of a Celery task; empty if for none.

    Only for a UUID, as Celery's own ids are: by any other the results of somebody else's calls could be forged.
    """
    task_id = message.headers.get("id")
    wanted = message.headers.get("ignore_result") is False and isinstance(task_id, str)
    return task_id if wanted and _UUID.fullmatch(task_id) else ""


def as_sent(headers: dict[str, Any]) -> dict[str, Any]:
    """The headers of a message as its producer wrote them, without what was counted since."""
    names = {PACKED_BY: PACKED_BY_PRODUCER}
    return {names.get(name, name): value for name, value in headers.items() if name != DELIVERY_COUNT}


def deliveries_by(message: Any) -> int:
    """How often a kombu message has been delivered, this time included; 1 where no one counted."""
    # In a message that is delivered for the first time, RabbitMQ leaves the count that a producer may have written.
    if not message.delivery_info.get("redelivered"):
        return 1
    count = message.headers.get(DELIVERY_COUNT)
    return count + 1 if isinstance(count, int) else 1


def queued_s(message: Any, taken_s: float) -> float | None:
    """How long a kombu message was on its queue that was taken at this Unix time; None if it does not say when it was sent."""
    sent_ms = message.headers.get(SENT_MS)
    # Anything may be there, and one absurd figure would spoil all means. By a clock that is ahead of ours it came at once.
    if type(sent_ms) is not int or not 0 < sent_ms < _LATEST_MS:
        return None
    waited_s = max(0.0, taken_s - sent_ms / 1_000)
    return waited_s if waited_s <= KEPT_S else None


def submission_in(message: Any, limits: Limits) -> bytes:
    """The submission in a message, as UTF-8 JSON; the body as it came if there is none.

    Of a plain message, and of one from our client, these are the very bytes that were submitted, whichever worker looks at it,
    and whether or not its limits let it parse the body: by its bytes a submission is known for the same.
    """
    try:
        body = bounded_body(message, limits)
    except InvalidTrace:
        return argument_in(raw_body(message))
    except ValueError:
        return raw_body(message)
    try:
        payload = json.loads(body.decode("utf-8"))
        if _is_plain(payload, message.headers):
            return body
        argument = only_argument(*_arguments_in(payload))
    except (InvalidTrace, ValueError, RecursionError):
        return raw_body(message)
    said = argument_in(body)
    return as_bytes(argument) if said == body else said


def parse_submission(submission: bytes, limits: Limits) -> object:
    """Parse what :func:`submission_in` gave, which may be larger than a trace, for its white space and its escapes.

    Raises:
        InvalidTrace: it is no JSON, or too large even so, or has too many values.
    """
    return parse_json(submission, limits.model_copy(update={"message_bytes": largest_body_bytes(limits)}))


def only_argument(args: Any, kwargs: Any) -> Any:
    """The trace among the arguments of a task: its only positional argument, or the one called ``trace``.

    Raises:
        InvalidTrace: there are other arguments, or none.
    """
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and list(kwargs) == ["trace"]:
        return kwargs["trace"]
    raise InvalidTrace([Problem("$", "expected the trace as the only argument of score_trace")])


def as_bytes(payload: Any) -> bytes:
    """A submission as the UTF-8 JSON that a dead letter keeps."""
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")


def trace_id_of(payload: Any) -> str:
    """The id of a submission that may be anything; empty unless it is one."""
    return checked_id(payload.get("id")) if isinstance(payload, dict) else ""


def checked_id(value: object) -> str:
    """The value if it is a trace id, else an empty string."""
    return value if is_trace_id(value) else ""


def _is_plain(payload: Any, headers: dict[str, Any]) -> bool:
    """Whether a parsed body is a submission itself, and not a call of the task.

    A trace has a ``task`` too, which is an object where a call has a name, and may have any fields beside its own; but no call
    has a trace's type.
    """
    if not isinstance(payload, dict) or "task" in headers:
        return False
    return "@type" in payload or not (payload.keys() & {"args", "kwargs"} or isinstance(payload.get("task"), str))


def _may_be_object(message: Any) -> bool:
    """Whether a body that is not parsed may be a JSON object; of one that is packed nothing is known."""
    return PACKED_BY in message.headers or raw_body(message).lstrip(b" \t\r\n").startswith(b"{")


def _arguments_in(payload: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a task in a parsed body: ``[args, kwargs, embed]``, or an object with them.

    Raises:
        ValueError: there are none, or not a list and an object.
    """
    match payload:
        case [list() as args, dict() as kwargs, _]:
            return args, kwargs
        # Of an object that has neither, a bare trace for instance, nothing would reach the task.
        case dict() if payload.keys() & {"args", "kwargs"}:
            args, kwargs = payload.get("args", []), payload.get("kwargs", {})
            if isinstance(args, list) and isinstance(kwargs, dict):
                return args, kwargs
    raise ValueError("arguments: expected a list and an object")
