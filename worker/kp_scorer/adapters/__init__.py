"""Traces from others' records: what reads each format, and what they share. Parsed JSON in, traces as JSON out.

A format says which records a source holds, which run each belongs to, and what happened in a run: the messages and steps there.
"""

import heapq
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.adapters import agents, langfuse, openai, otel
from kp_scorer.adapters.building import Run, SuppliedFields, digests_of, trace_of
from kp_scorer.adapters.messages import is_error
from kp_scorer.adapters.node import MOST_DEPTH, Node, objects_in, source, unread_in
from kp_scorer.decoding import Limits
from kp_scorer.errors import NotConverted

__all__ = ["FORMATS", "MOST_DEPTH", "Converter", "SuppliedFields", "format_of"]

Converted = dict[str, Any] | NotConverted  # A trace that may be submitted, or the reason why there is none.

_MOST_CHATS: Final = 1_000  # How many chats wait for one that goes on with them, until the first of them is converted.
_MOST_RECORDS: Final = 50_000  # In a run. What has more makes no trace within the limits, and would fill the memory.
_MOST_OPEN: Final = 100_000  # Records of open runs. Over it the run that had none for longest is converted as it is.
_MOST_ENDED: Final = 100_000  # Converted runs of which the ids are held, so that a record that comes too late is refused.
_MOST_NAMES: Final = 10_000  # Of fields that were not read: keys may be anything.


class _Format(NamedTuple):
    fits: Callable[[dict[str, Any]], bool]  # Whether an object may be a source of it, or an item of one.
    run: Callable[[str, Sequence[Node]], Run]
    records: Callable[[Node], Iterable[Node]] = Node.each
    run_id: Callable[[Node], str | None] = lambda _: None
    """By which id records make one run: None if one is a run alone, empty if it belongs to the run of the record before."""
    starts: Callable[[Node], int] = lambda _: 0
    ends: Callable[[Sequence[Node]], int | None] = lambda _: None  # The start of a record after the run; None if not known.
    has_chats: bool = False  # Whether a record may hold what an earlier one holds, and what came after.
    is_of_one_file: bool = False  # Whether a run is complete at the end of its file.
    has_ids_of_files: bool = False
    """Whether an id may stand for another run in another file: records are joined with those of their own file first."""


class _Key(NamedTuple):
    format: str
    own: str  # The id of the run.
    file: int = 0  # The number of the file that the id is of; 0 for all files.


FORMATS: Final = {  # In the order in which they are tried on a source.
    "otel": _Format(otel.fits, otel.run, otel.records, otel.run_id, otel.starts, otel.ends),
    "langfuse": _Format(langfuse.fits, langfuse.run, langfuse.records, langfuse.run_id, ends=langfuse.ends),
    "sweagent": _Format(agents.is_sweagent, agents.run_of_sweagent),
    "atif": _Format(agents.is_atif, agents.run_of_atif),
    "claude-code": _Format(
        agents.is_claude, agents.run_of_claude, agents.lines_of_claude, agents.id_of_claude, is_of_one_file=True
    ),
    "codex": _Format(agents.is_codex, agents.run_of_codex, run_id=agents.id_of_codex, is_of_one_file=True),
    "openai": _Format(
        openai.fits,
        openai.run,
        openai.records,
        openai.batch_id,
        ends=openai.ends,
        has_chats=True,
        has_ids_of_files=True,
    ),
}


def format_of(value: object) -> str:
    """The name of the format that a source has by its shape; empty if none fits."""
    items = value if isinstance(value, list) else [value]
    while items and isinstance(items[0], list):
        items = items[0]
    objects = objects_in(items)
    return next((name for name, read in FORMATS.items() if any(map(read.fits, objects))), "")


