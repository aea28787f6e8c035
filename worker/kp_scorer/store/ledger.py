"""The ledger in Redis: one hash for each trace, which only scripts change, so that no process sees it half changed."""

import re
import secrets
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import islice
from typing import Any, Final, NamedTuple, cast

import redis

from kp_scorer.decision import Decision
from kp_scorer.errors import REASONS, QueueFull, ServiceUnavailable, TraceConflict, TraceDead
from kp_scorer.gate import GateBounds
from kp_scorer.novelty.verification import DecidedTrace
from kp_scorer.store.connection import names_of, reports_outages
from kp_scorer.store.fact_streams import RedisFacts
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.records import (
    DAMAGED_DECISION,
    Committed,
    Identity,
    LostSubmission,
    MemoryLedger,
    Record,
    Revised,
    Revision,
    Submission,
    SubmissionCounts,
    Tallies,
    TraceState,
    Verdict,
    dead_letter_id_of,
    number_in,
    parsed_in,
    text_in,
)
from kp_scorer.store.scripts import nothing, row, rows, script
from kp_scorer.trace import OUTCOME_ID_PREFIX, LateOutcome, begins

_CLAIMED_AT_ONCE: Final = 100
_READ_AT_ONCE: Final = 500
_WORKER_LEASE_MS: Final = 5_000  # A worker that has not reported for this long, five times its interval, counts as dead.
LEASE_MS: Final = 5_000
"""A lease ends if its worker has not renewed it for this long, whether the worker lives or not."""
_WORKERS_REMEMBERED_MS: Final = 3_600_000
_TEXTS: Final = (
    *("state", "since_ms", "decision", "revised", "submission", "entry", "label", "reason", "detail", "letter", "outcomes"),
)
_WHOLE_AT_ONCE: Final = 100  # Each may have the text of a trace, of a megabyte.
_LOOKED_UP: Final = ("state", "digest", "decision", "reason", "detail", "attempts", "since_ms", "resends", "label", "revised")


class _Lease(NamedTuple):
    worker: str
    worker_lease_ms: int
    remembered_ms: int
    lease_ms: int


class _Label(NamedTuple):
    trace_id: str
    label: str


class _SubmissionRow(NamedTuple):
    submission: Submission
    dead_letter_id: str


def _record(
    state: bytes, digest: bytes, decision: bytes, reason: bytes, detail: bytes, attempts: int | bytes, is_held: int = 0
) -> Record:
    """Read a record's fields. Anyone with write access to Redis can have changed them."""
    if state == b"decided":
        decided = parsed_in(Decision, decision)
        return Record("decided", digest or b"", decided) if decided else _damaged(digest, DAMAGED_DECISION)
    if state == b"dead":
        if (cause := text_in(reason)) not in REASONS:
            return _damaged(digest, "the ledger's record of it, reason: expected why the trace is dead")
        return Record("dead", digest or b"", None, cause, text_in(detail))
    if state != b"pending":
        return _damaged(digest, "the ledger's record of it, state: expected pending, decided or dead")
    return Record("pending", digest or b"", attempts=number_in(attempts), is_held=bool(is_held))


def _damaged(digest: bytes, problem: str) -> Record:
    return Record("dead", digest or b"", None, "damaged", problem)


def _committed(trace_id: str, outcome: bytes, decision: bytes = b"", reason: bytes = b"", detail: bytes = b"") -> Committed:
    if outcome in (b"stands", b"dead"):
        record = _record(b"decided" if decision else b"dead", b"", decision, reason, detail, 0)
        # A record without a decision has a reason.
        return record.decision or TraceDead(trace_id, record.reason, record.detail)  # type: ignore[arg-type]
    return TraceConflict(trace_id) if outcome == b"conflict" else outcome.decode()  # type: ignore[return-value]  # by commit.lua


