"""Runs that come as spans: collected in Redis until they are complete, then claimed and submitted by one process."""

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import redis

from kp_scorer.ledger.connection import reports_outages
from kp_scorer.ledger.keys import KEPT_S, Keys
from kp_scorer.ledger.records import text_in
from kp_scorer.ledger.scripts import nothing, row, script
from kp_scorer.settings.sections import ServeSettings

_LEASE_MS: Final = 15_000  # A claim ends after so long: its process is dead, or could not submit the run.
_REMEMBERED_MS: Final = 3_600_000  # How long the span ids of a submitted run are kept. Exporters try again for minutes.
_LONGEST_MS: Final = 86_400_000  # A run is complete so long after its first span, whatever still comes.

Outcome = Literal["stored", "closed", "too_large", "full"]


class ReceivedSpan(NamedTuple):
    """A span as it is stored."""

    span_id: str
    is_root: bool
    content: bytes  # The span in OTLP's JSON; empty if it is too large.


class ClosedRun(NamedTuple):
    """A run that changes no more, claimed by this process."""

    run_id: str
    is_too_large: bool  # Whether it had more spans, which were rejected.
    spans: Sequence[bytes]  # In the same order each time.


class _Bounds(NamedTuple):
    most_runs: int
    most_total_bytes: int
    most_spans: int
    most_bytes: int
    quiet_ms: int
    open_ms: int
    longest_ms: int
    kept_ms: int


def _closed(run_id: bytes, fields: Sequence[bytes]) -> ClosedRun | None:
    by_id = sorted(zip(fields[::2], fields[1::2], strict=True))
    spans = [content for span_id, content in by_id if not span_id.startswith(b":")]
    return ClosedRun(text_in(run_id), b":too_large" in fields[::2], spans) if run_id else None


@script(tuple[bytes, int])
def _store_spans(*, keys: Keys, run: str, run_id: str, bounds: _Bounds, spans: Sequence[ReceivedSpan]) -> None: ...


@script(row(_closed))
def _claim_run(*, keys: Keys, lease_ms: int, quiet_ms: int, open_ms: int) -> None: ...


@script(nothing)
def _finish_run(*, keys: Keys, run: str, run_id: str, remembered_ms: int) -> None: ...


@reports_outages("runs")
class Runs:
    """The runs under one prefix, by the ids of OpenTelemetry's traces; ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys, settings: ServeSettings) -> None:
        self._client = client
        self._keys = keys
        sizes = settings.runs, settings.total_bytes, settings.run_spans, settings.run_bytes
        times = int(settings.quiet_s * 1_000), int(settings.open_s * 1_000)
        self._bounds = _Bounds(*sizes, *times, _LONGEST_MS, KEPT_S * 1_000)

    def store(self, run_id: str, spans: Sequence[ReceivedSpan]) -> tuple[Outcome, int]:
        """Store spans of a run, each id once, all or none; and count those that are not stored, now or before."""
        run = self._keys.run(run_id)
        outcome, rejected = _store_spans(
            self._client, keys=self._keys, run=run, run_id=run_id, bounds=self._bounds, spans=spans
        )
        return outcome.decode(), rejected  # type: ignore[return-value]  # by store_spans.lua

    def claim(self) -> ClosedRun | None:
        """Close a run that is complete, and claim it; None if none is. The claim ends after some seconds."""
        quiet_ms, open_ms = self._bounds.quiet_ms, self._bounds.open_ms
        return _claim_run(self._client, keys=self._keys, lease_ms=_LEASE_MS, quiet_ms=quiet_ms, open_ms=open_ms)

    def finish(self, run_id: str) -> None:
        """Remove the spans of a run that is submitted or dead."""
        _finish_run(self._client, keys=self._keys, run=self._keys.run(run_id), run_id=run_id, remembered_ms=_REMEMBERED_MS)
