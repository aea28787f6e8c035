"""Langfuse's exports: traces with their observations, or observations alone.

A source is a trace with ``observations``, as the API has it; an object with ``trace`` and ``observations``, as the download of
a trace has it; one observation, as the rows of the tables' and of the blob storage's exports are; a page of any (``data``); or
a list of any. All observations of one trace id, wherever they stand in the input, are one run.

Specifications: https://langfuse.com/docs/observability/data-model and
https://langfuse.com/docs/observability/features/observation-types for what they mean,
https://cloud.langfuse.com/generated/api/openapi.yml for the API, and
https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields for the rows, which are in snake case.
"""

from collections.abc import Container, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.chat import is_message, is_message_for_sure, pieces_of, pieces_of_message
from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, spoken, text_in
from kp_scorer.adapters.source import Node
from kp_scorer.adapters.timeline import Kind, Span, Told, in_order
from kp_scorer.errors import NotConverted

_KINDS: Final[dict[str, Kind]] = {"GENERATION": "model", "TOOL": "tool", "RETRIEVER": "tool", "EVENT": "event"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


class _Trace(NamedTuple):
    """What the input says of one trace."""

    nodes: list[Node]
    """The trace itself, which exports of observations lack, as often as it comes up."""
    observations: list[Node]


def runs(sources: Iterable[Node]) -> Iterator[Run | NotConverted]:
    """One run for each trace id, in the order in which they first appear; before them, what belongs to none."""
    traces: dict[str, _Trace] = {}
    for source in sources:
        for item in _items(source):
            try:
                _gather(item, traces)
            except NotConverted as error:
                yield error
    for own, trace in traces.items():
        try:
            yield _run(own, trace)
        except NotConverted as error:
            yield error


def _items(source: Node) -> list[Node]:
    """The traces and observations in a source, a page or a list."""
    is_page = isinstance(source.value, dict) and isinstance(source.value.get("data"), list)
    page = source.at("data") if is_page else source
    return page.items() if isinstance(page.value, list) else [page]


def _gather(item: Node, traces: dict[str, _Trace]) -> None:
    """Put a trace, or an observation, where what has its trace id is."""
    if item.at("observations").value is None and item.at("type").value is not None:
        own = item.first("traceId", "trace_id").required_text()
        traces.setdefault(own, _Trace([], [])).observations.append(item)
        return
    node = item if item.at("trace").value is None else item.at("trace")
    if node.at("id").value is None:
        raise node.refusal("expected a trace, which has an id, or an observation, which has a type")
    own = node.at("id").required_text()
    observations = item.at("observations").items()
    trace = traces.setdefault(own, _Trace([], []))
    trace.nodes.append(node)
    trace.observations.extend(observations)


def _run(own: str, trace: _Trace) -> Run:
    outputs = [_made(node, "model") for node in trace.observations if _type(node) == "GENERATION"]
    called = {piece.name for pieces in outputs for piece in pieces if isinstance(piece, Called)}
    spans = [_span(node, called) for node in trace.observations]
    origin = (trace.nodes or trace.observations)[0]
    # What the whole was given and gave is told as by a span around the others.
    spans += [Span(node, "", "", 0, 0, Told("other", "", _shown(node, "other"), _made(node, "other"))) for node in trace.nodes]
    times = [node.at("timestamp") for node in trace.nodes] + [_start(node) for node in trace.observations]
    created = min((time for node in times if node.value is not None and (time := _time(node))), default=None)
    return Run(
        origin,
        trace_id("langfuse", own, [node.value for node in (*trace.nodes, *trace.observations)]),
        in_order(spans),
        created_at=created.isoformat() if created else None,
    )


def _span(node: Node, called: Container[str]) -> Span:
    """An observation as a span; ``called`` are the tools that models called: a span of such a name is that tool."""
    name = node.at("name").text()
    kind = _KINDS.get(_type(node), "tool" if name in called else "other")
    started = _microseconds(_start(node))
    end = node.first("endTime", "end_time")
    ended = None if end.value is None else _microseconds(end)
    latency_ms = None if ended is None else max(0, ended - started) / 1_000
    return Span(
        node,
        span_id=node.at("id").text(),
        parent_id=node.first("parentObservationId", "parent_observation_id").text(),
        started=started,
        ended=started if ended is None else ended,
        told=_told(node, kind, name, latency_ms),
    )


def _told(node: Node, kind: Kind, name: str, latency_ms: float | None) -> Told:
    if kind in ("model", "other"):
        return Told(kind, "", _shown(node, kind), _made(node, kind))
    is_error = node.at("level").text() == "ERROR"
    output = text_in(node.at("output").value) or node.first("statusMessage", "status_message").text()
    if kind == "event":
        text = output or text_in(node.at("input").value)
        return Told(kind, name, [], [Returned(node, text, is_error=is_error)] if text else [])
    call = Called(node, node.at("name").required_text(), node.at("input").value, latency_ms=latency_ms)
    return Told(kind, name, [call], [Returned(node, output, is_error=is_error)] if output or is_error else [])


def _shown(node: Node, kind: Kind) -> list[Piece]:
    """What the input says: chat messages, alone or under ``messages``; anything else is asked as it is."""
    given = node.at("input").parsed()
    if isinstance(given.value, dict) and _are_messages(given.value.get("messages"), kind):
        given = given.at("messages")
    if _are_messages(given.value, kind):
        return list(pieces_of(given.items()))
    if _is_message(given.value, kind):
        return list(pieces_of_message(given))
    return list(spoken(Asked, given, text_in(node.at("input").value)))


def _made(node: Node, kind: Kind) -> list[Piece]:
    """What the output says: a chat message, with or without its role, or several; anything else is said as it is."""
    gave = node.at("output").parsed()
    if _are_messages(gave.value, kind):
        return list(pieces_of(gave.items()))
    if isinstance(gave.value, dict):
        message = gave._replace(value={"role": "assistant"} | gave.value)
        if _is_message(gave.value, kind) or is_message_for_sure(message.value):
            return list(pieces_of_message(message))
    return list(spoken(Said, gave, text_in(node.at("output").value)))


def _are_messages(value: object, kind: Kind) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_message(item, kind) for item in value)


def _is_message(value: object, kind: Kind) -> bool:
    """Whether a value is a message: what a model has is meant as one, if it has a role; others may have anything."""
    return is_message(value) if kind == "model" else is_message_for_sure(value)


def _type(node: Node) -> str:
    return node.at("type").required_text().upper()


def _start(node: Node) -> Node:
    return node.first("startTime", "start_time")


def _time(node: Node) -> datetime:
    """A time as ISO 8601, or with a space between date and time; without a zone it is in UTC."""
    try:
        found = datetime.fromisoformat(node.required_text())
    except ValueError:
        raise node.refusal("expected an ISO 8601 date and time") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _microseconds(node: Node) -> int:
    return (_time(node) - _EPOCH) // _MICROSECOND
