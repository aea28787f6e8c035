"""Spans as other stores keep them, one a row or all in the object of their trace: by what their fields are called.

LangSmith's runs, Opik, Braintrust, Weave, MLflow, Phoenix's pages and tables, and traces of OpenAI's Agents SDK have the ids of
a trace, of a span and of the one around it, a kind, times, and an input and an output, or the attributes of OpenTelemetry.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, microseconds, moment, time_of, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.formats import langfuse, otel
from kp_scorer.adapters.node import Node, objects_in, spelt

_TRACES: Final = ("traceid", "contexttraceid", "rootspanid")
_SPANS: Final = ("spanid", "contextspanid", "id")
_PARENTS: Final = ("parentspanid", "parentrunid", "parentid", "spanparents")
_KINDS: Final = ("runtype", "spantype", "spankind", "type")
_STARTS: Final = ("starttimeunixnano", "starttime", "startedat", "created")
_ENDS: Final = ("endtimeunixnano", "endtime", "endedat")
_HOLDERS: Final = ("spans", "runs", "data", "child_runs", "trace", "traces")
_OWN_FIELDS: Final = frozenset({"parentrunid", "parentspanid", "spanparents", "spandata", "runtype", "opname"})
"""Of these fields a row has at least one; other records may have a trace id too."""


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a row, or holds the rows of a trace."""
    if langfuse.fits(value) or otel.fits(value):
        return False
    return _is_row(value) or value.get("object") == "trace" or any(map(_holds_rows, _within(value)))


def _holds_rows(value: object) -> bool:
    items = objects_in(value)[:1] or objects_in([value])
    return any(_is_row(item) or otel.fits(item) or _holds_rows_of(item) for item in items)


def _holds_rows_of(item: dict[str, Any]) -> bool:
    return any(_is_row(row) or otel.fits(row) for key in _HOLDERS for row in objects_in(item.get(key))[:1])


def _within(value: dict[str, Any]) -> list[Any]:
    return [value[key] for key in _HOLDERS if isinstance(value.get(key), dict | list)]


def _is_row(value: dict[str, Any]) -> bool:
    names = spelt(value)
    has_ids = any(value.get(names.get(key, "")) for key in _TRACES) and any(key in names for key in _SPANS)
    return has_ids and (bool(_OWN_FIELDS & set(names)) or "contextspanid" in names or value.get("type") in ("llm", "tool"))


def records(source: Node) -> list[Node]:
    """Return the spans in a source, as those of Langfuse, or as those of OpenTelemetry if they have attributes."""
    return [row for each in source.each() for row in _rows(each, "")]


def _rows(node: Node, own_trace: str) -> Iterator[Node]:
    value = node.object()
    if otel.fits(value):
        yield from otel.records(node)
        return
    inner = [(key, node.at(key)) for key in _HOLDERS if isinstance(value.get(key), dict | list) and _holds_rows(value[key])]
    if _is_row(value):
        yield _row(node)
    elif inner and "input" in value and isinstance(value.get("id"), str):
        # A trace has the input and the output of the whole run.
        own_trace = value["id"]
        yield _row(node._replace(value=value | {"trace_id": own_trace, "type": "agent", "parent_id": None}))
    for _, rows in inner:
        for row in rows.each():
            yield from _rows(row, own_trace)


def _row(node: Node) -> Node:
    value, names = node.object(), spelt(node.object())
    data = value["span_data"] if isinstance(value.get("span_data"), dict) else {}
    named = value["span_attributes"] if isinstance(value.get("span_attributes"), dict) else {}
    parent = node.like(*_PARENTS).value
    ids = [node.like(*_TRACES).value, node.like(*_SPANS).value, parent[0] if isinstance(parent, list) and parent else parent]
    own: dict[str, Any] = dict(zip(("traceId", "spanId", "parentSpanId"), ids, strict=True))
    if "starttimeunixnano" in names or any(key.startswith("attributes") for key in value):
        return node._replace(value=own | _times_of(node) | _attributes_of(value))
    kind = next((kind for each in (data, named) if isinstance(kind := each.get("type"), str)), node.like(*_KINDS).value)
    name = str(data.get("name") or named.get("name") or node.like("name", "opname").value or "")
    error = node.first("error", "exception", "error_info").value
    put = {key: data.get(key, node.like(key, f"{key}s").value) for key in ("input", "output")}
    is_model = isinstance(put["input"], dict) and "messages" in put["input"] and "type" not in names and "runtype" not in names
    fields = {
        "id": own["spanId"],
        "traceId": own["traceId"],
        "parentObservationId": own["parentSpanId"],
        "type": kind if isinstance(kind, str) else "llm" if is_model else "span",
        "name": name.rpartition("/")[2].partition(":")[0] or name,
        "level": "ERROR" if error else None,
        "statusMessage": error if isinstance(error, str) else None,
    }
    return node._replace(value=value | fields | put | {"startTime": _time(node, _STARTS), "endTime": _time(node, _ENDS)})


def _time(node: Node, keys: Sequence[str]) -> str | None:
    return time_of(node.like(*keys))


def _times_of(node: Node) -> dict[str, Any]:
    times = {"startTimeUnixNano": _time(node, _STARTS), "endTimeUnixNano": _time(node, _ENDS)}
    return {key: microseconds(node._replace(value=time)) * 1_000 if time else None for key, time in times.items()}


def _attributes_of(value: dict[str, Any]) -> dict[str, Any]:
    """Return the name, the status and the attributes of a row, whose columns may be attributes."""
    columns = {key.removeprefix("attributes."): each for key, each in value.items() if key.startswith("attributes.")}
    attributes = value["attributes"] if isinstance(value.get("attributes"), dict) else columns
    kind = {"openinference.span.kind": value["span_kind"]} if isinstance(value.get("span_kind"), str) else {}
    code = value.get("status_code") or (value["status"].get("code") if isinstance(value.get("status"), dict) else None)
    status = {"code": f"STATUS_CODE_{str(code).removeprefix('STATUS_CODE_')}", "message": value.get("status_message")}
    return {
        "name": value.get("name"),
        "attributes": kind | otel.flat(attributes),
        "status": status,
        "events": value.get("events"),
    }


def run_id(row: Node) -> str:
    """Return the id of the trace of a row."""
    return row.at("traceId").required_text()


def run(own_id: str, rows: Sequence[Node]) -> Run | list[Run]:
    """Make a run of the rows of one trace."""
    spans = [row for row in rows if "attributes" in row.object()]
    if spans:
        made = otel.run(own_id, spans)
    else:
        # Some stores leave times out. The order of their rows is then that of the run.
        base = next((microseconds(row.at("startTime")) for row in rows if row.at("startTime").value), 0)
        made = langfuse.run(own_id, [_timed(row, base + number) for number, row in enumerate(rows)])
    runs = made if isinstance(made, list) else [made]
    several = len(runs) > 1
    return [
        each._replace(trace_id=trace_id("span-rows", f"{own_id}:{n}" if several else own_id, n)) for n, each in enumerate(runs)
    ]


def _timed(row: Node, default_us: int) -> Node:
    time = row.at("startTime").value or moment(row, default_us)
    return row._replace(value=row.object() | {"startTime": time, "endTime": row.at("endTime").value or time})


FORMAT = Format(fits, run, records, run_id, is_of_one_file=True)
