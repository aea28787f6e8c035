"""The ledger in Redis: one hash a trace, changed only by scripts, so that no two processes see it half changed.

Every submission is counted once, as submitted, when it is first heard of, and once more, as decided or dead, when it has ended;
until then it is in the index of pending ones. So submitted = pending + decided + dead at every moment.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import redis

from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, TraceConflict
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.ledger import Identity, Record, Standing, State, Verdict
from kp_scorer.store.scripts import lua_source

_CLAIMED_AT_ONCE: Final = 100


class Submission(NamedTuple):
    """A submission about to be sent: its trace's id, its 16-byte digest, and itself as UTF-8 JSON."""

    trace_id: str
    digest: bytes
    payload: bytes


class Claim(NamedTuple):
    """A submission to be sent again."""

    trace_id: str
    payload: bytes
    resends: int
    """How often it has been sent again, this time included."""


class Counts(NamedTuple):
    """How many submissions there have been, and what became of them: submitted = pending + decided + dead."""

    submitted: int
    pending: int
    decided: int
    dead: int


class RedisLedger:
    """Records of traces, each kept for ``ttl_ms`` after its last change, or for 30 days while it is pending."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_ms: int) -> None:
        """Use the ledger under the prefix of ``keys``."""
        self._client = client
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._pending_ttl_ms = max(ttl_ms, KEPT_S * 1_000)
        self._open, self._begin, self._commit, self._claim, self._counts, self._erase = (
            client.register_script(lua_source(__package__, name))
            for name in ("open", "begin", "commit", "claim", "counts", "erase_record")
        )

    def open(self, submissions: Sequence[Submission]) -> list[State | TraceConflict]:
        """Note submissions as pending before they are sent, in one round trip.

        Returns:
            For each the state it has now (an earlier decision stands), or the conflict if its id was taken by another digest.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        arguments = [self._pending_ttl_ms, *(part for submission in submissions for part in submission)]
        states = self._run(self._open, [submission.trace_id for submission in submissions], arguments)
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
        return [_record(row) if row[0] else None for row in rows]

    def decisions(self, trace_ids: Sequence[str]) -> list[Decision | None]:
        """Read decisions in one round trip, in order; None where there is none.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        return [
            Decision.model_validate_json(record.decision) if record and record.decision else None
            for record in self.look_up(trace_ids)
        ]

    def begin(self, identities: Sequence[Identity], *, alone: bool = False) -> list[Record]:
        """Begin to decide traces, in one round trip; see :class:`~kp_scorer.store.ledger.Ledger`."""
        arguments = [self._pending_ttl_ms, int(alone), *(part for identity in identities for part in identity)]
        return [_record(row) for row in self._run(self._begin, [identity.trace_id for identity in identities], arguments)]

    def refund(self, trace_ids: Sequence[str]) -> None:
        """Take back attempts, in one round trip; see :class:`~kp_scorer.store.ledger.Ledger`."""
        with unavailable_if_down("ledger"):
            # No transaction: Redis would refuse it while it is full, which is when this is needed.
            pipeline = self._client.pipeline(transaction=False)
            for trace_id in trace_ids:
                pipeline.hdel(self._keys.record(trace_id), "attempts")
            pipeline.execute()

    def commit(self, verdicts: Sequence[Verdict]) -> list[Standing | None]:
        """Store decisions in one round trip, the first wins; see :class:`~kp_scorer.store.ledger.Ledger`."""
        arguments = [self._ttl_ms, self._pending_ttl_ms, *(part for verdict in verdicts for part in verdict)]
        standing = self._run(self._commit, [verdict.trace_id for verdict in verdicts], arguments)
        return [_standing(verdict, *reply) for verdict, reply in zip(verdicts, standing, strict=True)]

    def claim_lost(self, resend_after_ms: int, *, queue_is_empty: bool) -> list[Claim]:
        """Claim pending submissions that nothing will bring back, to send them again; each is claimed by one caller.

        They were last sent more than ``resend_after_ms`` ago, and the queue has been seen empty since.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        keys = [self._keys.pending, self._keys.counts, self._keys.drained]
        arguments: list[str | int] = [self._keys.record(""), resend_after_ms, int(queue_is_empty), _CLAIMED_AT_ONCE]
        with unavailable_if_down("ledger"):
            rows: Any = self._claim(keys=keys, args=[*arguments, self._pending_ttl_ms])
        return [Claim(trace_id.decode(), payload, resends) for trace_id, payload, resends in rows]

    def counts(self) -> Counts:
        """Count the submissions, as of one moment.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        return Counts(*self._run(self._counts, [], []))

    def erase(self, trace_id: str) -> int:
        """Remove a trace's record, its decision with it; return how many there were (0 or 1).

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            keys = [self._keys.pending, self._keys.counts, self._keys.record(trace_id)]
            return cast("int", self._erase(keys=keys, args=[trace_id]))

    def _run(self, script: Any, trace_ids: Sequence[str], arguments: Sequence[bytes | str | int]) -> list[Any]:
        keys = [self._keys.pending, self._keys.counts, *map(self._keys.record, trace_ids)]
        with unavailable_if_down("ledger"):
            return cast("list[Any]", script(keys=keys, args=arguments))


def _record(row: Sequence[Any]) -> Record:
    state, digest, decision, reason, detail, attempts = row
    return Record(
        state=state.decode(),
        digest=digest or b"",
        decision=decision or b"",
        reason=cast("Reason", reason.decode()) if reason else None,
        detail=(detail or b"").decode(),
        attempts=int(attempts or 0),
    )


def _standing(verdict: Verdict, outcome: bytes, earlier: bytes) -> Standing | None:
    if outcome == b"conflict":
        return None
    return Standing(verdict.decision, is_own=True) if outcome == b"stored" else Standing(earlier, is_own=False)
