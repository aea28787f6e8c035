"""Converts sources of other formats to traces, and summarises the steps of the traces."""

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
    """Convert sources, each on a line of its own; return their traces, after checking them, and the errors of the others."""
    converter = Converter(supplied, LIMITS, name)
    results = [result for line, each in enumerate(sources, start=1) for result in converter.feed(line, each)]
    traces, refused = [], []
    for result in [*results, *converter.end()]:
        if isinstance(result, NotConverted):
            refused.append(result)
        else:
            decode_trace(result.trace, LIMITS)
            traces.append(result.trace)
    return traces, refused


def converted(name: str, *sources: object, supplied: SuppliedFields = SUPPLIED) -> list[Trace]:
    traces, refused = converted_and_refused(name, list(sources), supplied)
    assert refused == []
    return traces


class Reading(Conversion):
    """A conversion that only records the values that it gets."""

    def __init__(self) -> None:
        super().__init__(SUPPLIED, LIMITS)
        self.values: list[object] = []

    def feed(self, line: int, value: object) -> Iterator[Line]:
        yield Line(line, InvalidTrace([]))
        self.values.append(value)


def values_read(stream: io.BufferedReader) -> list[tuple[int, object]]:
    """Return each value of an input with its line, or the error, as the converter would get it."""
    reading = Reading()
    lines = list(read_traces(stream, LIMITS, reading))
    values = iter(reading.values)
    return [(line.number, next(values) if str(line.trace) == "" else line.trace) for line in lines]


def refused_fields(name: str, *sources: object, supplied: SuppliedFields = SUPPLIED) -> list[tuple[int, str]]:
    _, refused = converted_and_refused(name, list(sources), supplied)
    return [(error.line, problem.field) for error in refused for problem in error.problems]


def steps_in(trace: Trace) -> list[tuple[str, ...]]:
    """Return the type, the tool if any, and the content of each step of a trace."""
    return [(step["type"], *([step["tool"]["name"]] if "tool" in step else []), step["content"]) for step in trace["steps"]]


def steps_of(name: str, *sources: object) -> list[tuple[str, ...]]:
    """Return the steps of the only trace that these sources give."""
    (trace,) = converted(name, *sources)
    return steps_in(trace)
