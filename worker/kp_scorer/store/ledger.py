"""The ledger in Redis: one hash for each trace, which only scripts change, so that no process sees it half changed."""

import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, cast

import redis

from kp_scorer.errors import QueueFull, TraceConflict, TraceDead
from kp_scorer.gate import GateBounds
from kp_scorer.store.connection import reports_outages
from kp_scorer.store.fact_streams import RedisFacts
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.ledger_reader import LedgerReader, record_in
from kp_scorer.store.records import (
    Committed,
    Identity,
    LostSubmission,
    MemoryLedger,
    Record,
    Revised,
    Revision,
    Submission,
    TraceState,
    Verdict,
    dead_letter_id_of,
    text_in,
)
from kp_scorer.store.scripts import nothing, rows, script

_CLAIMED_AT_ONCE: Final = 100
_READ_AT_ONCE: Final = 500
_WORKER_LEASE_MS: Final = 5_000  # A worker that has not reported for this long, five times its interval, counts as dead.
LEASE_MS: Final = 5_000
"""A lease ends if its worker has not renewed it for this long, whether the worker lives or not."""
_WORKERS_REMEMBERED_MS: Final = 3_600_000


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


def _committed(trace_id: str, outcome: bytes, decision: bytes = b"", reason: bytes = b"", detail: bytes = b"") -> Committed:
    if outcome in (b"stands", b"dead"):
        record = record_in(b"decided" if decision else b"dead", b"", decision, reason, detail, 0)
        # A record without a decision has a reason.
        return record.decision or TraceDead(trace_id, record.reason, record.detail)  # type: ignore[arg-type]
    return TraceConflict(trace_id) if outcome == b"conflict" else outcome.decode()  # type: ignore[return-value]  # by commit.lua


@script(tuple[int, list[bytes]])
def _submit(*, keys: Keys, submissions: Sequence[_SubmissionRow]) -> None: ...


@script(rows(record_in))
def _acquire(*, keys: Keys, lease: _Lease, alone: bool, identities: Sequence[Identity]) -> None: ...


@script(list[int])
def _renew(*, keys: Keys, report: str, text: str, lease: _Lease, trace_ids: Sequence[str]) -> None: ...


@script(nothing)
def _release(*, keys: Keys, worker: str, trace_ids: Sequence[str]) -> None: ...


@script(list[list[bytes]])
def _commit(
    *, keys: Keys, facts: str, kept_facts: str, record_ttl_ms: int, bounds: GateBounds, verdicts: Sequence[Verdict]
) -> None: ...


@script(list[list[bytes]])
def _revise(
    *, keys: Keys, facts: str, kept_facts: str, record_ttl_ms: int, bounds: GateBounds, revisions: Sequence[Revision]
) -> None: ...


@script(rows(lambda trace_id, *fields: LostSubmission(text_in(trace_id), *fields)))
def _claim_lost(
    *, keys: Keys, resend_after_ms: int, lease_ms: int, empty_ms_ago: int, most: int, forget_after_ms: int, wait_ms: int
) -> None: ...


@script(nothing)
def _count_resend(*, keys: Keys, trace_id: str) -> None: ...


@script(lambda states: [text_in(state) for state in states])
def _label(*, keys: Keys, labels: Sequence[_Label]) -> None: ...


@script(list[int])
def _erase_records(*, keys: Keys, trace_ids: Sequence[str]) -> None: ...


