"""Exports of Langfuse: traces with their observations, or observations alone.

A source is one of these, a page of them (``data``) or a list of them: a trace with ``observations``, which the API returns; an
object with ``trace`` and ``observations``, which the download of a trace is; or one observation, which is a row in the exports
of tables and of the blob storage. All observations of one trace id are one run, wherever they are in the input.

Specifications: https://langfuse.com/docs/observability/data-model, https://cloud.langfuse.com/generated/api/openapi.yml for the
API, https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields for rows, which are in snake case.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from kp_scorer.adapters.blocks import Piece, returned_in, text_in, utterance
from kp_scorer.adapters.building import Run, microseconds, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import Transcript, pieces_in
from kp_scorer.adapters.node import Node, as_json, objects_in, parsed
from kp_scorer.adapters.roles import Speaker
from kp_scorer.adapters.timeline import Span, SpanKind, kind_of, run_of

_TOOL_SPAN: Final = re.compile(r"^(?:\w+[ _])?tool[ :.]+(['\"]?)([\w/-]+)\1$", re.IGNORECASE)
"""The names that some frameworks give to the span of a tool: ``execute_tool NAME``, ``running tool: NAME``."""
_TRACE_FIELDS: Final = frozenset(
    {"projectId", "project_id", "htmlPath", "sessionId", "session_id", "userId", "user_id", "release"}
)
"""A trace has at least one of these fields beside its id and its time."""


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a trace, an observation or a page of them."""
    page = value.get("data")
    return any(map(_fits, objects_in(page) if isinstance(page, list) else [value]))


def _fits(value: dict[str, Any]) -> bool:
    fields = set(value)
    is_observation = "type" in fields and {"traceId", "trace_id"} & fields and {"startTime", "start_time"} & fields
    is_trace = {"id", "timestamp"} <= fields and _TRACE_FIELDS & fields
    return isinstance(value.get("observations"), list) or bool(is_observation or is_trace)


def ends(items: Sequence[Node]) -> int | None:
    """Return 0 after a trace with its observations. Observations alone never say which is the last."""
    return 0 if objects_in(items[-1].at("observations").value) else None


def records(source: Node) -> list[Node]:
    """Return the traces and observations in a source, a page or a list."""
    is_page = isinstance(source.value, dict) and isinstance(source.value.get("data"), list)
    return (source.at("data") if is_page else source).each()


def run_id(record: Node) -> str:
    """Return the trace id of a trace or an observation."""
    if _is_observation(record):
        return record.first("traceId", "trace_id").required_text()
    trace = _trace(record)
    if trace.at("id").value is None:
        raise trace.refusal("expected a trace, which has an id, or an observation, which has a type")
    return trace.at("id").required_text()