class Converter:
    """Converts sources as they come, each run when it is complete; holds the records of the others."""

    def __init__(self, supplied: SuppliedFields, limits: Limits, name: str = "") -> None:
        """Without the ``name`` of a format, each source has the one that fits it."""
        self.unread: Counter[str] = Counter()  # In how many converted runs fields were not read, by the names of these.
        self.counts: Counter[str] = Counter()
        """How many ``traces`` they are, how many of these are ``toolless``, and how many ``steps``, ``calls`` of tools,
        ``errors`` and ``recoveries`` they have; how many chats are ``continued`` in another, and so no runs."""
        self._supplied, self._limits, self._name = supplied, limits, name
        self._open: OrderedDict[_Key, list[Node]] = OrderedDict()  # In the order of their last records.
        self._records = 0  # How many records these are.
        self._ends: list[tuple[int, _Key]] = []  # A heap.
        self._file = 1  # The number of the present one.
        self._of_file: dict[_Key, None] = {}  # The runs that need something at its end.
        self._latest: dict[str, str] = {}  # For each format the id of the run that had a record last.
        self._ended: OrderedDict[_Key, bool] = OrderedDict()  # And whether one that came too late was refused.
        self._chats: OrderedDict[bytes, Run] = OrderedDict()

    def feed(self, line: int, value: object) -> Iterator[Converted]:
        """Convert what is complete with a source, which begins on this line, counted from 1."""
        now = 0
        try:
            node = source(line, value)
            name = self._name or format_of(value)
            if not name:
                raise node.refusal(f"expected a trace, or the shape of {', '.join(FORMATS)}")
            records = FORMATS[name].records(node)
        except Exception as error:
            yield _refusal(Node(line, "", value), error)
            return
        for record in records:
            try:
                own = FORMATS[name].run_id(record)
                if own is None:
                    yield from self._convert(_Key(name, ""), [record])
                    continue
                own = self._latest[name] = own or self._latest.get(name, "")
                now = max(now, self._add(_Key(name, own, self._file * FORMATS[name].has_ids_of_files), record))
            except Exception as error:
                yield _refusal(record, error)
            while self._records > _MOST_OPEN:
                yield from self._close(next(iter(self._open)))
        yield from self._close_ended(now)

    def end_file(self) -> Iterator[Converted]:
        """Convert the runs that have no record in another file, and those whose records in others came before."""
        for key in self._of_file:
            if FORMATS[key.format].is_of_one_file:
                yield from self._close(key)
                continue
            for record in self._pop(key):
                try:
                    self._add(key._replace(file=0), record)
                except NotConverted as error:
                    yield error
        yield from self._close_ended(0)
        self._of_file.clear()
        self._latest.clear()
        self._file += 1

    def end(self) -> Iterator[Converted]:
        """Convert what is left."""
        while self._open:
            yield from self._close(next(iter(self._open)))
        while self._chats:
            yield self._trace(self._chats.popitem(last=False)[1])

    def _add(self, key: _Key, record: Node) -> int:
        """Add a record to its run; return when it started, which runs that have ended by then are complete with."""
        if key in self._ended:
            if self._ended[key]:
                return 0
            self._ended[key] = True
            raise record.refusal("expected no more of a run that was complete, and was converted, before this record came")
        name = key.format
        if key.file or FORMATS[name].is_of_one_file:
            self._of_file.pop(key, None)
            self._of_file[key] = None  # Last, as among the open ones.
        records = self._open.setdefault(key, [])
        self._open.move_to_end(key)
        if len(records) <= _MOST_RECORDS:
            records.append(record)
            self._records += 1
        try:
            if (end := FORMATS[name].ends(records)) is not None:
                heapq.heappush(self._ends, (end, key))
            return FORMATS[name].starts(record)
        except NotConverted:
            # Refused with its run.
            return 0

    def _close_ended(self, now: int) -> Iterator[Converted]:
        while self._ends and self._ends[0][0] <= now:
            yield from self._close(heapq.heappop(self._ends)[1])

    def _pop(self, key: _Key) -> list[Node]:
        records = self._open.pop(key, [])
        self._records -= len(records)
        return records

    def _close(self, key: _Key) -> Iterator[Converted]:
        if records := self._pop(key):
            self._ended[key] = False
            if len(self._ended) > _MOST_ENDED:
                self._ended.popitem(last=False)
            yield from self._convert(key, records)

    def _convert(self, key: _Key, records: Sequence[Node]) -> Iterator[Converted]:
        read = FORMATS[key.format]
        try:
            if len(records) > _MOST_RECORDS:
                raise records[0].refusal(f"expected a run of at most {_MOST_RECORDS} records")
            reads: dict[str, Any] = {}
            run = read.run(key.own, [record._replace(reads=reads) for record in records])
            yield from self._longest(run) if read.has_chats and run.pieces else [self._trace(run)]
        except Exception as error:
            yield _refusal(records[0], error)

    def _longest(self, run: Run) -> Iterator[Converted]:
        """Hold a chat back, as a log has it once for each of its calls: one that a later one begins with is no run."""
        *earlier, own = digests_of(run.pieces)
        for digest in earlier:
            self.counts["continued"] += self._chats.pop(digest, None) is not None
        if own in self._chats:
            yield self._trace(self._chats.pop(own))
        self._chats[own] = run
        if len(self._chats) > _MOST_CHATS:
            yield self._trace(self._chats.popitem(last=False)[1])

    def _trace(self, run: Run) -> Converted:
        try:
            trace = trace_of(run, self._supplied, self._limits)
        except Exception as error:
            return _refusal(run.node, error)
        paths = tuple(self._supplied.paths.values())
        unread = (name for name in sorted(unread_in(run.node)) if not any(f"{path}.".startswith(f"{name}.") for path in paths))
        self.unread.update(name for name in unread if name in self.unread or len(self.unread) < _MOST_NAMES)
        steps, calls = trace["steps"], sum("tool" in step for step in trace["steps"])
        self.counts.update(traces=1, toolless=int(not calls), steps=len(steps), calls=calls)
        self.counts["recoveries"] += sum(step["type"] == "error_recovery" for step in steps)
        self.counts["errors"] += sum(piece.kind == "result" and is_error(piece) for piece in run.pieces)
        return trace


def _refusal(node: Node, error: Exception) -> NotConverted:
    """The error of a run, whatever it was: one of ours must not end the others, and its message may quote the record."""
    if isinstance(error, NotConverted):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} in {frame.name}:{frame.lineno}"
    return node.refusal(f"expected what can be converted; this is an error of ours: {where}")
