"""Collects the records of each run as sources arrive, and makes a trace of each complete run."""

import hashlib
import heapq
import traceback
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from kp_scorer.adapters.building import Run, SuppliedFields, trace_id, trace_of
from kp_scorer.adapters.continuations import Chats, remember
from kp_scorer.adapters.formats import FORMATS, format_of
from kp_scorer.adapters.node import Node, as_json, skipped_in, source, unread_in
from kp_scorer.adapters.pieces import is_error
from kp_scorer.adapters.programs import without_program_texts
from kp_scorer.adapters.written import with_written_calls
from kp_scorer.errors import NotConverted, NotRecorded
from kp_scorer.limits import Limits
from kp_scorer.trace import is_trace_id


class ConvertedRun(NamedTuple):
    """A run, and the trace of it as JSON, which may be submitted."""

    trace: dict[str, Any]
    run: Run


Converted = ConvertedRun | NotConverted

_MOST_CHATS: Final = 1_000  # The most chats that wait for a later one to continue them; beyond that the oldest is converted.
_MOST_RECORDS: Final = 50_000  # The most records of a run. A longer run fits into no trace, and would fill the memory.
_MOST_OPEN: Final = 100_000  # The most records of all open runs; beyond that the run that has waited longest is converted.
_MOST_ENDED: Final = 100_000  # The most ids of converted runs that are remembered, to refuse records that come too late.
_MOST_UNRECOGNIZED: Final = 100  # The most values of no format that are kept, as they may begin a session.
_MOST_NAMES: Final = 10_000  # The most names of unread fields that are counted. A source may invent any number of keys.


class _Key(NamedTuple):
    format: str
    run_id: str
    file: int = 0  # The number of the only file whose records may join the run; 0 if all may.


