"""Reads the ledger: the records of traces, and their counts."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from itertools import count, islice, product
from typing import Any, Final

import redis

from kp_scorer.decision import Decision
from kp_scorer.errors import REASONS, ServiceUnavailable
from kp_scorer.novelty.verification import DecidedTrace
from kp_scorer.store.connection import in_one_trip, names_of, reports_outages
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import DAMAGED_DECISION, Record, SubmissionCounts, Tallies, number_in, parsed_in, text_in
from kp_scorer.store.scripts import row, script
from kp_scorer.trace import OUTCOME_ID_PREFIX, LateOutcome, has_beginning

_READ_AT_ONCE: Final = 500
_MOST_OLDEST: Final = 10_000  # The most pending submissions among which the oldest trace is looked for.
_WHOLE_AT_ONCE: Final = 100  # More could take too much memory: a record may hold a trace, which may have a megabyte.
_TEXTS: Final = (
    *("state", "since_ms", "decision", "revised", "submission", "entry", "label", "reason", "detail", "letter", "outcomes"),
)
_LOOKED_UP: Final = ("state", "digest", "decision", "reason", "detail", "attempts", "since_ms", "resends", "label", "revised")


def record_in(
    state: bytes, digest: bytes, decision: bytes, reason: bytes, detail: bytes, attempts: int | bytes, is_held: int = 0
) -> Record:
    """Return the record with these fields, which anyone with write access to Redis may have changed."""
    if state == b"decided":
        decided = parsed_in(Decision, decision)
        return Record("decided", digest or b"", decided) if decided else _damaged(digest, DAMAGED_DECISION)
    if state == b"dead":
        if (cause := text_in(reason)) not in REASONS:
            return _damaged(digest, "the ledger's record of it, reason: expected the reason of a dead letter")
        return Record("dead", digest or b"", None, cause, text_in(detail))
    if state != b"pending":
        return _damaged(digest, "the ledger's record of it, state: expected pending, decided or dead")
    return Record("pending", digest or b"", attempts=number_in(attempts), is_held=bool(is_held))


def _damaged(digest: bytes, problem: str) -> Record:
    return Record("dead", digest or b"", None, "damaged", problem)


def _looked_up(reply: Any) -> Record | None:
    if isinstance(reply, redis.exceptions.ResponseError) and "WRONGTYPE" in str(reply):
        return _damaged(b"", "the ledger's record of it: expected a hash")
    if isinstance(reply, Exception):
        raise reply
    state, digest, *fields, since_ms, resends, label, revised = reply
    if state is None and not any((*fields, since_ms, resends)):
        # The trace has no record, or one with only a place.
        return None
    record, good = record_in(state, digest, *fields), {b"good": True, b"bad": False}.get(label)
    if record.decision and revised is not None:
        record = record_in(state, digest, revised, *fields[1:])._replace(first=record.decision)
        late = record.decision and record.decision.revised_by
        good = late.success if good is None and late else good
    return record._replace(since_ms=number_in(since_ms), resends=number_in(resends), good=good)


@script(row(SubmissionCounts))
def _counts(*, keys: Keys) -> None: ...


@reports_outages("ledger")
class LedgerReader:
    """Reads the records of traces, which takes no lease. Methods raise ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self.damaged: dict[str, str] = {}
        """The damage of each record that :meth:`decided` and :meth:`all_decided` left out, by trace id."""

    def outcome_secret(self) -> str:
        """Return the secret for :func:`~kp_scorer.trace.outcome_key`; raise ServiceUnavailable until a worker has made it."""
        secret: Any = self._client.get(self._keys.outcome_secret)
        if not secret:
            raise ServiceUnavailable("ledger: it has no secret of late outcomes yet: start a worker")
        return text_in(secret)

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Return the records of traces, in order and in one round trip; None for a trace that has none."""
        return [_looked_up(reply) for _, reply in self._fields(trace_ids, _LOOKED_UP)]

    def decided(self, trace_ids: Sequence[str]) -> list[DecidedTrace | None]:
        """Return the decisions on traces, in order; None for a trace that has none.

        Damaged records are noted in :attr:`damaged`.
        """
        return list(self._decided(trace_ids))

    def all_decided(self, among: Iterable[str] | None = None) -> Iterator[DecidedTrace]:
        """Yield every stored decision, in no order, or those on the traces ``among`` these ids.

        A decision that is made meanwhile may be missing. A decision may come twice if Redis loses most of its keys meanwhile.
        """
        yield from filter(None, self._decided(self._scan() if among is None else among, _READ_AT_ONCE))

    def labelled(self, among: Iterable[str] | None = None) -> Iterator[str]:
        """Yield the ids of traces, or of those ``among`` these, with a label or a revision, in no order; read no decisions."""
        trace_ids = iter(self._scan() if among is None else among)
        while chunk := list(islice(trace_ids, _READ_AT_ONCE)):
            fields = product(map(self._keys.record, chunk), ("label", "revised"))
            replies = in_one_trip(self._client, (("HSTRLEN", *field) for field in fields), raise_on_error=False)
            # If the key has another type, both replies are errors.
            either = zip(chunk, replies[::2], replies[1::2], strict=True)
            yield from (trace_id for trace_id, *lengths in either if any(isinstance(each, int) and each for each in lengths))

    def records(self, among: Iterable[str] | None = None, part: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the id of every record, or of those ``among`` these ids, with the fields that are texts, in no order.

        Late outcomes have records, too. Only ids that contain ``part`` are read.
        """
        for trace_id, reply in self._fields(self._scan_all(part) if among is None else among, _TEXTS, _WHOLE_AT_ONCE):
            # If the key has another type, the reply is an error.
            texts = dict(zip(_TEXTS, reply, strict=True)) if isinstance(reply, list) else {}
            if fields := {name: text_in(value) for name, value in texts.items() if value is not None}:
                yield trace_id, fields

    def sample(self, most: int) -> tuple[list[str], int]:
        """Return the ids of up to ``most`` records chosen at random, and the number of all records."""
        numbers = count()
        counted = (trace_id for trace_id, _ in zip(self._scan(), numbers, strict=False))
        # Python salts the hash of texts in each process, so the smallest hashes are a random choice. An id that comes twice has
        # the same hash, so it is chosen once.
        return list(dict.fromkeys(nsmallest(most, counted, key=hash))), next(numbers)

    def ids_beginning(self, beginning: str, most: int) -> list[str] | None:
        """Return the ids of at most ``most`` traces with this beginning, in no order; None without the permission to look."""
        # Redis scans the names of all its keys, which takes a second for a million.
        try:
            return list(islice((each for each in self._scan(beginning) if has_beginning(each, beginning)), most))
        except redis.exceptions.NoPermissionError:
            return None

    def counts(self) -> SubmissionCounts:
        """Return the numbers of submissions, as of one moment."""
        return _counts(self._client, keys=self._keys)

    def tallies(self) -> Tallies:
        """Return the tallies of decisions, each with the largest first."""
        fields: Any = self._client.hgetall(self._keys.tallies)
        tallies: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for field, number in sorted(fields.items()):
            kind, _, name = text_in(field).partition(" ")
            tallies[kind][name] = number_in(number)
        return Tallies(*(dict(tallies[kind].most_common()) for kind in ("decided", "guard", "revised")))

    def oldest_pending_s(self) -> float:
        """Return the seconds since the oldest pending trace was last sent, by Redis' clock; 0 if there is none."""
        # Late outcomes do not count: each may wait for its trace as long as records last. So it is 0 where the 10,000 oldest
        # submissions are all outcomes.
        seconds, microseconds = self._client.time()
        # A time before 1970 was written by another application; the submission resender removes the entry.
        sent_ms = (at_ms for name, at_ms in self._pending() if at_ms > 0 and not name.startswith(OUTCOME_ID_PREFIX))
        return max(0.0, seconds + microseconds / 1e6 - next(sent_ms, math.inf) / 1_000)

    def _pending(self) -> Iterator[tuple[str, float]]:
        """Yield the ids of the oldest pending submissions, in order, and the time at which each was last sent."""
        # Do not read all: every worker asks every ten seconds, and a million outcomes may wait for traces that nobody submits.
        for start in range(0, _MOST_OLDEST, _READ_AT_ONCE):
            read: Any = self._client.zrange(self._keys.pending, start, start + _READ_AT_ONCE - 1, withscores=True)
            if not read:
                return
            yield from ((text_in(name), at_ms) for name, at_ms in read)

    def late_outcomes(self, *trace_ids: str) -> list[str]:
        """Return the ids of late outcomes of traces, also of traces that are not decided yet."""
        replies = (reply for _, reply in self._fields(trace_ids, ["outcomes"]))
        listed = (text_in(reply[0]) for reply in replies if isinstance(reply, list))
        return [outcome_id for ids in listed for outcome_id in ids.split()]

    def waiting_outcome(self, trace_id: str) -> LateOutcome | None:
        """Return the first late outcome that waits for a trace; None if none does."""
        for outcome_id in self.late_outcomes(trace_id):
            submission: Any = self._client.hget(self._keys.record(outcome_id), "submission")
            if late := parsed_in(LateOutcome, submission):
                return late
        return None

    def _decided(self, trace_ids: Iterable[str], at_once: int | None = None) -> Iterator[DecidedTrace | None]:
        for trace_id, reply in self._fields(trace_ids, _LOOKED_UP, at_once):
            record = _looked_up(reply)
            if record and record.reason == "damaged":
                self.damaged[trace_id] = record.detail
            if record and record.decision:
                yield DecidedTrace(record.decision, record.digest, record.good, record.first)
            else:
                yield None

    def _fields(self, trace_ids: Iterable[str], names: Sequence[str], at_once: int | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the id of each trace with these fields of its record, or with an error; read all at once by default."""
        left = iter(trace_ids)
        while chunk := list(islice(left, at_once)):
            commands = (("HMGET", self._keys.record(trace_id), *names) for trace_id in chunk)
            yield from zip(chunk, in_one_trip(self._client, commands, raise_on_error=False), strict=True)

    def _scan(self, part: str = "") -> Iterator[str]:
        return (trace_id for trace_id in self._scan_all(part) if not trace_id.startswith(OUTCOME_ID_PREFIX))

    def _scan_all(self, part: str) -> Iterator[str]:
        start = self._keys.record_prefix
        prefix, middle = (re.sub(r"[][*?\\]", r"\\\g<0>", text) for text in (start, part))
        return (key.removeprefix(start) for key in names_of(self._client, f"{prefix}*{middle}*", "hash"))
