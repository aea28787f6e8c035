"""Spans of other stores, one in each row or all in the object of their trace, recognised by the names of their fields.

LangSmith's runs, Opik, Braintrust, Weave, MLflow, Phoenix's pages and tables, and traces of OpenAI's Agents SDK have the ids of
a trace, a span and its parent, a kind, times, and an input and an output, or the attributes of OpenTelemetry.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.attributes import integer
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.columns import SPANS, TRACES, span_of_row
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.formats import langfuse, otel
from kp_scorer.adapters.node import Node, keys_by_plain_name, objects_in
from kp_scorer.adapters.span import Spans
from kp_scorer.adapters.timeline import run_of

_HOLDERS: Final = ("spans", "runs", "data", "child_runs", "trace", "traces")
_OWN_FIELDS: Final = frozenset({"contextspanid", "parentrunid", "parentspanid", "spanparents", "spandata", "runtype", "opname"})
"""A row has one of these fields, or an input and an output. A trace id is not enough: other records may have one."""


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a row, or holds the rows of a trace."""
    if langfuse.fits(value) or otel.fits(value):
        return False
    return value.get("object") == "trace" or _has_rows(value, 2)


def _has_rows(value: object, levels: int) -> bool:
    """Return whether a value is a row, or begins with one, or holds one within this many levels."""
    items = objects_in(value)[:1] or objects_in([value])
    if any(_is_row(item) or otel.fits(item) for item in items):
        return True
    return levels > 0 and any(_has_rows(item.get(key), levels - 1) for item in items for key in _HOLDERS)


def _is_row(value: dict[str, Any]) -> bool:
    names = keys_by_plain_name(value)
    has_ids = any(value.get(names.get(key, "")) for key in TRACES) and any(key in names for key in SPANS)
    is_own = bool(_OWN_FIELDS & set(names)) or {"inputs", "outputs"} <= set(names) or value.get("type") in ("llm", "tool")
    return (has_ids and is_own) or {"parentrunid", "runtype"} <= set(names)


def records(source: Node) -> list[Node]:
    """Return the spans in a source in the form of OpenTelemetry's protocol."""
    return [row for each in source.each() for row in _rows(each, "")]


def _rows(node: Node, own_trace: str) -> Iterator[Node]:
    value = node.object()
    if otel.fits(value):
        yield from otel.records(node)
        return
    inner = [node.at(key) for key in _HOLDERS if _has_rows(value.get(key), 1)]
    if _is_row(value):
        yield span_of_row(node)
    elif inner and "input" in value and isinstance(value.get("id"), str):
        # A trace has the input and the output of the whole run.
        own_trace = value["id"]
        yield span_of_row(node._replace(value=value | {"trace_id": own_trace, "type": "agent", "parent_id": None}))
    for rows in inner:
        for row in rows.each():
            yield from _rows(row, own_trace)


def run_id(row: Node) -> str:
    """Return the id of the trace of a row."""
    return row.at("traceId").required_text()


def run(own_id: str, rows: Sequence[Node]) -> Run | list[Run]:
    """Make a run of the rows of one trace. If a store leaves times out, the order of its rows is the order of the run."""
    # Spans in the form of the protocol may have their times as texts.
    base_ns = next((integer(time) for row in rows if (time := row.at("startTimeUnixNano")).value), 0)
    spans = Spans(_timed(row, base_ns + number * 1_000) for number, row in enumerate(rows))
    return run_of("span-rows", own_id, spans)


def _timed(row: Node, default_ns: int) -> Node:
    start_ns = row.at("startTimeUnixNano").value or default_ns
    return row._replace(
        value=row.object() | {"startTimeUnixNano": start_ns, "endTimeUnixNano": row.at("endTimeUnixNano").value or start_ns}
    )


FORMAT = Format(fits, run, records, run_id, is_of_one_file=True)
