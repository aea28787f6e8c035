"""Traces from what others record: a module for each format, and what they share. Parsed JSON in, traces as JSON out."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from kp_scorer.adapters import langfuse, openai, otel, sweagent
from kp_scorer.adapters.building import Given, Run, trace_of
from kp_scorer.adapters.source import MOST_DEPTH, Node, source
from kp_scorer.decoding import Limits
from kp_scorer.errors import InvalidTrace, NotConverted

__all__ = ["FORMATS", "MOST_DEPTH", "Given", "Source", "convert"]

Source = tuple[int, object | InvalidTrace]
"""The line on which a source begins, counted from 1, and the source, or what is wrong with its JSON."""

FORMATS: Final[dict[str, Callable[[Iterable[Node]], Iterator[Run | NotConverted]]]] = {
    "openai": openai.runs,
    "otel": otel.runs,
    "sweagent": sweagent.runs,
    "langfuse": langfuse.runs,
}
"""How the sources of each format are read, by its name."""


def convert(name: str, sources: Iterable[Source], given: Given, limits: Limits) -> Iterator[dict[str, Any] | NotConverted]:
    """Convert sources of a format to traces that may be submitted, or say why one cannot be.

    A source may make several traces, and several may make one: those of ``otel`` and ``langfuse`` come when all are read.
    """
    refused: list[NotConverted] = []

    def nodes() -> Iterator[Node]:
        for line, value in sources:
            if isinstance(value, InvalidTrace):
                refused.append(NotConverted(line, value.problems))
                continue
            try:
                yield source(line, value)
            except NotConverted as error:
                refused.append(error)

    for run in FORMATS[name](nodes()):
        yield from refused
        refused.clear()
        if isinstance(run, NotConverted):
            yield run
            continue
        try:
            yield trace_of(run, given, limits)
        except NotConverted as error:
            yield error
    yield from refused
