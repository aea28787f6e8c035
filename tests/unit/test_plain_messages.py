"""A message may be the trace itself, with no envelope and no call around it; what is neither that nor a call is none."""

import json
import zlib
from typing import Any, Final

import pytest
from kombu.message import Message
from kp_scorer.broker.redis_transport.envelope import Opened, opened
from kp_scorer.broker.task_body import PACKED_BY
from kp_scorer.broker.task_message import TASK_NAME, TaskMessage, only_argument, task_in
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace

from tests.support.builders import LIMITS, maximal_payload, minimal_payload
from tests.support.costly import filled

TRACE: Final = maximal_payload()


def task(body: Any, headers: dict[str, Any] | None = None, limits: Limits = LIMITS) -> TaskMessage:
    """What goes on of a message with this body, which is JSON unless it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return task_in(Message(body=raw, content_type="application/json", headers=headers or {}, delivery_info={}), limits)


def submission(message: TaskMessage) -> Any:
    return only_argument(message.payload["args"], message.payload["kwargs"])


@pytest.mark.parametrize("payload", [TRACE, minimal_payload()])
def test_a_trace_is_a_submission_that_is_called_by_its_own_id(payload: dict[str, Any]) -> None:
    message = task(payload)
    assert submission(message) == payload
    assert message.headers["id"] == payload["id"]
    assert decode_trace(submission(message), LIMITS)


@pytest.mark.parametrize(
    "beside",
    [{"args": 1}, {"kwargs": {}, "args": [[], {}]}, {"body": "", "properties": {}}, {"headers": {"task": "other"}}],
)
def test_a_trace_may_have_any_fields_beside_its_own(beside: dict[str, Any]) -> None:
    assert submission(task(TRACE | beside)) == TRACE | beside


@pytest.mark.parametrize("body", [{}, {"trace": TRACE}, {"id": "no id"}, TRACE | {"task": "count"}, {"task": TRACE["task"]}])
def test_an_object_that_calls_no_task_is_a_submission_with_its_own_errors(body: dict[str, Any]) -> None:
    message = task(body)
    assert message.headers["id"]
    with pytest.raises(InvalidTrace, match=r"id|task"):
        decode_trace(submission(message), LIMITS)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (TRACE, {"task": "other"}),
        (TRACE, {"task": None}),
        (TRACE, {"task": TASK_NAME}),
        ({"task": "other", "args": [TRACE], "kwargs": {}}, {}),
        ({"task": "other"}, {}),
        ({"args": [TRACE]}, {}),
        ([TRACE], {}),
        ([[TRACE], {}, {}], {}),
        (b"{", {}),
        (b"null", {}),
        (b"", {}),
        (b"[" * 100_000, {}),
        (b"9" * 5_000, {}),
        (b"x" * 5_000_000, {}),
    ],
)
def test_what_names_another_task_or_is_no_object_is_no_submission(body: Any, headers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        task(body, headers)


def test_a_call_of_the_task_stays_one() -> None:
    assert submission(task({"task": TASK_NAME, "id": "1", "args": [TRACE], "kwargs": {}})) == TRACE
    assert task([[TRACE], {}, None], {"task": TASK_NAME, "id": "1"}).headers["id"] == "1"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b" \n" + json.dumps(TRACE).encode() + b" " * 5_000_000, "at most 1048576 bytes"),
        (filled("unknown", "0", LIMITS.values + 100), "at most 20100 values"),
        (b'{"": %s}' % (b"9" * 1_001), "numbers of at most 1000 digits"),
        (zlib.compress(filled("unknown", "{}", 30_000)), "at most 20100 values"),
    ],
)
def test_a_plain_body_is_bounded_before_it_is_parsed(body: bytes, expected: str) -> None:
    packed = {PACKED_BY: "gzip"} if body[:1] == b"x" else {}
    with pytest.raises(InvalidTrace, match=expected):
        task(body, packed)
    with pytest.raises(ValueError, match=f"task: expected {TASK_NAME}"):
        task(body, {"task": "other", **packed})


def test_what_has_only_its_type_in_common_with_json_is_no_submission() -> None:
    with pytest.raises(ValueError, match="content type"):
        task_in(Message(body=b"{}", content_type="text/plain", headers={}, delivery_info={}), LIMITS)


@pytest.mark.parametrize(
    "item",
    [
        json.dumps(TRACE),
        json.dumps(TRACE | {"body": "", "properties": {}}),
        json.dumps({"properties": {"body_encoding": "base64"}}),
        "{}",
        filled("unknown", "0", 5_000).decode(),
    ],
)
def test_an_object_that_is_no_envelope_is_a_body(item: str) -> None:
    assert opened(item.encode()) == Opened("application/json", {}, item.encode())


def test_an_envelope_is_opened() -> None:
    headers = {"task": TASK_NAME}
    item = {"body": "7", "content-type": "text/plain", "headers": headers, "properties": {}}
    assert opened(json.dumps(item).encode()) == Opened("text/plain", headers, b"7")


@pytest.mark.parametrize("item", [b"7", b"[]", b"not JSON", b'{"body": 1, "properties": {}}', b"\xff"])
def test_what_is_neither_is_told(item: bytes) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)):
        opened(item)