def run(own_id: str, items: Sequence[Node]) -> Run:
    """Make a run of all traces and observations with one trace id."""
    traces = [_trace(item) for item in items if not _is_observation(item)]
    observations = [each for item in items for each in ([item] if _is_observation(item) else item.at("observations").items())]
    # In a list of traces, each has the ids of its observations, which other records hold.
    ids = [each for each in observations if isinstance(each.value, str)]
    observations = [each for each in observations if not isinstance(each.value, str)]
    if ids and not observations:
        raise ids[0].refusal("expected the observation, which no record holds")
    transcript = Transcript()
    spans = [_span(node, transcript) for node in observations]
    # Any span is that of a tool if a model called a tool of its name.
    tools = {piece.name for span in spans if span.kind == "model" for piece in span.outputs if piece.kind == "call"}
    spans = [_tool_of(span, tools) for span in spans]
    roots = [span.node for span in spans if not span.parent_id]
    times_us = [microseconds(node.at("timestamp")) for node in traces if node.at("timestamp").value is not None]
    times_us += [span.started_ns // 1_000 for span in spans]
    # The trace has an input and an output, so it is like a span around the others.
    spans += [Span(node, "", "", 0, 0, "other", "", *_both(node, Transcript(), is_model=False)) for node in traces]
    run_id = trace_id("langfuse", own_id, [node.value for node in (*traces, *observations)])
    described = (traces or roots or observations)[0].object()
    scores = sorted((each for each in objects_in(described.get("scores")) if isinstance(each.get("name"), str)), key=_rank)
    named = {each["name"]: each.get("stringValue" if each.get("dataType") == "CATEGORICAL" else "value") for each in scores}
    return run_of((traces or observations)[0], run_id, spans, min(times_us, default=None), described | {"scores": named})


def _rank(score: dict[str, Any]) -> tuple[bool, str]:
    """Return what orders scores: one of the run is above those of its observations, and a newer one above older ones."""
    return not score.get("observationId"), str(score.get("timestamp") or score.get("createdAt") or "")


def _is_observation(record: Node) -> bool:
    return record.at("observations").value is None and record.at("type").value is not None


def _trace(record: Node) -> Node:
    return record if record.at("trace").value is None else record.at("trace")


def _tool_name(node: Node) -> str:
    """Return the name of a tool from the attributes of its span. Attributes of an agent may name the tool that it chose."""
    is_tool = "TOOL" in (node.at("type").text().upper(), _attribute(node, "openinference.span.kind"))
    return _attribute(node, "gen_ai.tool.name", "ai.toolCall.name", *(["tool.name"] if is_tool else []))


def _tool_of(span: Span, tools: set[str]) -> Span:
    """Return a span as that of a tool if a model called one of its name, and as that of no tool if it holds nothing."""
    if span.kind in ("agent", "other") and span.node.at("name").text() in tools:
        return _span(span.node, Transcript(), "tool")
    contents = (span.node.at(key).parsed().value for key in ("input", "output"))
    if span.kind == "tool" and tools and span.name not in tools and all(each in (None, "", {}, []) for each in contents):
        # It surrounds the calls of a turn, or is a handoff, which the model calls by another name.
        return span._replace(kind="other", inputs=[], outputs=[])
    return span


def _span(node: Node, transcript: Transcript, kind: SpanKind | None = None) -> Span:
    kind = kind or kind_of(node.at("type").required_text())
    if kind in ("agent", "other") and _tool_name(node):
        kind = "tool"
    end, name = node.first("endTime", "end_time"), ""
    if kind in ("model", "agent", "other"):
        inputs, outputs = _both(node, transcript, is_model=kind == "model")
        if kind == "model" and not outputs and _is_failed(node):
            outputs = _returned(node)
    elif kind == "tool":
        name = _tool_name(node) or _TOOL_SPAN.sub(r"\2", node.at("name").required_text())
        call_id, arguments = _attribute(node, "gen_ai.tool.call.id", "ai.toolCall.id"), node.at("input").value
        inputs, outputs = [Piece(node, "call", name=name, arguments=arguments, call_id=call_id)], _returned(node)
    else:
        inputs, outputs = [], _returned(node) or utterance(node, "result", text_in(node.at("input").value))
    ids = node.at("id").text(), node.first("parentObservationId", "parent_observation_id").text()
    started_us = microseconds(node.first("startTime", "start_time"))
    times_ns = started_us * 1_000, None if end.value is None else microseconds(end) * 1_000
    return Span(node, *ids, *times_ns, kind, name, inputs, outputs, _is_failed(node))


def _returned(node: Node) -> list[Piece]:
    text, is_error = returned_in(node.at("output").parsed().value)
    if isinstance(node.at("output").value, str) and text == as_json(node.at("output").parsed().value):
        # Keep the spelling of the source.
        text = node.at("output").text()
    if not text.strip("{} \n"):
        # Some frameworks record the result among the attributes alone.
        text = returned_in(parsed(_attribute(node, "output.value")))[0] or text
    text = text or node.first("statusMessage", "status_message").text()
    is_error = is_error or _is_failed(node)
    return [Piece(node, "result", text, is_error=is_error)] if text or is_error else []


def _is_failed(node: Node) -> bool:
    return bool(node.at("level").value == "ERROR")


def _attribute(node: Node, *keys: str) -> str:
    """Return the first of these attributes that a span has. Langfuse keeps the attributes that it does not read itself."""
    metadata = node.at("metadata").parsed()
    attributes = metadata.at("attributes") if isinstance(metadata.value, dict) else metadata
    values = [attributes.at(key).value for key in keys] if isinstance(attributes.value, dict) else []
    return next((value for value in values if isinstance(value, str) and value), "")


def _both(node: Node, transcript: Transcript, *, is_model: bool) -> tuple[list[Piece], list[Piece]]:
    inputs = _pieces(node, "input", "user", transcript if is_model else Transcript(), is_model=is_model)
    if node.at("output").value == "None" and isinstance(node.at("input").parsed().value, str):
        # Exporters that record messages as texts write this for an answer of calls alone.
        return inputs, []
    return inputs, _pieces(node, "output", "agent", Transcript(), is_model=is_model)


def _pieces(node: Node, key: str, speaker: Speaker, transcript: Transcript, *, is_model: bool) -> list[Piece]:
    """Return the pieces in an input or output. Content that is no message is one text, which a download quotes as JSON."""
    content = node.at(key)
    if isinstance(content.value, str) and content.value.startswith('"'):
        with suppress(ValueError):
            content = content._replace(value=json.loads(content.value))
    pieces = pieces_in(content.parsed(), speaker, transcript, is_model=is_model)
    return utterance(content, speaker, text_in(content.value)) if pieces is None else pieces


FORMAT = Format(fits, run, records, run_id, ends=ends)
