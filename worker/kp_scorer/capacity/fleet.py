"""What a fleet of workers bears, resource by resource, and which of them gives out first."""

from dataclasses import dataclass, field
from typing import Final, Literal

from kp_scorer.capacity.costs import Costs

Resource = Literal["workers' cores", "Redis' core", "Redis' network"]

FULL_REDIS: Final = 0.7
"""Of Redis' one core, no more should be planned with: it also writes its file, and others wait for what takes long."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers, what they run on, and what they are given."""

    workers: int
    cores: float
    """Of all machines that workers run on, together."""
    threads: int = 2
    """Cores that one worker embeds with (``embedding.threads``)."""
    tokens: float = 400.0
    """Of a trace's text, on average; at most 512 count."""
    log_places: int = 11_000
    """Of the novelty log: ``novelty.max_elements`` and ``novelty.slack_elements``."""
    kept_s: float = 86_400.0
    """How long records are kept (``ledger.ttl_s``)."""
    queues_in_redis: bool = True
    network_bytes_a_s: float = 125_000_000.0
    """What Redis' network carries in each direction: by default a gigabit."""
    costs: Costs = field(default_factory=Costs)

    @property
    def busy_cores(self) -> float:
        """Cores that the workers can keep busy."""
        # Beside the threads that embed, Python's do what is around that, mostly on the same cores.
        return min(self.cores, float(self.workers * self.threads))

    def limits(self) -> dict[Resource, float]:
        """How many traces a second each resource bears."""
        costs = self.costs
        redis_ms = costs.redis_ms + costs.redis_ms_a_reader * self.workers + costs.queue_ms * self.queues_in_redis
        return {
            "workers' cores": self.busy_cores / costs.core_ms(self.tokens) * 1_000,
            "Redis' core": FULL_REDIS / redis_ms * 1_000,
            "Redis' network": self.network_bytes_a_s / max(self.bytes_in, self.bytes_out),
        }

    @property
    def bytes_in(self) -> int:
        """Bytes a trace to Redis."""
        # The client notes the trace in the ledger, whichever broker carries it.
        return self.costs.redis_in_bytes + self.costs.message_bytes * (1 + self.queues_in_redis)

    @property
    def bytes_out(self) -> int:
        """Bytes a trace from Redis."""
        others = max(0, self.workers - 1) * self.costs.read_bytes
        return self.costs.redis_out_bytes + others + self.costs.message_bytes * self.queues_in_redis

    @property
    def throughput(self) -> float:
        """Traces a second."""
        return min(self.limits().values())

    @property
    def gives_out(self) -> Resource:
        """What bears least."""
        limits = self.limits()
        return min(limits, key=limits.__getitem__)

    def redis_bytes(self, rate: float, waiting: int = 0) -> float:
        """Redis' memory at so many traces a second, with so many submissions waiting on the queue."""
        costs = self.costs
        return (
            self.log_places * costs.vector_bytes
            + rate * self.kept_s * costs.record_bytes
            + waiting * costs.message_bytes * (1 + self.queues_in_redis)
        )

    @property
    def workers_bytes(self) -> int:
        """Memory of all workers together."""
        return self.workers * (self.costs.worker_bytes + self.log_places * self.costs.mirror_bytes)