def _looked_up(reply: Any) -> Record | None:
    if isinstance(reply, redis.exceptions.ResponseError) and "WRONGTYPE" in str(reply):
        return _damaged(b"", "the ledger's record of it: expected a hash")
    if isinstance(reply, Exception):
        raise reply
    state, digest, *fields, since_ms, resends, label, revised = reply
    if state is None and not any((*fields, since_ms, resends)):
        # The trace has no record, or one with only a place.
        return None
    record, good = _record(state, digest, *fields), {b"good": True, b"bad": False}.get(label)
    if record.decision and revised is not None:
        record = _record(state, digest, revised, *fields[1:])._replace(first=record.decision)
        late = record.decision and record.decision.revised_by
        good = late.success if good is None and late else good
    return record._replace(since_ms=number_in(since_ms), resends=number_in(resends), good=good)


@script(tuple[int, list[bytes]])
def _submit(*, keys: Keys, submissions: Sequence[_SubmissionRow]) -> None: ...


@script(rows(_record))
def _acquire(*, keys: Keys, lease: _Lease, alone: bool, identities: Sequence[Identity]) -> None: ...


@script(list[int])
def _renew(*, keys: Keys, report: str, text: str, lease: _Lease, trace_ids: Sequence[str]) -> None: ...


@script(nothing)
def _release(*, keys: Keys, worker: str, trace_ids: Sequence[str]) -> None: ...


@script(list[list[bytes]])
def _commit(
    *,
    keys: Keys,
    facts: str,
    kept_facts: str,
    record_ttl_ms: int,
    bounds: GateBounds,
    verdicts: Sequence[Verdict],
) -> None: ...


@script(list[list[bytes]])
def _revise(*, keys: Keys, record_ttl_ms: int, revisions: Sequence[Revision]) -> None: ...


@script(rows(lambda trace_id, *fields: LostSubmission(text_in(trace_id), *fields)))
def _claim_lost(
    *, keys: Keys, resend_after_ms: int, empty_ms_ago: int, most: int, forget_after_ms: int, wait_ms: int
) -> None: ...


@script(nothing)
def _count_resend(*, keys: Keys, trace_id: str) -> None: ...


@script(row(SubmissionCounts))
def _counts(*, keys: Keys) -> None: ...


@script(lambda states: [text_in(state) for state in states])
def _label(*, keys: Keys, labels: Sequence[_Label]) -> None: ...


@script(list[int])
def _erase_records(*, keys: Keys, trace_ids: Sequence[str]) -> None: ...


