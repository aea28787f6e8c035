"""Copies of the traces that workers decide, for a process that warms the log of the next settings."""

from collections.abc import Collection, Sequence
from threading import Event
from typing import Final, NamedTuple

import redis

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.store.connection import entries_in, in_one_trip, reports_outages
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import parsed_in, text_in
from kp_scorer.trace import ReasoningTrace

_TTL_MS: Final = 60_000  # The copies expire if their reader has not looked for this long.
_HEARD_AFTER_S: Final = 5.0  # A worker that has not looked for this long counts as dead.
_SEARCHED_AT_ONCE: Final = 100  # More could take too much memory: a trace may have a megabyte.


class Copy(NamedTuple):
    """A copy of a decided trace; the trace is None if the stream holds something else."""

    copy_id: bytes
    trace_id: str
    trace: ReasoningTrace | None


@reports_outages("copies of traces")
class Copies:
    """The stream of copies, to which workers add as long as it exists. Methods raise ServiceUnavailable without Redis."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._key = keys.copies

    def begin(self, stopping: Event) -> None:
        """Have workers copy each trace that they decide; return once all of them do so, or at once if ``stopping`` is set.

        Raises ServiceUnavailable if another process has the workers copy traces already.
        """
        begun = self._client.pipeline()
        begun.xgroup_create(self._key, "warm", mkstream=True)
        begun.pexpire(self._key, _TTL_MS)
        try:
            begun.execute()
        except redis.exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise
            raise ServiceUnavailable(
                "copies of traces: another process reads them, or one did until it was killed: begin again after a minute"
            ) from None
        stopping.wait(_HEARD_AFTER_S)
        # The copies so far have gaps, because workers began one after another.
        self._client.xtrim(self._key, maxlen=0, approximate=False)

    def read(self, most: int) -> list[Copy]:
        """Return the oldest copies, in the order of their traces' decisions; raise ServiceUnavailable if some are lost."""
        commands = ("PEXPIRE", self._key, _TTL_MS), ("XRANGE", self._key, "-", "+", "COUNT", most)
        exists, entries = in_one_trip(self._client, commands)
        if not exists:
            raise ServiceUnavailable(
                "copies of traces: they are gone, because Redis was nearly full, they took 64 MiB, or nobody read them for a "
                "minute; the warmed log has a gap: empty it with `kp-scorer cache clear`, and begin again"
            )
        return [Copy(each, text_in(fields.get(b"i")), parsed_in(ReasoningTrace, fields.get(b"t"))) for each, fields in entries]

    def remove(self, copies: Sequence[Copy]) -> list[str]:
        """Remove copies that were read; return the traces that were erased meanwhile."""
        removals = in_one_trip(self._client, (("XDEL", self._key, copy.copy_id) for copy in copies))
        return [copy.trace_id for copy, removed in zip(copies, removals, strict=True) if not removed]

    def erase(self, trace_ids: Collection[str]) -> None:
        """Remove the copies of these traces. A reader that has already read one learns of this from ``remove``."""
        for copy_id, fields in entries_in(self._client, self._key, _SEARCHED_AT_ONCE):
            if text_in(fields.get(b"i")) in trace_ids:
                self._client.xdel(self._key, copy_id)

    def end(self) -> None:
        """Have workers copy no more traces, and remove the copies."""
        self._client.delete(self._key)
