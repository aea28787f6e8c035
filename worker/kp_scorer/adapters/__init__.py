"""Traces from others' records: a module for each format, and what they share. Parsed JSON in, traces as JSON out.

A format says which records a source holds, which run each belongs to, and what happened in a run: the messages and steps there.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.adapters import langfuse, openai, otel, sweagent
from kp_scorer.adapters.building import Run, SuppliedFields, digests_of, trace_of
from kp_scorer.adapters.node import MOST_DEPTH, Node, source
from kp_scorer.decoding import Limits
from kp_scorer.errors import InvalidTrace, NotConverted

__all__ = ["FORMATS", "MOST_DEPTH", "SuppliedFields", "convert"]


_MOST_CHATS: Final = 1_000
"""How many chats wait for one that goes on with them, until the first of them is converted."""
_MOST_RECORDS: Final = 50_000
"""Spans or observations in a run. What has more makes no trace within the limits, and would fill the memory first."""


class _Format(NamedTuple):
    """How the sources of a format are read."""

    records: Callable[[Node], Iterable[Node]]
    run: Callable[[str, Sequence[Node]], Run]
    run_id: Callable[[Node], str] | None = None
    """By which id records make one run; None if each is a run alone."""
    has_chats: bool = False
    """Whether a record may hold what an earlier one holds, and what came after."""


FORMATS: Final = {
    "openai": _Format(openai.records, openai.run, has_chats=True),
    "otel": _Format(otel.records, otel.run, otel.run_id),
    "sweagent": _Format(sweagent.records, sweagent.run),
    "langfuse": _Format(langfuse.records, langfuse.run, langfuse.run_id),
}


def convert(
    name: str, sources: Iterable[tuple[int, object | InvalidTrace]], supplied: SuppliedFields, limits: Limits
) -> Iterator[dict[str, Any] | NotConverted]:
    """Convert sources of a format to traces that may be submitted, or to the reason why one cannot be.

    Each source comes with the line on which it begins, counted from 1; one whose JSON is broken is its error. It may hold
    several traces, and a trace several sources: those of ``otel`` and ``langfuse`` come when all are read, and a chat when no
    later one is likely to go on with it.
    """
    runs = _runs(FORMATS[name], sources)
    for run in _longest(runs) if FORMATS[name].has_chats else runs:
        try:
            yield run if isinstance(run, NotConverted) else trace_of(run, supplied, limits)
        except NotConverted as error:
            yield error


def _runs(read: _Format, sources: Iterable[tuple[int, object | InvalidTrace]]) -> Iterator[Run | NotConverted]:
    runs: dict[str, list[Node]] = {}
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
                yield _run(read, "", [record])
                continue
            try:
                run = runs.setdefault(read.run_id(record), [])
            except NotConverted as error:
                yield error
                continue
            if len(run) <= _MOST_RECORDS:
                run.append(record)
    yield from (_run(read, own, records) for own, records in runs.items())


def _run(read: _Format, own: str, records: Sequence[Node]) -> Run | NotConverted:
    if len(records) > _MOST_RECORDS:
        return records[0].refusal(f"expected a run of at most {_MOST_RECORDS} records")
    try:
        return read.run(own, records)
    except NotConverted as error:
        return error


def _longest(runs: Iterable[Run | NotConverted]) -> Iterator[Run | NotConverted]:
    """The runs without those that a later one begins with: a log has a chat once for each of its calls."""
    waiting: OrderedDict[bytes, Run] = OrderedDict()
    for run in runs:
        if isinstance(run, NotConverted) or not run.pieces:
            yield run
            continue
        *earlier, own = digests_of(run.pieces)
        for digest in earlier:
            waiting.pop(digest, None)
        if own in waiting:
            yield waiting.pop(own)
        waiting[own] = run
        if len(waiting) > _MOST_CHATS:
            yield waiting.popitem(last=False)[1]
    yield from waiting.values()
