"""What all workers report in Redis, for whoever watches them; ServiceUnavailable if it cannot be reached."""

from typing import Any, Final

import redis
from pydantic import BaseModel, ConfigDict

from kp_scorer.decision import Outcome
from kp_scorer.ledger.connection import reports_outages
from kp_scorer.ledger.keys import Keys
from kp_scorer.ledger.records import parsed_in
from kp_scorer.ledger.scripts import nothing, script

_REPORT_TTL_MS: Final = 5_000
"""As long as a worker counts as alive without another report."""


@script(nothing)
def _report(*, report: str, text: str, ttl_ms: int) -> None: ...


class Timing(BaseModel):
    """How often something was done, and how long it took in all."""

    model_config = ConfigDict(frozen=True)

    count: int = 0
    seconds: float = 0.0


class WorkerReport(BaseModel):
    """How a worker is, and what it has done since it started. Fields of other versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    node: str
    """What monitors know it by."""
    not_ready: tuple[str, ...] = ()
    """Why it takes no work; empty if it does."""
    embedder: str = ""
    """Name and engine; empty without one, when every novelty is 0.5."""
    in_hand: int = 0
    window_entries: int = 0
    """Entries of the novelty log in its mirror."""
    decisions: dict[Outcome, dict[str, int]] = {}
    """By outcome and domain."""
    dead_letters: int = 0
    redeliveries: int = 0
    resends: int = 0
    queued: Timing = Timing()
    """From sending to taking, of messages that say when they were sent."""
    held: Timing = Timing()
    """From taking a message to the publication of its decision."""
    embedded: Timing = Timing()


@reports_outages("workers")
class Workers:
    """The reports of the workers under one prefix."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def report(self, worker: str, report: WorkerReport) -> None:
        """Replace a worker's report."""
        _report(self._client, report=self._keys.worker(worker), text=report.model_dump_json(), ttl_ms=_REPORT_TTL_MS)

    def reports(self) -> list[WorkerReport]:
        """The reports of all workers that live, by node."""
        workers: Any = self._client.zrange(self._keys.workers, 0, -1)
        pipeline = self._client.pipeline(transaction=False)
        for worker in workers:
            pipeline.get(self._keys.worker(worker.decode()))
        # A worker that has died has no report soon after.
        reports = [parsed_in(WorkerReport, text) for text in pipeline.execute() if text]
        return sorted(filter(None, reports), key=lambda report: report.node)
