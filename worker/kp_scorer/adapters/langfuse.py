"""Langfuse's exports: traces with their observations, or observations alone.

A source is a trace with ``observations``, as the API has it; an object with ``trace`` and ``observations``, as the download of
a trace has it; one observation, as the rows of the tables' and of the blob storage's exports are; a page of any (``data``); or
a list of any. All observations of one trace id, wherever they stand in the input, are one run.

Specifications: https://langfuse.com/docs/observability/data-model and
https://langfuse.com/docs/observability/features/observation-types for what they mean,
https://cloud.langfuse.com/generated/api/openapi.yml for the API, and
https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields for the rows, which are in snake case.
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from kp_scorer.adapters.building import Run, moment, trace_id
from kp_scorer.adapters.messages import Piece, Transcript, is_message, is_message_for_sure, pieces_of, text_in, utterance
from kp_scorer.adapters.node import Node
from kp_scorer.adapters.timeline import Span, SpanKind, in_order

_KINDS: Final[dict[str, SpanKind]] = {"GENERATION": "model", "TOOL": "tool", "RETRIEVER": "tool", "EVENT": "event"}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def records(source: Node) -> list[Node]:
    """The traces and observations in a source, a page or a list."""
    is_page = isinstance(source.value, dict) and isinstance(source.value.get("data"), list)
    page = source.at("data") if is_page else source
    return page.items() if isinstance(page.value, list) else [page]


def run_id(record: Node) -> str:
    """The id of the trace to which a trace or an observation belongs."""
    if _is_observation(record):
        return record.first("traceId", "trace_id").required_text()
    trace = _trace(record)
    if trace.at("id").value is None:
        raise trace.refusal("expected a trace, which has an id, or an observation, which has a type")
    return trace.at("id").required_text()


def run(own: str, items: Sequence[Node]) -> Run:
    """The run that all of one trace id is."""
    traces = [_trace(item) for item in items if not _is_observation(item)]
    observations = [each for item in items for each in ([item] if _is_observation(item) else item.at("observations").items())]
    transcript = _transcript()
    spans = [_span(node, _KINDS.get(_type(node), "other"), transcript) for node in observations]
    # A span with the name of a tool that a model called is that tool.
    tools = {piece.name for span in spans if span.kind == "model" for piece in span.outputs if piece.kind == "call"}
    spans = [
        _span(span.node, "tool", transcript) if span.kind == "other" and span.node.at("name").text() in tools else span
        for span in spans
    ]
    times_us = [_microseconds(node.at("timestamp")) for node in traces if node.at("timestamp").value is not None]
    times_us += [span.started_ns // 1_000 for span in spans]
    # The input and the output of the trace are those of a span around the others.
    spans += [Span(node, "", "", 0, 0, "other", "", *_both(node, _transcript(), is_model=False)) for node in traces]
    origin = (traces or observations)[0]
    return Run(
        origin,
        trace_id("langfuse", own, [node.value for node in (*traces, *observations)]),
        in_order(spans),
        created_at=moment(origin, min(times_us)) if times_us else None,
    )


def _is_observation(record: Node) -> bool:
    return record.at("observations").value is None and record.at("type").value is not None


def _trace(record: Node) -> Node:
    return record if record.at("trace").value is None else record.at("trace")


def _span(node: Node, kind: SpanKind, transcript: Transcript) -> Span:
    name, end = node.at("name"), node.first("endTime", "end_time")
    if kind in ("model", "other"):
        inputs, outputs = _both(node, transcript if kind == "model" else _transcript(), is_model=kind == "model")
    else:
        is_error = node.at("level").text() == "ERROR"
        text = text_in(node.at("output").value) or node.first("statusMessage", "status_message").text()
        is_tool = kind == "tool"
        inputs = [Piece(node, "call", name=name.required_text(), arguments=node.at("input").value)] if is_tool else []
        text = text if is_tool else text or text_in(node.at("input").value)
        outputs = [Piece(node, "result", text, is_error=is_error)] if text or (is_tool and is_error) else []
    return Span(
        node,
        span_id=node.at("id").text(),
        parent_id=node.first("parentObservationId", "parent_observation_id").text(),
        started_ns=_microseconds(node.first("startTime", "start_time")) * 1_000,
        ended_ns=None if end.value is None else _microseconds(end) * 1_000,
        kind=kind,
        name=name.text() if kind == "tool" else "",
        inputs=inputs,
        outputs=outputs,
    )


def _transcript() -> Transcript:
    return Transcript(lambda message: pieces_of([message]))


def _both(node: Node, transcript: Transcript, *, is_model: bool) -> tuple[list[Piece], list[Piece]]:
    inputs = _pieces(node, "input", "user", transcript, is_model=is_model)
    return inputs, _pieces(node, "output", "agent", _transcript(), is_model=is_model)


def _pieces(node: Node, key: str, kind: Literal["user", "agent"], transcript: Transcript, *, is_model: bool) -> list[Piece]:
    """The pieces in an input or output: chat messages, alone or in a list, or under ``messages``; otherwise one text.

    Messages of a model are known by a role; what other spans have may be anything. An output may lack its role.
    """
    is_known = is_message if is_model else is_message_for_sure
    content = node.at(key).parsed()
    inner = content.at("messages") if key == "input" and isinstance(content.value, dict) else content
    for messages in (inner, content):
        if isinstance(messages.value, list) and messages.value:
            new = messages.value[transcript.read_before(messages) :]
            if all(map(is_known, new)):
                return transcript.pieces(messages)
    if isinstance(content.value, dict):
        message = content._replace(value={"role": "assistant"} | content.value) if kind == "agent" else content
        if is_known(content.value) or is_message_for_sure(message.value):
            return list(pieces_of([message]))
    return utterance(content, kind, text_in(node.at(key).value))


def _type(node: Node) -> str:
    return node.at("type").required_text().upper()


def _microseconds(node: Node) -> int:
    """A time as ISO 8601, or with a space between date and time; without a zone it is in UTC."""
    try:
        time = datetime.fromisoformat(node.required_text())
    except ValueError:
        raise node.refusal("expected an ISO 8601 date and time") from None
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
