"""Reads and writes messages: only this module and ``headers`` decide how to read what a producer wrote.

A message on the queue of traces calls the task as Celery's do, or is plain: its body is the trace, and no header names a task.
Of a call, only the arguments are used, after checks. On Redis a message is in kombu's envelope, or is plain.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.decoding import loads, parse_json
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits, check_values, compact_bytes
from kp_scorer.trace import is_submission_id

TASK_NAME: Final = "score_trace"

BEGINNING_BYTES: Final = 65_536  # Only this beginning of a message is delivered if the message is too large to be parsed.
CUT_MARK: Final = b"\xffcut\n"  # Precedes such a beginning on Redis. No JSON begins like this, so it is never parsed.

_PARSED: Final = "parsed"  # The property of a kombu message that holds its body once it is parsed, in this process alone.

# The values in a task's body besides the trace: lists of arguments, and Celery's options for callbacks.
_VALUES_AROUND: Final = 100
_BYTES_AROUND: Final = 65_536  # The bytes in a task's body besides the trace, and in an envelope besides its body.
_MOST_ENVELOPE_VALUES: Final = 1_000  # An envelope has some forty values, and its body is one of them.
_DEFLATE: Final = ("application/x-gzip", "gzip", "zlib")  # Celery's names for the compression of zlib.
_BEFORE_ARGUMENT: Final = b"[["
_BEHIND_ARGUMENT: Final = b"], {}, {}]"


def task_body(argument: bytes) -> bytes:
    """Return the body of Celery's message that calls a task with one argument, which is UTF-8 JSON."""
    return _BEFORE_ARGUMENT + argument + _BEHIND_ARGUMENT


def largest_message_bytes(limits: Limits) -> int:
    """Return the size in bytes up to which a message is parsed."""
    # A valid submission can be 8 times the limit, as escaped JSON within JSON in base64; and a slightly larger one still gets a
    # dead letter with the exact reason.
    return 16 * limits.message_bytes + _BYTES_AROUND


def largest_body_bytes(limits: Limits) -> int:
    """Return the size in bytes up to which a task's body is parsed: JSON may write two bytes of UTF-8 as six."""
    return 4 * limits.message_bytes + _BYTES_AROUND


class ListItem(NamedTuple):
    """The parts of a message on Redis that this package uses."""

    content_type: str
    headers: dict[str, Any]
    body: bytes
    parsed: Mapping[str, Any] = {}  # Properties for the kombu message, so that a plain body is not parsed again.


def open_item(item: bytes) -> ListItem:
    """Return the parts of a message in its envelope; a JSON object that is not an envelope is the body of a plain message.

    Raises errors of many types if an item is neither.
    """
    if item.startswith(CUT_MARK):
        # Do not parse a cut message, as it may look complete.
        return ListItem("application/octet-stream", {}, item.removeprefix(CUT_MARK))
    try:
        check_values(item, _MOST_ENVELOPE_VALUES)
        message = loads(item)
    except (InvalidTrace, ValueError):
        # The item has too many values for an envelope, or is not JSON. The reason is reported later, as for the body of any
        # message.
        return ListItem("application/json", {}, item)
    if not isinstance(message, dict):
        raise TypeError("neither an envelope nor a plain message")
    # A trace may have additional fields, but no envelope has a trace's type.
    if "@type" in message or not message.keys() >= {"body", "properties"}:
        return ListItem("application/json", {}, item, {_PARSED: message})
    body, encoding = message["body"].encode("utf-8", "surrogatepass"), message["properties"].get("body_encoding")
    if not body or encoding not in (None, "", "base64"):
        raise ValueError("an envelope without a body, or with one in an unknown encoding")
    # Limits in flight count only the bytes of bodies, so little may be around a body. If the item seems to have more, measure
    # it without the body, which JSON escapes may have made longer in the item.
    if len(item) - len(body) > _BYTES_AROUND and len(json.dumps({**message, "body": ""}, ensure_ascii=False)) > _BYTES_AROUND:
        raise ValueError("an envelope with too much around its body")
    if encoding == "base64":
        # By default, b64decode skips characters outside base64, and their bytes would be lost.
        body = base64.b64decode(body, validate=True)
    return ListItem(message["content-type"], {**(message.get("headers") or {})}, body)


def raw_body(message: Any) -> bytes:
    """Return the body of a kombu message, unchanged."""
    # Py-amqp 5.4.2 returns an empty body as str.
    return message.body.encode() if isinstance(message.body, str) else bytes(message.body)


def argument_in(body: bytes) -> bytes:
    """Return the argument in a body of :func:`task_body` without parsing it; a body of another form unchanged."""
    # If the body has several arguments, they are returned together, which is not JSON.
    is_ours = body.startswith(_BEFORE_ARGUMENT + b"{") and body.endswith(b"}" + _BEHIND_ARGUMENT)
    return body[len(_BEFORE_ARGUMENT) : -len(_BEHIND_ARGUMENT)] if is_ours else body


def _bounded_body(message: Any, limits: Limits) -> bytes:
    """Return the body of a message, unpacked but not parsed."""
    body, packed_by = raw_body(message), message.headers.get(PACKED_BY)
    if message.content_type != "application/json":
        raise ValueError("content type: expected application/json")
    largest_bytes = largest_body_bytes(limits)
    if packed_by:
        body = _unpacked(body, packed_by, largest_bytes)
    most_bytes, most_values = limits.message_bytes + _BYTES_AROUND, limits.values + _VALUES_AROUND
    if len(body) > largest_bytes or (len(body) > most_bytes and compact_bytes(body, most_values) > most_bytes):
        raise InvalidTrace.whole(f"expected at most {limits.message_bytes} bytes")
    check_values(body, most_values, limits.depth)
    return body