@reports_outages("ledger")
class RedisLedger(LedgerReader):
    """The records of traces and their transitions, for one worker or one client."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_ms: int, lease_ms: int = LEASE_MS) -> None:
        """Keep records for ``ttl_ms`` after their end, and hold a trace for ``lease_ms`` after each renewal."""
        super().__init__(client, keys)
        self._ttl_ms = ttl_ms
        self.worker = uuid.uuid4().hex  # The id of this worker, unique among all.
        self._lease = _Lease(self.worker, _WORKER_LEASE_MS, _WORKERS_REMEMBERED_MS, lease_ms)
        self._deciding: set[str] = set()
        # True if commits must carry their traces for the stream of copies. Until the first renewal this is unknown, so they do.
        self.copies_traces = True
        self.facts = RedisFacts(client, keys, "", GateBounds(0, 0))  # Commits store facts here; without a gate there are none.

    def load_scripts(self) -> None:
        """Load the script that clients call but may not load; make the secret of late outcomes, unless there is one."""
        if not self._client.script_exists(_submit.sha)[0]:
            _submit.load(self._client)
        self._client.set(self._keys.outcome_secret, secrets.token_hex(16), nx=True)

    def submit(self, submissions: Sequence[Submission]) -> list[TraceState | TraceConflict]:
        """Note submissions as pending before they are sent. Idempotent.

        Return for each the state that it has now (an earlier decision stands), or the conflict if its id belongs to another
        digest. Raises QueueFull if Redis is nearly full.
        """
        noted = [_SubmissionRow(each, dead_letter_id_of(each.payload)) for each in submissions]
        has_room, states = _submit(self._client, keys=self._keys, submissions=noted)
        if not has_room:
            raise QueueFull(
                "ledger: Redis is nearly full, and the rest of its maxmemory is for deciding waiting traces; submit again later"
            )
        return [
            cast("TraceState", state.decode()) if state else TraceConflict(submission.trace_id)
            for submission, state in zip(submissions, states, strict=True)
        ]

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
        """Note that this worker is alive, store its report, renew its leases, and check whether decided traces must be copied.

        Any thread may call this.
        """
        # Use MEMORY USAGE, because users of an earlier version of users.acl may not call EXISTS.
        self.copies_traces = self._client.memory_usage(self._keys.copies) is not None
        # Copy the ids, as other threads acquire and commit meanwhile.
        deciding = tuple(self._deciding)
        key = self._keys.worker(self.worker)
        holds = _renew(self._client, keys=self._keys, report=key, text=report, lease=self._lease, trace_ids=deciding)
        self._deciding.difference_update(trace_id for trace_id, is_held in zip(deciding, holds, strict=True) if not is_held)

    def release(self, trace_ids: Sequence[str]) -> None:
        """End the leases of traces that could not be decided, so that another worker need not wait until they expire."""
        self._deciding.difference_update(trace_ids)
        # If Redis cannot be reached, the leases expire, because nobody renews them any more.
        with suppress(redis.exceptions.RedisError):
            _release(self._client, keys=self._keys, worker=self.worker, trace_ids=trace_ids)

    def commit(self, verdicts: Sequence[Verdict]) -> list[Committed]:
        """Store each decision, in order, unless its trace has ended. A trace ends only once, so repeating a commit is safe."""
        return self._end(_commit, [verdict.trace_id for verdict in verdicts], verdicts=verdicts)

    def revise(self, revisions: Sequence[Revision]) -> list[Revised]:
        """Store revisions, or make late outcomes wait for traces. An outcome ends only once, so repeating a call is safe."""
        return self._end(_revise, [revision.outcome_id for revision in revisions], revisions=revisions)

    def _end(self, run: Callable[..., list[list[bytes]]], trace_ids: Sequence[str], **ends: Sequence[Any]) -> list[Any]:
        """Run the script that stores the ends of these submissions; return what it replies for each."""
        log, kept = self.facts.keys.log, self.facts.kept_keys.log
        bounds = {"record_ttl_ms": self._ttl_ms, "bounds": self.facts.bounds}
        replies = run(self._client, keys=self._keys, facts=log, kept_facts=kept, **bounds, **ends)
        self._deciding.difference_update(trace_ids)
        return [_committed(trace_id, *reply) for trace_id, reply in zip(trace_ids, replies, strict=True)]

    def claim_lost(self, resend_after_ms: int, *, empty_ms_ago: int) -> list[LostSubmission]:
        """Claim pending submissions whose messages are lost, to send them again; only one caller claims each.

        Such a submission was last sent more than ``resend_after_ms`` ago, and every queue has been empty since then. The caller
        has seen every queue empty within the last ``empty_ms_ago``; -1 if it has not seen all of them empty.
        """
        return _claim_lost(
            self._client,
            keys=self._keys,
            resend_after_ms=resend_after_ms,
            lease_ms=self._lease.lease_ms,
            empty_ms_ago=empty_ms_ago,
            most=_CLAIMED_AT_ONCE,
            forget_after_ms=KEPT_S * 1_000,
            wait_ms=self._ttl_ms,
        )

    def count_resend(self, trace_id: str) -> None:
        """Count a resend of a claimed submission."""
        _count_resend(self._client, keys=self._keys, trace_id=trace_id)

    def label(self, labels: Mapping[str, bool]) -> dict[str, str]:
        """Label decided traces as good or not; return the state of each that is not decided: pending, dead or unknown."""
        rows = [_Label(trace_id, "good" if good else "bad") for trace_id, good in labels.items()]
        chunks = (rows[start : start + _READ_AT_ONCE] for start in range(0, len(rows), _READ_AT_ONCE))
        states = [state for chunk in chunks for state in _label(self._client, keys=self._keys, labels=chunk)]
        return {each: state or "unknown" for each, state in zip(labels, states, strict=True) if state != "decided"}

    def erase(self, *trace_ids: str) -> list[int]:
        """Remove the records of traces, with their decisions and late outcomes; return how many each trace had (0 or 1)."""
        all_ids = [*trace_ids, *self.late_outcomes(*trace_ids)]
        return _erase_records(self._client, keys=self._keys, trace_ids=all_ids)[: len(trace_ids)]


Ledger = RedisLedger | MemoryLedger  # MemoryLedger implements only what deciding needs.
