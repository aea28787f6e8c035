"""The span context of a message is found among whatever else its headers hold."""

from typing import Any, Final
from unittest import TestCase

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.spans.context import NO_CONTEXT, Destination, context_in
from kp_scorer.spans.recording import SpanRecording
from opentelemetry.sdk.trace import TracerProvider

IDS: Final = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
PARENT: Final = f"00-{IDS}-01"
MEMBER: Final = st.from_regex(r"\A[ \t]?[a-z][a-z0-9@_*/-]{0,9}=[ -~\t]{1,9}\Z")
"""A member of a tracestate, or text that is nearly one."""
TRACER: Final = TracerProvider(shutdown_on_exit=False).get_tracer("test")


@pytest.mark.parametrize(
    "state", ["", "shop=42", "shop=42,other@one=a:b;c", "shop=42, other=two words\t, a= b", "a=1" + ",b=2" * 31]
)
def test_valid_headers_are_a_context(state: str) -> None:
    headers = {"traceparent": PARENT, **({"tracestate": state} if state else {})}
    assert context_in({"task": "score_trace", **headers}) == headers


@pytest.mark.parametrize(
    "parent",
    [
        *(None, 5, b"x", [PARENT], {PARENT: PARENT}, "", "?", PARENT * 2, f"{PARENT},{PARENT}", f" {PARENT}", f"{PARENT}\n"),
        *(PARENT.upper(), f"ff-{IDS}-01", f"00-{IDS}", f"{PARENT}-more", "0" * 1_000_000),
        *(f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01"),
    ],
)
def test_invalid_headers_give_no_context(parent: Any) -> None:
    assert context_in({"traceparent": parent, "tracestate": "shop=42"}) == NO_CONTEXT


@pytest.mark.parametrize(
    "state",
    [
        *(5, ["shop=42"], "shop", "=", "shop=4=2", "Shop=1", "a=\u00e9", "a=1\n", "a=1 "),
        *("a=1," * 9, "a=" + "1" * 999, "a=" + " " * 510),
    ],
)
def test_an_invalid_state_is_dropped_and_its_parent_kept(state: Any) -> None:
    assert context_in({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


@given(st.lists(MEMBER, min_size=1, max_size=4).map(",".join))
def test_opentelemetry_accepts_every_valid_context_without_a_warning(state: str) -> None:
    context = context_in({"traceparent": PARENT, "tracestate": state})
    with TestCase().assertNoLogs("opentelemetry"):
        SpanRecording(TRACER, context, 1.0, Destination("redis", "traces"))
