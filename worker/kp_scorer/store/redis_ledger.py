"""The ledger in Redis: one hash a trace, changed only by scripts, so that no two processes see it half changed.

Every submission is counted once, as submitted, when it is first heard of, and once more, as decided or dead, when it has ended;
until then it is in the index of pending ones. So submitted = pending + decided + dead at every moment.
"""

import uuid
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, cast

import redis

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, ServiceUnavailable, TraceConflict
from kp_scorer.novelty.audit import Decided
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.ledger import Committed, Death, Identity, Record, Refusal, Standing, State, Verdict
from kp_scorer.store.names import hashes_named
from kp_scorer.store.scripts import lua_source
from kp_scorer.store.submissions import Claim, Counts, Submission, Waiting, letter_id_of

_CLAIMED_AT_ONCE: Final = 100
_READ_AT_ONCE: Final = 500
_LOOKED_THROUGH_AT_ONCE: Final = 5_000
"""Redis does nothing else meanwhile, for a millisecond or two."""
_WORKER_LEASE_MS: Final = 5_000
"""A worker that has not been heard of for this long is taken for dead: five times as long as between two renewals."""
LEASE_MS: Final = 5_000
"""A trace that its worker has not renewed for this long is held no longer, whether the worker lives or not."""
_WORKERS_REMEMBERED_MS: Final = 3_600_000


