"""Converts the row of any store to a span of OpenTelemetry's protocol, by the names of its fields.

Rows have the ids of a trace, a span and its parent, a kind, times, and an input and an output, or attributes.
"""

from collections.abc import Iterator
from typing import Any, Final

from kp_scorer.adapters.node import Node, objects_in, parsed
from kp_scorer.adapters.span import OWN_KIND
from kp_scorer.adapters.times import microseconds, time_of

# All of these are plain names of fields, as ``keys_by_plain_name`` makes them.
TRACES: Final = ("traceid", "contexttraceid", "rootspanid")
SPANS: Final = ("spanid", "contextspanid", "id")
_PARENTS: Final = ("parentspanid", "parentobservationid", "parentrunid", "parentid", "spanparents")
_KINDS: Final = ("runtype", "spantype", "spankind", "type")
_STARTS: Final = ("starttimeunixnano", "starttime", "startedat", "created", "timestamp")
_ENDS: Final = ("endtimeunixnano", "endtime", "endedat")
_ERRORS: Final = ("error", "exception", "errorinfo")
_ANSWERS: Final = {"choices", "generations", "candidates", "content", "message"}
_PATHS: Final = ("openinference", "llm", "gen_ai", "input", "output", "tool", "traceloop")
"""The beginnings of paths of attributes."""


def span_of_row(row: Node) -> Node:
    """Return a row as a span in the form of OpenTelemetry's protocol. A missing time stays None."""
    fields = row.object()
    if isinstance(context := fields.get("context"), dict) and "trace_id" in context:
        row = row._replace(value=fields | context)
    holders = row.at("metadata").parsed(), row.first("span_data", "span_attributes")
    metadata, named = (each.value if isinstance(each.value, dict) else {} for each in holders)
    parent = row.at_plain(*_PARENTS).value
    ids = {
        "traceId": row.at_plain(*TRACES).value,
        "spanId": row.at_plain(*SPANS).value,
        "parentSpanId": parent[0] if isinstance(parent, list) and parent else parent,
    }
    name = str(named.get("name") or row.at_plain("name", "opname").value or "")
    span = {
        **{key: each.removeprefix("0x") if isinstance(each, str) else each for key, each in ids.items()},
        **_times(row),
        "name": name.rpartition("/")[2].partition(":")[0] or name if "op_name" in fields else name,
        "status": _status(row),
        "attributes": _attributes(row, named, metadata),
        "scope": fields.get("scope") or metadata.get("scope"),
        "events": objects_in(fields.get("events")),
    }
    return row._replace(value=fields | span)


def _status(row: Node) -> dict[str, Any]:
    tags, state = (row.value[key] if isinstance(row.value.get(key), dict) else {} for key in ("tags", "status"))
    error = row.at_plain(*_ERRORS).value or tags.get("error")
    has_failed = error not in (None, False, "false", "") or row.at("level").value == "ERROR"
    code, message = (row.at_plain(name).value for name in ("statuscode", "statusmessage"))
    codes = code, state.get("code"), state.get("status_code"), tags.get("otel.status_code")
    texts = message, state.get("message"), state.get("description"), tags.get("otel.status_description"), error
    return {
        "code": "ERROR" if has_failed else str(next(filter(None, codes), "")).rpartition("_")[2],
        "message": next((text for text in texts if isinstance(text, str) and text), None),
    }


def _times(row: Node) -> dict[str, Any]:
    start_ns, end_ns = _time_ns(row, _STARTS), _time_ns(row, _ENDS)
    if end_ns is None and start_ns is not None and (duration_us := row.at("duration").number()) is not None:
        end_ns = start_ns + int(duration_us * 1_000)
    return {"startTimeUnixNano": start_ns, "endTimeUnixNano": end_ns}


def _time_ns(row: Node, names: tuple[str, ...]) -> int | None:
    time = time_of(place := row.at_plain(*names))
    return None if time is None else microseconds(place._replace(value=time)) * 1_000


def _attributes(row: Node, named: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a row, with its kind, its input and its output. Columns may be attributes themselves."""
    fields = row.object()
    columns = {key.removeprefix("attributes."): each for key, each in fields.items() if key.startswith("attributes.")}
    holders = (fields.get("attributes"), fields.get("tags"), metadata.get("attributes"))
    attributes = flattened(next((each for each in holders if isinstance(each, dict)), columns))
    got = {key: named.get(key, row.at_plain(key, f"{key}s").value) for key in ("input", "output")}
    kind = named.get("type", row.at_plain(*_KINDS).value)
    keys = [set(each) if isinstance(each := parsed(got[key]), dict) else set() for key in ("input", "output")]
    is_model = kind is None and "messages" in keys[0] and bool(_ANSWERS & keys[1])
    read = got | {OWN_KIND: "llm" if is_model else kind}
    return attributes | {key: each for key, each in read.items() if each is not None}


def flattened(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return attributes by dotted paths, because some stores turn such paths into nested objects and lists."""
    paths: dict[str, Any] = {}
    for key, value in attributes.items():
        is_path = isinstance(value, dict) and key in _PATHS
        if is_path or (key.startswith("llm.") and objects_in(value)):
            paths |= {f"{key}.{inner}": each for inner, each in _flat_items(value)}
        else:
            paths[key] = value
    return paths


def _flat_items(value: Any) -> Iterator[tuple[str, Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict) or objects_in(each):
            yield from ((f"{key}.{inner}", item) for inner, item in _flat_items(each))
        else:
            yield str(key), each