def _unpacked(body: bytes, packed_by: object, largest_bytes: int) -> bytes:
    """Unpack a body, at most one byte beyond ``largest_bytes``: it may unpack to a thousand times its size."""
    if packed_by not in _DEFLATE:
        raise ValueError(f"compression: expected {_DEFLATE[0]}, or none")
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(body, largest_bytes + 1)
    except zlib.error:
        raise ValueError(f"compression: expected {_DEFLATE[0]}") from None
    if len(unpacked) <= largest_bytes and not unpacking.eof:
        raise ValueError("compression: expected all of the body")
    return unpacked


def arguments_in(message: Any, limits: Limits) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments with which a kombu message on the queue of traces calls the task; a plain message's is its trace.

    Raises:
        InvalidTrace: the message is too large to hold a valid trace, or has too many values, so it was not parsed.
        ValueError: the message is not a submission; the error names the wrong part, without its content.
    """
    headers = message.headers
    try:
        _, payload, is_plain = _parse(message, limits)
    except InvalidTrace:
        # A packed body, or one that begins like JSON, may be a submission; more cannot be told without parsing it.
        may_be_plain = PACKED_BY in headers or raw_body(message).lstrip(b" \t\r\n").startswith(b"{")
        if headers.get("task", TASK_NAME) != TASK_NAME or not ("task" in headers or may_be_plain):
            raise ValueError(f"task: expected {TASK_NAME}") from None
        raise
    if is_plain:
        return [payload], {}
    # Protocol 1 has fields in the body that protocol 2 has in the headers.
    fields = {**payload, **headers} if isinstance(payload, dict) else headers
    if fields.get("task") != TASK_NAME:
        raise ValueError(f"task: expected {TASK_NAME}")
    return _arguments_of_call(payload)


def submission_in(message: Any, limits: Limits) -> bytes:
    """Return the submission in a message as UTF-8 JSON; the unchanged body if there is none."""
    # A plain message and one from our client yield the submitted bytes, in every worker and whatever its limits: submissions
    # are recognised by their bytes.
    try:
        body, payload, is_plain = _parse(message, limits)
    except InvalidTrace:
        return argument_in(raw_body(message))
    except ValueError:
        return raw_body(message)
    if is_plain:
        return body
    try:
        argument = only_argument(*_arguments_of_call(payload))
    except (InvalidTrace, ValueError):
        return raw_body(message)
    submitted = argument_in(body)
    return as_bytes(argument) if submitted == body else submitted


def _parse(message: Any, limits: Limits) -> tuple[bytes, Any, bool]:
    """Return the body of a message, unpacked and parsed, and whether it is plain: a submission itself, and no call of a task.

    A trace has a ``task`` too, but there it is an object, and in a call it is a name. A trace may have additional fields, but
    no call has a trace's type.
    """
    # A parsed body takes ten times its size, so a message in flight does not keep it.
    payload = message.properties.pop(_PARSED, None)
    body = _bounded_body(message, limits)
    if payload is None:
        try:
            payload = loads(body)
        except json.JSONDecodeError as error:
            raise ValueError(f"body: not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
        except ValueError as error:
            raise ValueError(f"body: expected JSON ({type(error).__name__})") from None
    if not isinstance(payload, dict) or "task" in message.headers:
        return body, payload, False
    is_call = payload.keys() & {"args", "kwargs"} or isinstance(payload.get("task"), str)
    return body, payload, "@type" in payload or not is_call


def _arguments_of_call(payload: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call ``[args, kwargs, embed]``, or of an object that has them."""
    match payload:
        case [list() as args, dict() as kwargs, _]:
            return args, kwargs
        case dict() as call:
            args, kwargs = call.get("args", []), call.get("kwargs", {})
            if call.keys() & {"args", "kwargs"} and isinstance(args, list) and isinstance(kwargs, dict):
                return args, kwargs
    raise ValueError("arguments: expected a list and an object")


def parse_submission(submission: bytes, limits: Limits) -> object:
    """Parse a submission from :func:`submission_in`, which white space and escapes may make larger than a trace.

    Raises InvalidTrace if it is not JSON, is still too large, or has too many values.
    """
    return parse_json(submission, limits.model_copy(update={"message_bytes": largest_body_bytes(limits)}))


def only_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a task's only argument, the trace, by position or as ``trace``; raise InvalidTrace if there is none, or more."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and list(kwargs) == ["trace"]:
        return kwargs["trace"]
    raise InvalidTrace.whole("expected the trace as the only argument of score_trace")


def as_bytes(payload: Any) -> bytes:
    """Return a submission as the UTF-8 JSON that a dead letter keeps."""
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")


def trace_id_of(payload: Any) -> str:
    """Return the trace id in a submission of any type; empty if there is no valid one."""
    return checked_id(payload.get("id")) if isinstance(payload, dict) else ""


def checked_id(value: object) -> str:
    """Return the value if it is the id of a trace or a late outcome, and otherwise an empty string."""
    return value if is_submission_id(value) else ""
