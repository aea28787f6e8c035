"""The ledger in Redis: one hash a trace, changed only by scripts, so that no two processes see it half changed."""

from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple, cast

import redis

from worker.errors import TraceConflict
from worker.keys import Keys
from worker.ledger.ledger import Record, State, Verdict
from worker.redis_client import unavailable_if_down


class Opening(NamedTuple):
    """A submission about to be sent: its trace id and 16-byte content digest."""

    trace_id: str
    content: bytes


class RedisLedger:
    """Records of traces, each kept for ``ttl_ms`` after its last change."""

    def __init__(self, client: redis.Redis, keys: Keys, ttl_ms: int) -> None:
        """Use the ledger under the prefix of ``keys``."""
        self._client = client
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._open, self._commit, self._bury = (
            client.register_script(resources.files(__package__).joinpath(f"{name}.lua").read_text("utf-8"))
            for name in ("open", "commit", "bury")
        )

    def open(self, openings: Sequence[Opening]) -> list[State | TraceConflict]:
        """Note submissions as pending before they are sent, in one round trip.

        Returns:
            For each the state it has now (an earlier decision stands), or the conflict if its id was taken by other content.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        arguments: list[bytes | int] = [self._ttl_ms, *(opening.content for opening in openings)]
        states = self._run(self._open, [opening.trace_id for opening in openings], arguments)
        return [
            cast("State", state.decode()) if state else TraceConflict(opening.trace_id)
            for opening, state in zip(openings, states, strict=True)
        ]

    def look_up(self, trace_ids: Sequence[str]) -> list[Record | None]:
        """Read the records in one round trip; see :class:`~worker.ledger.ledger.Ledger`."""
        with unavailable_if_down("ledger"):
            pipeline = self._client.pipeline(transaction=False)
            for trace_id in trace_ids:
                pipeline.hmget(self._keys.record(trace_id), "state", "content", "decision", "reason")
            rows = pipeline.execute()
        return [
            Record(cast("State", state.decode()), content or b"", decision or b"", (reason or b"").decode()) if state else None
            for state, content, decision, reason in rows
        ]

    def commit(self, verdicts: Sequence[Verdict]) -> list[bytes | None]:
        """Store decisions in one round trip, the first wins; see :class:`~worker.ledger.ledger.Ledger`."""
        arguments: list[bytes | int] = [self._ttl_ms]
        for verdict in verdicts:
            arguments += [verdict.content, verdict.decision]
        standing = self._run(self._commit, [verdict.trace_id for verdict in verdicts], arguments)
        return [
            verdict.decision if stored == 1 else bytes(stored) or None
            for verdict, stored in zip(verdicts, standing, strict=True)
        ]

    def bury(self, trace_id: str, reason: str) -> None:
        """Mark a trace as dead unless it is decided.

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        self._run(self._bury, [trace_id], [self._ttl_ms, reason.encode()])

    def erase(self, trace_id: str) -> int:
        """Remove a trace's record, its decision with it; return how many there were (0 or 1).

        Raises:
            ServiceUnavailable: the ledger cannot be reached.
        """
        with unavailable_if_down("ledger"):
            return int(self._client.delete(self._keys.record(trace_id)))

    def _run(self, script: Any, trace_ids: Sequence[str], arguments: Sequence[bytes | int]) -> list[Any]:
        with unavailable_if_down("ledger"):
            return cast("list[Any]", script(keys=[self._keys.record(trace_id) for trace_id in trace_ids], args=arguments))