class RedisLedger:
    """Records of traces, each kept until it has ended and then for ``ttl_ms``; the ledger of one worker, or of a client."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_ms: int, lease_ms: int = LEASE_MS) -> None:
        """Use the ledger under the prefix of ``keys``; a trace begun here is held for ``lease_ms`` without another word."""
        self._client = client
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._lease_ms = lease_ms
        self.worker = uuid.uuid4().hex
        """What this worker is called among all."""
        self._deciding: set[str] = set()
        (
            self._open,
            self._begin,
            self._release,
            self._renew,
            self._commit,
            self._claim,
            self._resent,
            self._counts,
            self._erase,
        ) = (
            client.register_script(lua_source(__package__, name))
            for name in ("open", "begin", "release", "renew", "commit", "claim", "resent", "counts", "erase_record")
        )

    def open(self, submissions: Sequence[Submission]) -> list[State | TraceConflict]:
        """Note submissions as pending before they are sent, in one round trip.

        Returns:
            For each the state it has now (an earlier decision stands), or the conflict if its id was taken by another digest.

        Raises:
            ServiceUnavailable: the ledger cannot be reached, or Redis is nearly full and takes no more submissions.
        """
        keys = [*self._books(), *(self._keys.record(submission.trace_id) for submission in submissions)]
        states = self._run(self._open, keys, [part for one in submissions for part in (*one, letter_id_of(one.payload))])
        if states is None:
            raise ServiceUnavailable(
                "ledger: Redis is nearly full, what is left of its maxmemory is for deciding what waits; submit again later"
            )
        return [
            cast("State", state.decode()) if state else TraceConflict(submission.trace_id)
            for submission, state in zip(submissions, states, strict=True)
        ]

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Read records in one round trip, in order; None where nothing is known.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            pipeline = self._client.pipeline(transaction=False)
            for trace_id in trace_ids:
                pipeline.hmget(self._keys.record(trace_id), "state", "digest", "decision", "reason", "detail", "attempts")
            rows = pipeline.execute()
        return [_record(*row) if row[0] else None for row in rows]

    def waiting(self, trace_id: str) -> Waiting | None:
        """What is known of a pending trace; None if it is not pending.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            found: Any = self._client.hmget(self._keys.record(trace_id), "since_ms", "resends", "attempts", "submission")
        since_ms, resends, attempts, submission = found
        return Waiting(int(since_ms), int(resends or 0), int(attempts or 0), submission or b"") if since_ms else None

    def decided(self, trace_ids: Sequence[str]) -> list[Decided | None]:
        """Read decisions in one round trip, in order; None where there is none.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        return [
            Decided(Decision.model_validate_json(record.decision), record.digest) if record and record.decision else None
            for record in self.look_up(trace_ids)
        ]

    def all_decided(self) -> Iterator[Decided]:
        """Read every decision that is kept, in no order. One made meanwhile may be missing; none comes twice.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            found = hashes_named(self._client, self._keys.record(""), at_once=_READ_AT_ONCE)
            while trace_ids := list(islice(found, _READ_AT_ONCE)):
                yield from filter(None, self.decided(trace_ids))

    def begins(self, beginning: str, most: int) -> list[str] | None:
        """The ids of traces that begin so, ``most`` of them at most; in no order.

        It looks through the names of all keys in Redis, which takes a second for a million.

        Returns:
            The ids; None if this user of Redis may not look through names.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            found = hashes_named(self._client, self._keys.record(""), beginning, at_once=_LOOKED_THROUGH_AT_ONCE)
            try:
                return list(islice(found, most))
            except redis.exceptions.NoPermissionError:
                return None

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Begin to decide traces, in one round trip; see :class:`~kp_scorer.store.ledger.Ledger`."""
        keys = [*self._books(), self._keys.workers, *(self._keys.record(identity.trace_id) for identity in identities)]
        lease: list[str | int] = [self.worker, _WORKER_LEASE_MS, _WORKERS_REMEMBERED_MS, self._lease_ms, int(alone)]
        rows = self._run(self._begin, keys, [*lease, *(part for identity in identities for part in identity)])
        records = [_record(*row) for row in rows]
        self._deciding.update(
            identity.trace_id
            for identity, record in zip(identities, records, strict=True)
            if record.state == "pending" and record.digest == identity.digest and not record.is_held
        )
        return records

    def renew(self) -> None:
        """Say that this worker is alive, and renew what it is deciding. Any thread may say so.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        # Copied, as other threads begin and commit meanwhile.
        deciding = tuple(self._deciding)
        keys = [self._keys.workers, *map(self._keys.record, deciding)]
        held = self._run(self._renew, keys, [self.worker, _WORKER_LEASE_MS, _WORKERS_REMEMBERED_MS, self._lease_ms])
        self._deciding.difference_update(trace_id for trace_id, is_held in zip(deciding, held, strict=True) if not is_held)

    def release(self, trace_ids: Sequence[str]) -> None:
        """Hold traces no longer, in one round trip; see :class:`~kp_scorer.store.ledger.Ledger`."""
        self._deciding.difference_update(trace_ids)
        self._run(self._release, [self._keys.record(trace_id) for trace_id in trace_ids], [self.worker])

    def commit(self, verdicts: Sequence[Verdict], comparison: str = "") -> list[Committed]:
        """Store decisions in one round trip, the first end stands; see :class:`~kp_scorer.store.ledger.Ledger`."""
        records = (self._keys.record(verdict.trace_id) for verdict in verdicts)
        keys = [*self._books(), self._keys.tallies, self._keys.compared(comparison), *records]
        parts = (part for verdict in verdicts for part in _parts(verdict))
        replies = self._run(self._commit, keys, [self._ttl_ms, KEPT_S * 1_000, *parts])
        self._deciding.difference_update(verdict.trace_id for verdict in verdicts)
        return [_committed(verdict, *reply) for verdict, reply in zip(verdicts, replies, strict=True)]

    def claim_lost(self, resend_after_ms: int, *, queue_is_empty: bool) -> list[Claim]:
        """Claim pending submissions that nothing will bring back, to send them again; each is claimed by one caller.

        They were last sent more than ``resend_after_ms`` ago, and the queue has been seen empty since.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        arguments: list[str | int] = [
            self._keys.record(""),
            resend_after_ms,
            int(queue_is_empty),
            _CLAIMED_AT_ONCE,
            KEPT_S * 1_000,
        ]
        rows = self._run(self._claim, [*self._books(), self._keys.drained], arguments)
        return [Claim(trace_id.decode(), payload, resends, digest) for trace_id, payload, resends, digest in rows]

    def resent(self, trace_id: str) -> None:
        """Note that a claimed submission has been sent again.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        self._run(self._resent, [self._keys.pending, self._keys.record(trace_id)], [trace_id])

    def counts(self) -> Counts:
        """Count the submissions, as of one moment.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        return Counts(*self._run(self._counts, self._books(), []))

    def oldest_pending_s(self) -> float:
        """Seconds since the pending submission was sent that was sent first, by Redis' clock; 0 if none is pending.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            first: Any = self._client.zrange(self._keys.pending, 0, 0, withscores=True)
            seconds, microseconds = self._client.time()
        return max(0.0, seconds + microseconds / 1e6 - first[0][1] / 1_000) if first else 0.0

    def erase(self, trace_id: str) -> int:
        """Remove a trace's record, its decision with it; return how many there were (0 or 1).

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        return int(self._run(self._erase, [*self._books(), self._keys.record(trace_id)], [trace_id]))

    def _books(self) -> tuple[str, str]:
        return self._keys.pending, self._keys.counts

    def _run(self, script: Any, keys: Sequence[str], arguments: Sequence[bytes | str | int]) -> Any:
        with unavailable_if_down("ledger"):
            return script(keys=keys, args=arguments)


def _parts(verdict: Verdict) -> tuple[bytes | str | int, ...]:
    """A verdict as the script takes it."""
    tally = verdict.tally
    return (*verdict[:-1], tally.domain, int(tally.is_known), tally.outcomes)


def _record(
    state: bytes, digest: bytes, decision: bytes, reason: bytes, detail: bytes, attempts: int | bytes, is_held: int = 0
) -> Record:
    return Record(
        state=cast("State", state.decode()),
        digest=digest or b"",
        decision=decision or b"",
        reason=cast("Reason", reason.decode()) if reason else None,
        detail=(detail or b"").decode(),
        attempts=int(attempts or 0),
        is_held=bool(is_held),
    )


def _committed(verdict: Verdict, outcome: bytes, *found: bytes) -> Committed:
    match outcome:
        case b"stored":
            return Standing(verdict.decision, is_own=True)
        case b"stands":
            return Standing(found[0], is_own=False)
        case b"dead":
            reason, detail = found
            return Death(cast("Reason", reason.decode()), detail.decode())
        case _:
            return Refusal(outcome.decode())
