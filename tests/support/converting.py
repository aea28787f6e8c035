"""Converting sources of other formats, and traces in few words."""

from typing import Any, Final

from kp_scorer.adapters import Given, convert
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import NotConverted

from tests.support.builders import LIMITS

GIVEN: Final = Given(
    confidence=0.7,
    task_domain="code",
    visibility="network",
    privacy_level="aggregated",
    success=True,
    created_at="2026-01-31T12:00:00Z",
)

Trace = dict[str, Any]


def both(name: str, sources: list[object], given: Given = GIVEN) -> tuple[list[Trace], list[NotConverted]]:
    """The traces that sources make, each on a line of its own, all checked; and why the others make none."""
    traces, refused = [], []
    for found in convert(name, enumerate(sources, start=1), given, LIMITS):
        if isinstance(found, NotConverted):
            refused.append(found)
        else:
            decode_trace(found, LIMITS)
            traces.append(found)
    return traces, refused


def converted(name: str, *sources: object, given: Given = GIVEN) -> list[Trace]:
    """The traces that sources make, which all do."""
    traces, refused = both(name, list(sources), given)
    assert refused == []
    return traces


def refused_fields(name: str, *sources: object, given: Given = GIVEN) -> list[tuple[int, str]]:
    """Line and field of all that is wrong with sources."""
    _, refused = both(name, list(sources), given)
    return [(error.line, problem.field) for error in refused for problem in error.problems]


def told(trace: Trace) -> list[tuple[str, ...]]:
    """The steps of a trace: each its type, its tool if it has one, and its content."""
    return [(step["type"], *([step["tool"]["name"]] if "tool" in step else []), step["content"]) for step in trace["steps"]]
