"""What a trace costs, by what the benchmarks measured; ``tests/benchmarks/README.md`` says on which machine."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one trace, in milliseconds of one core and in bytes; each field names the benchmark that measures it."""

    embed_ms: float = 3.5
    """Embedding a text, whatever its length (``engine``)."""
    embed_ms_a_token: float = 0.167
    """And for each of its tokens that count (``engine``)."""
    around_ms: float = 0.9
    """All that a worker does around the embedder (``without_embedder``)."""
    alone: float = 0.87
    """What a core gives where several embed one text together; texts side by side have a core each (``latency``)."""
    crowded: float = 0.72
    """What is left of that where several workers' threads also share the cores, and wait for each other (``capacity``)."""
    batch_wait_ms: float = 7.0
    """What passes besides, from submitting to publishing, without taking a core: round trips and turns (``latency``)."""
    redis_ms: float = 0.12
    """Redis' one core, for the ledger and the log, of a trace that our client submitted (``log_size``)."""
    redis_ms_a_reader: float = 0.005
    """And for each worker that reads its vector (``log_size``)."""
    queue_ms: float = 0.09
    """The same core, where the queues are in Redis too (``round_trips``)."""
    redis_in_bytes: int = 2_800
    """To Redis for the log and the ledger (``round_trips``)."""
    redis_out_bytes: int = 1_800
    """From it, to the worker that decides (``round_trips``)."""
    read_bytes: int = 1_700
    """From it, to each other worker that reads the vector (``round_trips``)."""
    message_bytes: int = 9_000
    """The trace itself, which goes to the queue, to the ledger until it is decided, and to a worker (``submitting``)."""
    vector_bytes: int = 1_900
    """Redis' memory for a place in the log (``log_size``)."""
    record_bytes: int = 1_700
    """Redis' memory for a decided trace, as long as its record is kept (``log_size``)."""
    worker_bytes: int = 400_000_000
    """A worker's resident memory (``memory``)."""
    mirror_bytes: int = 1_600
    """And for each place of the log that it mirrors (``memory``)."""

    def core_ms(self, tokens: float) -> float:
        """Milliseconds of one core that a worker needs for a trace of so many tokens; at most 512 count."""
        return self.embed_ms + self.embed_ms_a_token * tokens + self.around_ms
