"""Reads the attributes of spans: their values, and their meanings, which the ends of their names show in any dialect.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ specifies ``gen_ai.*``, and
https://arize-ai.github.io/openinference/spec/semantic_conventions.html OpenInference.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from kp_scorer.adapters.node import MOST_DEPTH, Node, objects_in

SERVICE: Final = "service.name"  # The attribute of a resource that names the agent.
_MOST_DIGITS: Final = 19  # A number of 64 bits has no more. OTLP writes it as a text: JSON's numbers are less exact.
_MEANINGS: Final = {  # Attributes by meaning: patterns for the ends of their names, the preferred ones first.
    "kind": (r"row\.kind", r"gen_ai\.operation\.name", r"span\.kind", r"span\.?type", r"observation\.type", r"subtype"),
    "tool": (r"gen_ai\.tool\.name", r"toolCall\.name", r"tool\.name", r"traceloop\.entity\.name"),
    "call id": (r"tool\.call\.id", r"toolCall\.id", r"tool\.(?:call_)?id"),
    "arguments": (r"tool\.(?:call\.)?arguments", r"toolCall\.args", r"tool\.args", r"tool_arguments", r"tool_call_args"),
    "result": (r"tool\.call\.result", r"toolCall\.result", r"tool_response", r"tool\.(?:output|result)"),
    "input": (
        r"input\.value",
        r"prompt\.messages",
        r"(?:span)?inputs?",
        "prompt",
        "llm_request",
        "crew_tasks",
        r"task\.description",
    ),
    "output": (r"output\.value", r"response\.object", r"(?:span)?outputs?", "completion", "llm_response"),
    "failure": (r"error\.message", r"status_message"),
    "failed": (r"error\.type", r"error\.message", r"observation\.level", r"tool\.status"),
    "model": (
        r"request\.model",
        r"llm\.model_name",
        r"prompt\.messages",
        r"gen_ai\.(?:(?:prompt|completion)\..*|(?:in|out)put\.messages)",
    ),
}
_ENDS: Final = {
    name: [re.compile(rf"(?!.*token)(?:.*[._:])?{end}", re.IGNORECASE) for end in ends] for name, ends in _MEANINGS.items()
}
_REDACTED: Final = "__REDACTED__"  # OpenInference writes this in place of values that are not to be recorded.


@lru_cache(maxsize=4_096)
def _rank(meaning: str, attribute: str) -> int | None:
    """Return the rank of an attribute among those with a meaning, the preferred ones first; None if it has another meaning."""
    return next((rank for rank, end in enumerate(_ENDS[meaning]) if end.fullmatch(attribute)), None)


def values_of(attributes: Node, meaning: str) -> list[Node]:
    """Return the attributes with a meaning that are not empty, the preferred ones first."""
    ranks = {key: rank for key in attributes.value if (rank := _rank(meaning, key)) is not None}
    nodes = (attributes.at(key) for key in sorted(ranks, key=ranks.__getitem__))
    return [node for node in nodes if isinstance(node.value, str | list | dict) and node.value not in ("", [])]


def value_of(attributes: Node, meaning: str) -> Node:
    """Return the preferred attribute with a meaning; a node without a value if there is none."""
    return next(iter(values_of(attributes, meaning)), attributes._replace(value=None))


def attributes_of(holder: Node) -> Node:
    """Return the attributes of a span, a resource or an event as an object; OTLP writes them as pairs of key and value."""
    pairs = holder.at("attributes")
    if isinstance(pairs.value, dict):
        return pairs
    values = {pair.at("key").required_text(): any_value(pair.at("value")) for pair in pairs.items()}
    return pairs._replace(value={key: value for key, value in values.items() if value != _REDACTED})


def any_value(node: Node) -> Any:
    """Return an attribute's value as JSON, null for an empty one; raise NotConverted if OTLP has no such kind of value."""
    kind = next(iter(node.object()), None) if node.value is not None else None
    match kind:
        case None:
            return None
        case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
            return node.at(kind).value
        case "intValue":
            return integer(node.at(kind), "an integer of 64 bits", sign="-")
        case "arrayValue":
            return [any_value(item) for item in node.at(kind, "values").items()]
        case "kvlistValue":
            return {pair.at("key").text(): any_value(pair.at("value")) for pair in node.at(kind, "values").items()}
    raise node.refusal("expected a value with its kind: stringValue, intValue and the like")


def integer(node: Node, expected: str = "nanoseconds since 1970", sign: str = "") -> int:
    """Return an integer of 64 bits, which may be written as a text; raise NotConverted for anything else."""
    text = str(node.value) if isinstance(node.value, str | int) else ""
    digits = text.removeprefix(sign)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise node.refusal(f"expected {expected}")
    return int(text)


def normalized_id(node: Node) -> str:
    """Return an id in lower case if it is hexadecimal; in base64, which Protobuf's own JSON uses for bytes, case matters."""
    return text if (text := node.text()).endswith("=") else text.lower()


def messages_of_paths(attributes: Node, direction: str) -> Iterator[Node]:
    """Yield the messages of OpenInference and OpenLLMetry, whose attributes are paths: ``llm.input_messages.0.message``."""
    for key in (f"llm.{direction}_messages", "gen_ai.prompt" if direction == "input" else "gen_ai.completion"):
        keys = [each for each in attributes.value if each.startswith(f"{key}.") and each.count(".") < MOST_DEPTH]
        items = _nested({each.removeprefix(f"{key}."): attributes.at(each).value for each in keys})
        for number, item in enumerate(items if isinstance(items, list) else []):
            place = attributes._replace(path=f"{attributes.path}.{key}.{number}", value=item)
            message = place.at("message") if "message" in place.object() else place
            fields = {"role": "assistant"} | message.object() if direction == "output" else dict(message.object())
            fields["tool_calls"] = [call.get("tool_call", call) for call in objects_in(fields.get("tool_calls"))]
            # Calls may be among the contents, too.
            contents = objects_in(fields.pop("contents", None))
            blocks = [each if "tool_call" in each else each.get("message_content") for each in contents]
            fields.setdefault("content", [each for each in objects_in(blocks) if {"tool_call", "text"} & set(each)])
            if name := fields.get("function_call_name"):
                fields["function_call"] = {"name": name, "arguments": fields.get("function_call_arguments_json")}
            yield message._replace(value=fields)


def _nested(paths: dict[str, Any]) -> Any:
    """Return the object that paths and their values describe; a list if the paths begin with numbers."""
    groups: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for path, value in paths.items():
        key, _, inner_path = path.partition(".")
        groups[key][inner_path] = value
    items = {key: inner[""] if "" in inner else _nested(inner) for key, inner in groups.items()}
    is_list = bool(items) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in items)
    return [items[key] for key in sorted(items, key=int)] if is_list else items


def attributes_of_run(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the attributes of a run in OTLP's JSON. The root wins over other spans, and a span over its resource."""
    root_last = sorted(spans, key=lambda span: not span.get("parentSpanId"))
    pairs = (pair for span in root_last for pair in span["attributes"] if isinstance(pair, dict))
    values = {str(pair.get("key")): pair.get("value") for pair in pairs}
    return {key: next(iter(value.values()), None) for key, value in values.items() if isinstance(value, dict)}
