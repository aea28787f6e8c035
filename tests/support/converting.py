"""Sources of other formats as traces, and the steps of these in few words."""

import io
from collections.abc import Iterator
from typing import Any, Final

from kp_scorer.adapters import Converter, SuppliedFields
from kp_scorer.cli.converting import Conversion, Line
from kp_scorer.cli.input import read_traces
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace, NotConverted

from tests.support.builders import LIMITS

SUPPLIED: Final = SuppliedFields(
    confidence=0.7,
    task_domain="code",
    visibility="network",
    privacy_level="aggregated",
    success=True,
    created_at="2026-01-31T12:00:00Z",
)

Trace = dict[str, Any]


def converted_and_refused(
    name: str, sources: list[object], supplied: SuppliedFields = SUPPLIED
) -> tuple[list[Trace], list[NotConverted]]:
    """The traces that sources make, each on a line of its own, all checked; and why the others make none."""
    converter = Converter(supplied, LIMITS, name)
    results = [result for line, each in enumerate(sources, start=1) for result in converter.feed(line, each)]
    traces, refused = [], []
    for result in [*results, *converter.end()]:
        if isinstance(result, NotConverted):
            refused.append(result)
        else:
            decode_trace(result, LIMITS)
            traces.append(result)
    return traces, refused


def converted(name: str, *sources: object, supplied: SuppliedFields = SUPPLIED) -> list[Trace]:
    traces, refused = converted_and_refused(name, list(sources), supplied)
    assert refused == []
    return traces


class Reading(Conversion):
    """Takes note of what it is given to convert."""

    def __init__(self) -> None:
        super().__init__(SUPPLIED, LIMITS)
        self.values: list[object] = []

    def fits(self, value: object) -> bool:
        return True

    def feed(self, line: int, value: object) -> Iterator[Line]:
        yield Line(line, InvalidTrace([]))
        self.values.append(value)


def values_read(stream: io.BufferedReader) -> list[tuple[int, object]]:
    """All values of an input as they would be converted, each with its line, or its error."""
    reading = Reading()
    lines = list(read_traces(stream, LIMITS, reading))
    values = iter(reading.values)
    return [(line.number, next(values) if str(line.trace) == "" else line.trace) for line in lines]


def refused_fields(name: str, *sources: object, supplied: SuppliedFields = SUPPLIED) -> list[tuple[int, str]]:
    _, refused = converted_and_refused(name, list(sources), supplied)
    return [(error.line, problem.field) for error in refused for problem in error.problems]


def steps_in(trace: Trace) -> list[tuple[str, ...]]:
    """The steps of a trace: each its type, its tool if it has one, and its content."""
    return [(step["type"], *([step["tool"]["name"]] if "tool" in step else []), step["content"]) for step in trace["steps"]]


def steps_of(name: str, *sources: object) -> list[tuple[str, ...]]:
    """The steps of the only trace that these sources make."""
    (trace,) = converted(name, *sources)
    return steps_in(trace)
