"""Exports of Langfuse: traces with their observations, or observations alone.

A source is one of these, a page of them (``data``) or a list of them: a trace with ``observations``, which the API returns; an
object with ``trace`` and ``observations``, which the download of a trace is; or one observation, which is a row in the exports
of tables and of the blob storage. All observations of one trace id are one run, wherever they are in the input.

Specifications: https://langfuse.com/docs/observability/data-model, https://cloud.langfuse.com/generated/api/openapi.yml for the
API, https://langfuse.com/docs/api-and-data-platform/features/blob-storage-export-fields for rows, which are in snake case.
"""

from collections.abc import Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run
from kp_scorer.adapters.columns import span_of_row
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.span import Spans
from kp_scorer.adapters.timeline import run_of
from kp_scorer.adapters.times import microseconds

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
    """Return 0, for a complete run, after a trace with its observations; else None, as no observation says that it is last."""
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


def run(own_id: str, items: Sequence[Node]) -> Run | list[Run]:
    """Make a run of all traces and observations with one trace id."""
    traces = [_trace(item) for item in items if not _is_observation(item)]
    observations = [each for item in items for each in ([item] if _is_observation(item) else item.at("observations").items())]
    # In a list of traces, each has the ids of its observations, which other records hold.
    ids = [each for each in observations if isinstance(each.value, str)]
    observations = [each for each in observations if not isinstance(each.value, str)]
    if ids and not observations:
        raise ids[0].refusal("expected a record with this observation: the trace has only its id")
    spans = Spans([*map(_around, traces), *map(_timed, observations)])
    roots = [each for each in observations if not each.first("parentObservationId", "parent_observation_id").value]
    described = (traces or roots or observations)[0].object()
    scores = sorted((each for each in objects_in(described.get("scores")) if isinstance(each.get("name"), str)), key=_rank)
    named = {each["name"]: each.get("stringValue" if each.get("dataType") == "CATEGORICAL" else "value") for each in scores}
    return run_of("langfuse", own_id, spans, described | {"scores": named})


def _around(trace: Node) -> Node:
    """Return a trace, which has an input and an output, as a span around the observations."""
    time = trace.at("timestamp")
    start_ns = 0 if time.value is None else microseconds(time) * 1_000
    attributes = {key: trace.at(key).value for key in ("input", "output")}
    return trace._replace(value={"startTimeUnixNano": start_ns, "attributes": attributes})


def _timed(observation: Node) -> Node:
    microseconds(observation.first("startTime", "start_time"))
    return span_of_row(observation)


def _rank(score: dict[str, Any]) -> tuple[bool, str]:
    """Return the key that orders scores: a run's score is above those of its observations, and a newer one above older ones."""
    return not score.get("observationId"), str(score.get("timestamp") or score.get("createdAt") or "")


def _is_observation(record: Node) -> bool:
    return record.at("observations").value is None and record.at("type").value is not None


def _trace(record: Node) -> Node:
    return record if record.at("trace").value is None else record.at("trace")


FORMAT = Format(fits, run, records, run_id, ends=ends)
