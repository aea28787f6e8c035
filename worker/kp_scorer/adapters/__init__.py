"""Traces from others' records: a module for each format, and what they share. Parsed JSON in, traces as JSON out.

A format says which records a source holds, which run each belongs to, and what happened in a run: the messages and steps there.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.adapters import langfuse, openai, otel, sweagent
from kp_scorer.adapters.building import Run, SuppliedFields, trace_of
from kp_scorer.adapters.node import MOST_DEPTH, Node, source
from kp_scorer.decoding import Limits
from kp_scorer.errors import InvalidTrace, NotConverted

__all__ = ["FORMATS", "MOST_DEPTH", "SuppliedFields", "convert"]


_MOST_RECORDS: Final = 50_000
"""Spans or observations in a run. What has more makes no trace within the limits, and would fill the memory first."""


class _Format(NamedTuple):
    """How the sources of a format are read."""

    records: Callable[[Node], Iterable[Node]]
    run: Callable[[str, Sequence[Node]], Run]
    run_id: Callable[[Node], str] | None = None
    """By which id records make one run; None if each is a run alone."""


FORMATS: Final = {
    "openai": _Format(openai.records, openai.run),
    "otel": _Format(otel.records, otel.run, otel.run_id),
    "sweagent": _Format(sweagent.records, sweagent.run),
    "langfuse": _Format(langfuse.records, langfuse.run, langfuse.run_id),
}


def convert(
    name: str, sources: Iterable[tuple[int, object | InvalidTrace]], supplied: SuppliedFields, limits: Limits
) -> Iterator[dict[str, Any] | NotConverted]:
    """Convert sources of a format to traces that may be submitted, or to the reason why one cannot be.

    Each source comes with the line on which it begins, counted from 1; one whose JSON is broken is its error. It may hold
    several traces, and a trace several sources: those of ``otel`` and ``langfuse`` come when all are read.
    """
    read = FORMATS[name]
    runs: dict[str, list[Node]] = {}

    def converted(own: str, records: Sequence[Node]) -> dict[str, Any] | NotConverted:
        try:
            if len(records) > _MOST_RECORDS:
                raise records[0].refusal(f"expected a run of at most {_MOST_RECORDS} records")
            return trace_of(read.run(own, records), supplied, limits)
        except NotConverted as error:
            return error

    for line, value in sources:
        if isinstance(value, InvalidTrace):
            yield NotConverted(line, value.problems)
            continue
        try:
            records = read.records(source(line, value))
        except NotConverted as error:
            yield error
            continue
        for record in records:
            if read.run_id is None:
                yield converted("", [record])
                continue
            try:
                run = runs.setdefault(read.run_id(record), [])
            except NotConverted as error:
                yield error
                continue
            if len(run) <= _MOST_RECORDS:
                run.append(record)
    yield from (converted(own, records) for own, records in runs.items())