class Converter:
    """Converts each run as soon as it is complete, and holds the records of the others."""

    def __init__(self, supplied: SuppliedFields, limits: Limits, name: str = "") -> None:
        """Convert sources of the format of this ``name``; without one, detect the format of each source."""
        self.unread: Counter[str] = Counter()  # For each field that was not read, the number of converted runs that have it.
        self.counts: Counter[str] = Counter()
        """The number of converted ``traces``, of those without tools (``toolless``), of their ``steps``, ``calls`` of tools,
        ``errors`` and ``recoveries``; of chats that are not runs of their own, because another chat
        ``continued`` them; and of runs without an agent, which are ``left_out``."""
        self._supplied, self._limits, self._name = supplied, limits, name
        self._open: OrderedDict[_Key, list[Node]] = OrderedDict()  # The run with the newest record is last.
        self._open_records = 0
        self._ends: list[tuple[int, _Key]] = []  # A heap of the times at which runs are complete, with each run once.
        self._ending: set[_Key] = set()  # The runs in the heap.
        self._file = 1  # The number of the current file.
        self._of_file: dict[_Key, None] = {}  # The runs to convert, or to join with those of other files, at the file's end.
        self._identities: dict[bytes, None] = {}  # Digests of the identities of the records that were read.
        self._repeating: dict[_Key, None] = {}  # The open runs that have records which were read before.
        self._ids: dict[str, bytes] = {}  # The digest of a trace's content, by each id that the caller's path leads to.
        self.in_session = False  # True if the current file is a session: lines of unknown formats are skipped.
        self._unrecognized: list[Node] = []  # The first values of the file that have no format.
        self._unkept = 0  # The number of further ones before a session begins.
        self._latest: dict[str, str] = {}  # For each format, the id of the run with the newest record.
        self._ended: OrderedDict[_Key, bool] = OrderedDict()  # The converted runs; True once a late record was refused.
        self._switches: set[str] = set()  # The remedies named so far for instrumentations that record no messages.
        self._chats = Chats(self.counts)

    def feed(self, line: int, value: object) -> Iterator[Converted]:
        """Convert the runs that a source completes, which begins on this ``line`` of the input, counted from 1."""
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
        self.counts["skipped"] += not records
        for record in records:
            try:
                run_id = FORMATS[name].run_id(record)
            except Exception as error:
                yield _refusal(record, error)
                # Records that continue this one must not join the run before it.
                self._latest.pop(name, None)
                yield from self._close(_Key(name, ""))
                continue
            try:
                if run_id is None:
                    yield from self._convert(_Key(name, ""), [record])
                    continue
                latest = self._latest.get(name, "")
                key = _Key(name, run_id or latest, self._file * FORMATS[name].has_ids_of_files)
                before = self._open.get(key._replace(run_id=latest))
                if run_id and before and FORMATS[name].continues(before, record):
                    key = key._replace(run_id=latest)
                self._latest[name] = key.run_id
                if FORMATS[name].is_of_one_file and not self.in_session:
                    self.in_session = True
                    self._open_session(key)
                now = max(now, self._add(key, record))
            except Exception as error:
                yield _refusal(record, error)
            while self._open_records > _MOST_OPEN:
                yield from self._close(next(iter(self._open)))
        yield from self._close_ended(now)

    def has_records(self, line: int, value: object) -> bool:
        """Return whether a value is a source of the named format, or holds records of it; also if reading it fails."""
        try:
            return format_of(value) == self._name or bool(FORMATS[self._name].records(source(line, value)))
        except Exception:
            return True

    def skip_unrecognized(self, line: int, value: object) -> bool:
        """Skip and count a value of no known format if its file is a session; return whether it was skipped.

        Values that come before the first turn are kept for a while, because they may hold the id and the time of a session.
        """
        if self.in_session:
            self.counts["skipped"] += 1
        elif len(self._unrecognized) < _MOST_UNRECOGNIZED:
            self._unrecognized.append(Node(line, "", value))
        else:
            self._unkept += 1
        return self.in_session

    def end_file(self) -> Iterator[Converted]:
        """Convert the runs that are complete with this file, and join the others with their records in earlier files."""
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
        self.in_session = False
        self._unkept = 0
        self._unrecognized.clear()
        self._of_file.clear()
        self._repeating.clear()
        self._latest.clear()
        self._file += 1

    def end(self) -> Iterator[Converted]:
        """Convert the runs that are still open, and the chats that still wait."""
        while self._open:
            yield from self._close(next(iter(self._open)))
        yield from map(self._trace, self._chats.beyond(0))

    def _open_session(self, key: _Key) -> None:
        self.counts["skipped"] += self._unkept
        if FORMATS[key.format].is_general:
            for value in self._unrecognized:
                self._add(key, value)
        else:
            self.counts["skipped"] += len(self._unrecognized)
        self._unrecognized.clear()

    def _add(self, key: _Key, record: Node) -> int:
        """Add a record to its run; return the record's time, by which other runs may be complete.

        Raises NotConverted if the run was converted before.
        """
        if key in self._ended:
            if self._ended[key]:
                return 0
            self._ended[key] = True
            raise record.refusal("expected this record before its run was complete: the run has been converted without it")
        name = key.format
        if self._note_identities(FORMATS[name].identities(record)):
            self.counts["repeated"] += 1
            self._repeating[key] = None
            return 0
        if key.file or FORMATS[name].is_of_one_file:
            self._of_file.pop(key, None)
            self._of_file[key] = None  # The newest is last, as among the open runs.
        records = self._open.setdefault(key, [])
        self._open.move_to_end(key)
        if len(records) <= _MOST_RECORDS:
            records.append(record)
            self._open_records += 1
        try:
            if key not in self._ending and (end := FORMATS[name].ends(records)) is not None:
                heapq.heappush(self._ends, (end, key))
                self._ending.add(key)
            return FORMATS[name].starts(record)
        except NotConverted:
            # The record is refused together with its run.
            return 0

    def _note_identities(self, identities: Iterable[str]) -> bool:
        """Note that a record was read; return whether it was read before."""
        digests = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest() for text in identities]
        is_repeated = any(digest in self._identities for digest in digests)
        remember(self._identities, digests)
        return is_repeated

    def _close_ended(self, now: int) -> Iterator[Converted]:
        while self._ends and self._ends[0][0] <= now:
            key = heapq.heappop(self._ends)[1]
            try:
                later = FORMATS[key.format].waits(self._open.get(key, ()), now)
            except NotConverted:
                # A record without a time is refused together with its run.
                later = None
            if later is None:
                self._ending.remove(key)
                yield from self._close(key)
            else:
                heapq.heappush(self._ends, (later, key))

    def _pop(self, key: _Key) -> list[Node]:
        records = self._open.pop(key, [])
        self._open_records -= len(records)
        return records

    def _close(self, key: _Key) -> Iterator[Converted]:
        if records := self._pop(key):
            if key.run_id:
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
            made = read.run(key.run_id, [record._replace(reads=reads) for record in records])
            self.counts["left_out"] += made == []
            for run in made if isinstance(made, list) else [made]:
                run = run._replace(pieces=with_written_calls(without_program_texts(run.pieces)), records=records)
                if key in self._repeating and not run.pieces:
                    # Another file had everything that was said in this run.
                    continue
                if (read.has_chats or run.is_part) and run.pieces:
                    self._chats.hold(run)
                    yield from map(self._trace, self._chats.beyond(_MOST_CHATS))
                else:
                    self._chats.drop_parts_of(run)
                    yield self._trace(run)
        except NotRecorded as error:
            # Report each remedy once: it applies to a service, not to a run.
            if (expected := error.problems[0].expected) in self._switches or len(self._switches) > _MOST_UNRECOGNIZED:
                self.counts["mute"] += 1
            else:
                self._switches.add(expected)
                yield error
        except Exception as error:
            yield _refusal(records[0], error)

    def _trace(self, run: Run) -> Converted:
        try:
            trace, marks = trace_of(run, self._supplied, self._limits)
            if "id" in self._supplied.paths:
                trace["id"] = self._unique(trace)
        except Exception as error:
            return _refusal(run.node, error)
        paths = tuple(self._supplied.paths.values())
        unread = (name for name in sorted(unread_in(run.node)) if not any(f"{path}.".startswith(f"{name}.") for path in paths))
        self.unread.update(name for name in unread if name in self.unread or len(self.unread) < _MOST_NAMES)
        steps, calls = trace["steps"], sum("tool" in step for step in trace["steps"])
        self.counts.update(traces=1, toolless=int(not calls), steps=len(steps), calls=calls)
        self.counts["recoveries"] += sum(step["type"] == "error_recovery" for step in steps)
        self.counts.update(marks)
        self.counts["skipped"] += skipped_in(run.node)
        self.counts["bare"] += sum(piece.kind == "call" and piece.arguments is None for piece in run.pieces)
        self.counts["errors"] += sum(piece.kind == "result" and is_error(piece) for piece in run.pieces)
        return ConvertedRun(trace, run)

    def _unique(self, trace: dict[str, Any]) -> str:
        """Return the id of a trace, with a number if a trace of other content has the same id."""
        first_id, number = trace["id"], 1
        digest = hashlib.blake2b(as_json([trace["task"], trace["steps"], trace["outcome"]]).encode(), digest_size=8).digest()
        while self._ids.setdefault(trace["id"], digest) != digest:
            number += 1
            numbered_id = f"{first_id}-{number}"
            trace["id"] = numbered_id if is_trace_id(numbered_id) else trace_id("id", "", [first_id, number])
        self.counts["renumbered"] += number > 1
        return str(trace["id"])


def _refusal(node: Node, error: Exception) -> NotConverted:
    """Return any error as a refusal without its message, which may quote a record: a defect here must not stop other runs."""
    if isinstance(error, NotConverted):
        return error
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__} in {frame.name}:{frame.lineno}"
    refusal = node.refusal(f"expected a record that can be converted; kp-scorer has a defect: {where}")
    refusal.__cause__ = error
    return refusal
