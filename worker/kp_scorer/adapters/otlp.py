"""Spans as the OpenTelemetry protocol writes them in JSON: where they are, their attributes, their times."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.pieces import Called, Returned, text_in
from kp_scorer.adapters.source import Node

_MOST_DIGITS: Final = 19
"""Of a time in nanoseconds that 64 bits can hold."""
_ERROR: Final = (2, "STATUS_CODE_ERROR")


class Attributes(NamedTuple):
    """The attributes of a span, or of an event."""

    node: Node
    """Where they stand."""
    values: Mapping[str, Any]

    def at(self, key: str) -> Node:
        """The value of an attribute; None if there is none."""
        return Node(self.node.line, self.node.below(key), self.values.get(key))


def spans_in(source: Node) -> Iterator[Node]:
    """The spans of an export, or of a list of them, in the order in which they stand; raises NotConverted if it is none."""
    for export in source.items() if isinstance(source.value, list) else [source]:
        resources = export.at("resourceSpans")
        if resources.value is None:
            raise resources.refusal("expected the list that an export of spans has")
        for resource in resources.items():
            for scope in resource.at("scopeSpans").items():
                yield from scope.at("spans").items()


def attributes_of(holder: Node) -> Attributes:
    """The attributes of a span, or of an event; raises NotConverted for what is no key with a value."""
    pairs = holder.at("attributes")
    return Attributes(pairs, {pair.at("key").required_text(): _any_value(pair.at("value")) for pair in pairs.items()})


def nanoseconds(node: Node) -> int:
    """A time since 1970, which is a text of digits, or a number."""
    text = str(node.value) if isinstance(node.value, str | int) and not isinstance(node.value, bool) else ""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise node.refusal("expected nanoseconds since 1970")
    return int(text)


def is_failed(span: Node) -> bool:
    """Whether the status of a span is that it contains an error."""
    status = span.at("status")
    return status.value is not None and status.at("code").value in _ERROR


def call_of(span: Node, name: str, call_id: str, arguments: Node) -> Called:
    """The span of a tool, as a call of it that took so long."""
    latency_ns = ended(span) - nanoseconds(span.at("startTimeUnixNano"))
    return Called(span, name, arguments.value, call_id, latency_ms=max(0, latency_ns) / 1_000_000)


def results_of(span: Node, attributes: Attributes, result: Node) -> list[Returned]:
    """What the span of a tool says of its result, or of its error; nothing if contents were not recorded."""
    has_failed = is_failed(span) or attributes.at("error.type").value is not None
    text = text_in(result.value) or (_failure_of(span) if has_failed else "")
    return [Returned(span, text, is_error=has_failed)] if text or has_failed else []


def ended(span: Node) -> int:
    """When a span ended; if that is missing, when it started."""
    return nanoseconds(span.first("endTimeUnixNano", "startTimeUnixNano"))


def _failure_of(span: Node) -> str:
    """What a failed span says of its error: the message of its status, or that of the exception that it recorded."""
    message = span.at("status").value and span.at("status", "message").text()
    for event in span.at("events").items():
        if not message and event.at("name").value == "exception":
            message = attributes_of(event).at("exception.message").text()
    return message or ""


def _any_value(node: Node) -> Any:
    """The JSON that a value stands for: one of seven kinds, each under a name of its own; none of them is null."""
    if node.value is None:
        return None
    match next(iter(node.object()), None):
        case None:
            return None
        case "stringValue" | "boolValue" | "doubleValue" | "bytesValue" as kind:
            return node.at(kind).value
        case "intValue":
            return _integer(node.at("intValue"))
        case "arrayValue":
            return [_any_value(item) for item in node.at("arrayValue", "values").items()]
        case "kvlistValue":
            pairs = node.at("kvlistValue", "values").items()
            return {pair.at("key").text(): _any_value(pair.at("value")) for pair in pairs}
    raise node.refusal("expected a value with its kind: stringValue, intValue and the like")


def _integer(node: Node) -> int:
    # It has 64 bits, more than a number in JSON holds everywhere, so it is written as a text.
    digits = str(node.value).removeprefix("-") if isinstance(node.value, str | int) else ""
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise node.refusal("expected an integer of 64 bits")
    return int(node.value)