@reports_outages("ledger")
class RedisLedger:
    """The records of traces, for one worker or one client; ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_ms: int, lease_ms: int = LEASE_MS) -> None:
        """Keep records for ``ttl_ms`` after their end, and hold a trace for ``lease_ms`` after each renewal."""
        self._client = client
        self._keys = keys
        self._ttl_ms = ttl_ms
        self.worker = uuid.uuid4().hex  # The id of this worker, unique among all.
        self._lease = _Lease(self.worker, _WORKER_LEASE_MS, _WORKERS_REMEMBERED_MS, lease_ms)
        self._deciding: set[str] = set()
        # Commits carry traces to be copied. Before the first renewal they may do so in vain, so that no copy is left out.
        self.copies_traces = True
        self.facts = RedisFacts(client, keys, "", GateBounds(0, 0))  # Where commits store facts; without a gate there are none.
        self.damaged: dict[str, str] = {}
        """By trace id: the damage of each record that :meth:`decided` and :meth:`all_decided` left out."""

    def load_scripts(self) -> None:
        """Load the script that clients call, as they may load none, unless Redis has it. A restarted Redis has no scripts.

        With it the secret of late outcomes is made, which an emptied Redis has not.
        """
        if not self._client.script_exists(_submit.sha)[0]:
            _submit.load(self._client)
        self._client.set(self._keys.outcome_secret, secrets.token_hex(16), nx=True)

    def outcome_secret(self) -> str:
        """Return the secret for :func:`~kp_scorer.trace.outcome_key`; ServiceUnavailable until a worker has made it."""
        secret: Any = self._client.get(self._keys.outcome_secret)
        if not secret:
            raise ServiceUnavailable("ledger: it has no secret of late outcomes yet: start a worker")
        return text_in(secret)

    def submit(self, submissions: Sequence[Submission]) -> list[TraceState | TraceConflict]:
        """Note submissions as pending before they are sent. Idempotent.

        Return for each the state that it has now (an earlier decision stands), or the conflict if its id belongs to another
        digest. QueueFull if Redis is nearly full.
        """
        noted = [_SubmissionRow(each, dead_letter_id_of(each.payload)) for each in submissions]
        has_room, states = _submit(self._client, keys=self._keys, submissions=noted)
        if not has_room:
            raise QueueFull(
                "ledger: Redis is nearly full, what is left of its maxmemory is for deciding what waits; submit again later"
            )
        return [
            cast("TraceState", state.decode()) if state else TraceConflict(submission.trace_id)
            for submission, state in zip(submissions, states, strict=True)
        ]

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Read records, in order; None for a trace that has none."""
        pipeline = self._client.pipeline(transaction=False)
        for trace_id in trace_ids:
            pipeline.hmget(self._keys.record(trace_id), _LOOKED_UP)
        return [_looked_up(reply) for reply in pipeline.execute(raise_on_error=False)]

    def decided(self, trace_ids: Sequence[str]) -> list[DecidedTrace | None]:
        """Read decisions, in order; None for a trace that has none. Damaged records are noted in :attr:`damaged`."""
        decided: list[DecidedTrace | None] = []
        for trace_id, record in zip(trace_ids, self.look_up(trace_ids), strict=True):
            if record and record.reason == "damaged":
                self.damaged[trace_id] = record.detail
            if record and record.decision:
                decided.append(DecidedTrace(record.decision, record.digest, record.good, record.first))
            else:
                decided.append(None)
        return decided

    def all_decided(self, among: Iterable[str] | None = None) -> Iterator[DecidedTrace]:
        """Yield every stored decision, in no order, or those of the traces with these ids.

        A decision made meanwhile may be missing. One may come twice if Redis loses most of its keys meanwhile.
        """
        trace_ids = iter(self._scan() if among is None else among)
        while chunk := list(islice(trace_ids, _READ_AT_ONCE)):
            yield from filter(None, self.decided(chunk))

    def labelled(self, among: Iterable[str] | None = None) -> Iterator[str]:
        """Yield the ids of all traces with a label, or of those among these ids, in no order. No decision is read."""
        trace_ids = iter(self._scan() if among is None else among)
        while chunk := list(islice(trace_ids, _READ_AT_ONCE)):
            pipeline = self._client.pipeline(transaction=False)
            for trace_id in chunk:
                pipeline.hstrlen(self._keys.record(trace_id), "label")
                pipeline.hstrlen(self._keys.record(trace_id), "revised")
            replies = pipeline.execute(raise_on_error=False)
            # A key of another type is an error in both replies.
            either = zip(chunk, replies[::2], replies[1::2], strict=True)
            yield from (trace_id for trace_id, *lengths in either if any(isinstance(each, int) and each for each in lengths))

    def records(self, among: Iterable[str] | None = None, part: str = "") -> Iterator[tuple[str, dict[str, str]]]:
        """Yield the id of every record with its fields that are texts, in no order; or of those among these ids.

        Late outcomes have records, too. ``part`` leaves out ids that do not contain it.
        """
        trace_ids = iter(self._scan_all(part) if among is None else among)
        while chunk := list(islice(trace_ids, _WHOLE_AT_ONCE)):
            pipeline = self._client.pipeline(transaction=False)
            for trace_id in chunk:
                pipeline.hmget(self._keys.record(trace_id), _TEXTS)
            for trace_id, reply in zip(chunk, pipeline.execute(raise_on_error=False), strict=True):
                # A key of another type is an error.
                texts = dict(zip(_TEXTS, reply, strict=True)) if isinstance(reply, list) else {}
                if fields := {name: text_in(value) for name, value in texts.items() if value is not None}:
                    yield trace_id, fields

    def sample(self, most: int) -> tuple[list[str], int]:
        """Return the ids of up to ``most`` records chosen at random, and the number of all records."""
        count = 0

        def counted() -> Iterator[str]:
            nonlocal count
            for trace_id in self._scan():
                count += 1
                yield trace_id

        # Python salts the hash of texts in each process, so the choice is random; an id that comes twice has one hash.
        return list(dict.fromkeys(nsmallest(most, counted(), key=hash))), count

    def ids_beginning(self, beginning: str, most: int) -> list[str] | None:
        """Return the ids of at most ``most`` traces with this beginning, in no order; None without the permission to look.

        Redis scans the names of all its keys, which takes a second for a million.
        """
        try:
            return list(islice((each for each in self._scan(beginning) if begins(each, beginning)), most))
        except redis.exceptions.NoPermissionError:
            return None

    def acquire(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Read the records of traces about to be decided, in order, and create missing ones.

        From now on the worker holds a pending trace, by a lease, until it commits, dead-letters or releases it. If another
        worker held it and is gone, the trace is charged with an attempt. A trace with attempts is held only if it is decided
        ``alone``, so that no other trace is charged if it ends the worker.
        """
        records = _acquire(self._client, keys=self._keys, lease=self._lease, alone=alone, identities=identities)
        self._deciding.update(
            identity.trace_id
            for identity, record in zip(identities, records, strict=True)
            if record.state == "pending" and record.digest == identity.digest and not record.is_held
        )
        return records

    def renew(self, report: str) -> None:
        """Note that this worker is alive, store its report, and renew its leases; look whether decided traces are to be copied.

        Any thread may call this.
        """
        # By a command that users of earlier versions of users.acl may call, as they may not EXISTS.
        self.copies_traces = self._client.memory_usage(self._keys.copies) is not None
        # Copy the ids, as other threads acquire and commit meanwhile.
        deciding = tuple(self._deciding)
        key = self._keys.worker(self.worker)
        holds = _renew(self._client, keys=self._keys, report=key, text=report, lease=self._lease, trace_ids=deciding)
        self._deciding.difference_update(trace_id for trace_id, is_held in zip(deciding, holds, strict=True) if not is_held)

    def release(self, trace_ids: Sequence[str]) -> None:
        """End the leases of traces that could not be decided."""
        self._deciding.difference_update(trace_ids)
        _release(self._client, keys=self._keys, worker=self.worker, trace_ids=trace_ids)

    def commit(self, verdicts: Sequence[Verdict]) -> list[Committed]:
        """Store each decision, in order, unless its trace has ended. The first end stands, so repeating a commit is safe."""
        replies = _commit(
            self._client,
            keys=self._keys,
            facts=self.facts.keys.log,
            kept_facts=self.facts.kept_keys.log,
            record_ttl_ms=self._ttl_ms,
            bounds=self.facts.bounds,
            verdicts=verdicts,
        )
        self._deciding.difference_update(verdict.trace_id for verdict in verdicts)
        return [_committed(verdict.trace_id, *reply) for verdict, reply in zip(verdicts, replies, strict=True)]

    def revise(self, revisions: Sequence[Revision]) -> list[Revised]:
        """Store revisions, each once, or have late outcomes wait. The first end stands, so repeating this is safe."""
        replies = _revise(self._client, keys=self._keys, record_ttl_ms=self._ttl_ms, revisions=revisions)
        self._deciding.difference_update(revision.outcome_id for revision in revisions)
        replied = zip(revisions, replies, strict=True)
        return [cast("Revised", _committed(revision.outcome_id, *reply)) for revision, reply in replied]

    def claim_lost(self, resend_after_ms: int, *, empty_ms_ago: int) -> list[LostSubmission]:
        """Claim pending submissions whose messages are lost, to send them again; only one caller claims each.

        They were last sent more than ``resend_after_ms`` ago, and every queue has been empty since: ``empty_ms_ago`` for the
        one where that is longest ago, or -1 if the caller has not seen all of them empty.
        """
        return _claim_lost(
            self._client,
            keys=self._keys,
            resend_after_ms=resend_after_ms,
            empty_ms_ago=empty_ms_ago,
            most=_CLAIMED_AT_ONCE,
            forget_after_ms=KEPT_S * 1_000,
            wait_ms=self._ttl_ms,
        )

    def count_resend(self, trace_id: str) -> None:
        """Count a resend of a claimed submission."""
        _count_resend(self._client, keys=self._keys, trace_id=trace_id)

    def counts(self) -> SubmissionCounts:
        """Count the submissions, as of one moment."""
        return _counts(self._client, keys=self._keys)

    def tallies(self) -> Tallies:
        """Return the tallies of decisions, each with the largest first."""
        fields: Any = self._client.hgetall(self._keys.tallies)
        counts: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for field, count in sorted(fields.items()):
            kind, _, name = text_in(field).partition(" ")
            counts[kind][name] = number_in(count)
        return Tallies(*(dict(Counter(counts[kind]).most_common()) for kind in ("decided", "guard", "revised")))

    def oldest_pending_s(self) -> float:
        """Return the seconds since the oldest pending submission was last sent, by Redis' clock; 0 if none is pending."""
        oldest: Any = self._client.zrange(self._keys.pending, 0, 0, withscores=True)
        seconds, microseconds = self._client.time()
        # Another application wrote a time before 1970; the submission resender removes it.
        is_sent = oldest and oldest[0][1] > 0
        return max(0.0, seconds + microseconds / 1e6 - oldest[0][1] / 1_000) if is_sent else 0.0

    def label(self, labels: Mapping[str, bool]) -> dict[str, str]:
        """Label decided traces as good or not; return the states of the others: pending, dead or unknown."""
        states: dict[str, str] = {}
        left = iter(labels)
        while trace_ids := list(islice(left, _READ_AT_ONCE)):
            rows = [_Label(each, "good" if labels[each] else "bad") for each in trace_ids]
            replies = _label(self._client, keys=self._keys, labels=rows)
            states.update(zip(trace_ids, replies, strict=True))
        return {trace_id: state or "unknown" for trace_id, state in states.items() if state != "decided"}

    def late_outcomes(self, *trace_ids: str) -> list[str]:
        """Return the ids of late outcomes of traces, also of those that wait for one."""
        pipeline = self._client.pipeline(transaction=False)
        for trace_id in trace_ids:
            pipeline.hget(self._keys.record(trace_id), "outcomes")
        replies = pipeline.execute(raise_on_error=False)
        return [outcome_id for listed in replies if isinstance(listed, bytes) for outcome_id in text_in(listed).split()]

    def waiting_outcome(self, trace_id: str) -> LateOutcome | None:
        """Return the first late outcome that waits for a trace; None if none does."""
        for outcome_id in self.late_outcomes(trace_id):
            submission: Any = self._client.hget(self._keys.record(outcome_id), "submission")
            if late := parsed_in(LateOutcome, submission):
                return late
        return None

    def erase(self, *trace_ids: str) -> list[int]:
        """Remove the records of traces, their decisions and late outcomes with them; return how many each had (0 or 1)."""
        all_ids = [*trace_ids, *self.late_outcomes(*trace_ids)]
        return _erase_records(self._client, keys=self._keys, trace_ids=all_ids)[: len(trace_ids)]

    def _scan(self, part: str = "") -> Iterator[str]:
        return (trace_id for trace_id in self._scan_all(part) if not trace_id.startswith(OUTCOME_ID_PREFIX))

    def _scan_all(self, part: str) -> Iterator[str]:
        start = self._keys.record_prefix
        prefix, middle = (re.sub(r"[][*?\\]", r"\\\g<0>", text) for text in (start, part))
        return (key.removeprefix(start) for key in names_of(self._client, f"{prefix}*{middle}*", "hash"))


Ledger = RedisLedger | MemoryLedger  # MemoryLedger implements only what deciding needs.
