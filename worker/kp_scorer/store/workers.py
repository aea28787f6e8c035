"""What each worker says of itself in Redis, once a second, for whoever watches all of them."""

from typing import Any, Final

import redis
from pydantic import BaseModel, ConfigDict, ValidationError

from kp_scorer.decision import Outcome
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys
from kp_scorer.store.scripts import lua_source

_KEPT_MS: Final = 5_000
"""As long as a worker is taken for alive without another word of it."""


class Timed(BaseModel):
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
    """Messages."""
    window_entries: int = 0
    """Entries of the novelty log in its mirror."""
    decisions: dict[Outcome, dict[str, int]] = {}
    """By outcome and domain."""
    dead_letters: int = 0
    redeliveries: int = 0
    resends: int = 0
    queued: Timed = Timed()
    """From sending to taking, of messages that say when they were sent."""
    held: Timed = Timed()
    """From taking a message to the publication of its decision."""
    embedded: Timed = Timed()
    """Batches."""


class Workers:
    """The reports of the workers under one prefix."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Keep reports beside the leases that the ledger renews."""
        self._client = client
        self._keys = keys
        self._tell = client.register_script(lua_source(__package__, "tell"))

    def tell(self, worker: str, report: WorkerReport) -> None:
        """Put a worker's report in place of its last one.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("workers"):
            self._tell(keys=[self._keys.worker(worker)], args=[report.model_dump_json(), _KEPT_MS])

    def reports(self) -> list[WorkerReport]:
        """The reports of all workers that live, by node.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("workers"):
            known: Any = self._client.zrange(self._keys.workers, 0, -1)
            pipeline = self._client.pipeline(transaction=False)
            for worker in known:
                pipeline.get(self._keys.worker(worker.decode()))
            # A worker that has died has no report soon after.
            found = [_parsed(each) for each in pipeline.execute() if each]
        return sorted(filter(None, found), key=lambda report: report.node)


def _parsed(text: bytes) -> WorkerReport | None:
    try:
        return WorkerReport.model_validate_json(text)
    except ValidationError:
        return None
