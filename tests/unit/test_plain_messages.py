"""A message is a call of the task, or a bare trace without an envelope or a call; anything else is refused."""

import json
import zlib
from typing import Any, Final

import pytest
from kombu.message import Message
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.wire import TASK_NAME, ListItem, arguments_in, only_argument, open_item, submission_in
from kp_scorer.decoding import decode_trace, loads
from kp_scorer.errors import InvalidTrace

from tests.support.builders import LIMITS, maximal_payload, minimal_payload
from tests.support.costly import filled

TRACE: Final = maximal_payload()


def message(body: Any, headers: dict[str, Any] | None = None, **properties: Any) -> Message:
    """Return a kombu message with this body, which is written as JSON unless it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Message(
        body=raw, content_type="application/json", headers=headers or {}, delivery_info={}, properties=dict(properties)
    )


def submission(body: Any, headers: dict[str, Any] | None = None) -> Any:
    return only_argument(*arguments_in(message(body, headers), LIMITS))


@pytest.mark.parametrize(
    "beside",
    [{}, {"args": 1}, {"kwargs": {}, "args": [[], {}]}, {"body": "", "properties": {}}, {"headers": {"task": "other"}}],
)
@pytest.mark.parametrize("trace", [TRACE, minimal_payload()])
def test_a_trace_is_a_submission_whatever_fields_it_has_beside_its_own(trace: dict[str, Any], beside: dict[str, Any]) -> None:
    payload = trace | beside
    assert submission(payload) == payload
    assert decode_trace(submission(payload), LIMITS)


@pytest.mark.parametrize("body", [{}, {"trace": TRACE}, {"id": "no id"}, TRACE | {"task": "count"}, {"task": TRACE["task"]}])
def test_an_object_that_calls_no_task_is_a_submission_with_its_own_errors(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidTrace, match=r"id|task"):
        decode_trace(submission(body), LIMITS)


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
def test_a_call_of_another_task_or_a_body_that_is_no_object_is_no_submission(body: Any, headers: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|not JSON: Expecting .* at line 1 column"):
        submission(body, headers)


def test_a_call_of_the_task_has_a_submission_by_either_protocol() -> None:
    assert submission({"task": TASK_NAME, "id": "1", "args": [TRACE], "kwargs": {}}) == TRACE
    assert submission([[TRACE], {}, None], {"task": TASK_NAME, "id": "1"}) == TRACE


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
        submission(body, packed)
    with pytest.raises(ValueError, match=f"task: expected {TASK_NAME}"):
        submission(body, {"task": "other", **packed})


def test_a_content_type_other_than_json_is_no_submission() -> None:
    with pytest.raises(ValueError, match="content type"):
        arguments_in(Message(body=b"{}", content_type="text/plain", headers={}, delivery_info={}), LIMITS)


@pytest.mark.parametrize(
    "item",
    [
        json.dumps(TRACE),
        json.dumps(TRACE | {"body": "", "properties": {}}),
        json.dumps({"properties": {"body_encoding": "base64"}}),
        "{}",
        filled("unknown", "0", 5_000).decode(),
        "not JSON",
    ],
)
def test_an_object_that_is_no_envelope_is_a_body(item: str) -> None:
    assert open_item(item.encode())[:3] == ("application/json", {}, item.encode())


def test_an_envelope_is_opened() -> None:
    headers = {"task": TASK_NAME}
    item = {"body": "7", "content-type": "text/plain", "headers": headers, "properties": {}}
    assert open_item(json.dumps(item).encode()) == ListItem("text/plain", headers, b"7")


@pytest.mark.parametrize("item", [b"7", b"[]", b'{"body": 1, "properties": {}}'])
def test_an_item_that_is_neither_envelope_nor_object_is_refused(item: bytes) -> None:
    with pytest.raises((AttributeError, TypeError, ValueError)):
        open_item(item)


@pytest.mark.parametrize("delivered", ["in an envelope", "plain on a list", "poison"])
def test_a_body_is_parsed_once_and_not_held(delivered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def watched(raw: bytes) -> Any:
        parsed.append(raw)
        return loads(raw)

    monkeypatch.setattr("kp_scorer.broker.wire.loads", watched)
    body = json.dumps(TRACE).encode()
    received = message(body, **(open_item(body).parsed if delivered == "plain on a list" else {}))
    if delivered == "poison":
        assert submission_in(received, LIMITS) == body
    else:
        assert only_argument(*arguments_in(received, LIMITS)) == TRACE
        assert received.properties == {}
    assert parsed == [body]
