"""``kp-scorer capacity``: the cost of a trace, the resource that limits a fleet, and its latency at random arrivals."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Final

import click

from kp_scorer.cli.display import print_table
from kp_scorer.cli.options import settings_options
from kp_scorer.cli.output import print_note
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import SLACK_ELEMENTS

_FLEETS: Final = (1, 10, 100, 1_000)
_PLANNED: Final = 0.7  # The share of its throughput to plan a fleet for: beyond it, random arrivals wait for long.
_COLUMNS: Final = ("workers", "traces_per_s", "bottleneck", "p50_ms", "p95_ms", "redis_core", "redis_out_mbit", "redis_gb")
_HEADINGS: Final = ("workers", "traces/s", "bottleneck", "p50 ms", "p95 ms", "core", "Mbit/s", "GB")
_FULL_REDIS: Final = 0.7  # Plan with no more of Redis' one core: it also writes its file, and a slow command delays all others.


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one trace, in ms of a core and in bytes, by the benchmark named, on the machine of ``tests/benchmarks``."""

    embed_ms: float = 3.5  # Embedding a text, whatever its length (``engine``).
    embed_ms_a_token: float = 0.167  # Embedding each of its tokens that count (``engine``).
    around_ms: float = 0.9  # What a worker does around the embedder (``without_embedder``).
    round_trips_ms: float = 7.0  # What passes besides, from submitting to publishing, without using a core (``latency``).
    redis_ms: float = 0.12  # Redis' core, for the ledger and the log, of a trace that our client submitted (``log_size``).
    redis_ms_a_reader: float = 0.005  # Redis' core, for each worker that reads the vector (``log_size``).
    queue_ms: float = 0.09  # Redis' core, if the queues are in Redis too (``round_trips``).
    redis_in_bytes: int = 2_800  # To Redis, for the log and the ledger (``round_trips``).
    redis_out_bytes: int = 1_800  # From Redis to the worker that decides (``round_trips``).
    read_bytes: int = 1_700  # From Redis to each other worker that reads the vector (``round_trips``).
    message_bytes: int = 9_000  # The trace itself, in the queue and, until it is decided, in the ledger (``submitting``).
    vector_bytes: int = 1_900  # Redis' memory for an entry of the log (``log_size``).
    note_bytes: int = 900  # Redis' memory for what the client notes of a trace beside the trace itself (``stored``).
    record_bytes: int = 1_700  # Redis' memory for a decided trace, until its record expires (``log_size``).

    def core_ms(self, tokens: float) -> float:
        """Milliseconds of one core that a worker needs for a trace of so many tokens; at most 512 count."""
        return self.embed_ms + self.embed_ms_a_token * tokens + self.around_ms


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers, the resources they run on, and the traces they receive."""

    workers: int
    cores: float  # Of all machines that workers run on, together.
    threads: int = 2  # Cores that one worker embeds with (``embedding.threads``).
    tokens: float = 400.0  # Of a trace's text, on average; at most 512 count.
    log_entries: int = 1_000 + SLACK_ELEMENTS  # Of the novelty log: ``novelty.max_elements`` and the slack.
    kept_s: float = 86_400.0  # How long records are kept (``ledger.ttl_s``).
    queues_in_redis: bool = True
    network_bytes_a_s: float = 125_000_000.0  # What Redis' network carries in each direction: by default a gigabit.
    costs: Costs = field(default_factory=Costs)

    def limits(self) -> dict[str, float]:
        """Traces a second that each resource sustains."""
        costs = self.costs
        # The client stores the trace in the ledger, whichever broker carries it.
        bytes_in = costs.redis_in_bytes + costs.message_bytes * (1 + self.queues_in_redis)
        redis_ms = costs.redis_ms + costs.redis_ms_a_reader * self.workers + costs.queue_ms * self.queues_in_redis
        return {
            "workers' cores": self._busy_cores / costs.core_ms(self.tokens) * 1_000,
            "Redis' core": _FULL_REDIS / redis_ms * 1_000,
            "Redis' network": self.network_bytes_a_s / max(bytes_in, self.bytes_out),
        }

    @property
    def throughput(self) -> float:
        """Traces a second that the fleet sustains."""
        return min(self.limits().values())

    @property
    def bottleneck(self) -> str:
        """The resource that limits the throughput."""
        limits = self.limits()
        return min(limits, key=limits.__getitem__)

    @property
    def bytes_out(self) -> int:
        """Bytes a trace from Redis."""
        others = max(0, self.workers - 1) * self.costs.read_bytes
        return self.costs.redis_out_bytes + others + self.costs.message_bytes * self.queues_in_redis

    def redis_bytes(self, rate: float, waiting: int = 0) -> float:
        """Redis' memory at so many traces a second, while so many wait. Those it also holds where RabbitMQ has the queues."""
        decided = self.log_entries * self.costs.vector_bytes + rate * self.kept_s * self.costs.record_bytes
        return decided + waiting * (self.costs.note_bytes + self.costs.message_bytes * (1 + self.queues_in_redis))

    def latency_ms(self, rate: float, share: float) -> float:
        """Milliseconds from submitting to publishing that ``share`` of the traces do not exceed, at random arrivals.

        The cores are the servers of an M/M/c queue: a trace waits for a core, and then has it alone. The waiting time is
        longer than t with probability C * exp(-(c*mu - rate) * t), C being Erlang's (Gross, Shortle, Thompson and Harris,
        Fundamentals of Queueing Theory, 4th edition, section 2.3). Traces vary less than M/M/c assumes, and a trace that
        meets no other has all threads of its worker, so an idle fleet is faster than this. ``rate`` is below ``throughput``.
        """
        servers = max(1, int(self._busy_cores))
        service_s = self.costs.core_ms(self.tokens) / 1_000 * servers / self._busy_cores
        waits = erlang_c(servers, rate * service_s)
        wait_s = math.log(waits / (1 - share)) / (servers / service_s - rate) if waits > 1 - share else 0.0
        return (wait_s + service_s) * 1_000 + self.costs.round_trips_ms

    @property
    def _busy_cores(self) -> float:
        # Beside the threads that embed, Python's threads do the rest, mostly on the same cores.
        return min(self.cores, float(self.workers * self.threads))


def erlang_c(servers: int, load: float) -> float:
    """The probability that an arrival waits, for a load of ``load`` busy servers on average, below ``servers``."""
    # Erlang's B, the probability of loss, by its recursion on the number of servers, which neither overflows nor cancels.
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


@click.command(epilog="Example: kp-scorer capacity --workers 4 --cores 2 --tokens 250")
@click.option("--workers", type=click.IntRange(1, 100_000), multiple=True, help="How many; repeatable. [default: 1 to 1,000]")
@click.option("--cores", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="For each worker.")
@click.option("--tokens", type=click.IntRange(1, 512), default=400, show_default=True, help="Of a trace, on average.")
@click.option("--core-ms", type=click.FloatRange(min=0.01), help="Milliseconds of one core to embed such a trace, as measured.")
@click.option("--broker", type=click.Choice(["redis", "rabbitmq"]), help="[default: that of broker.url, or redis]")
@click.option("--gbit", type=click.FloatRange(min=0.001), default=1.0, show_default=True, help="Of Redis' network.")
@click.option("--rate", type=click.FloatRange(min=0.001), help="Traces a second. [default: 70% of the throughput]")
@click.option("--waiting", type=click.IntRange(0), default=0, help="Traces that wait in an outage, for Redis' memory.")
@click.option("--trace-bytes", type=click.IntRange(1), default=9_000, show_default=True, help="Of a trace, on average.")
@settings_options
def capacity(
    workers: tuple[int, ...],
    cores: float,
    tokens: int,
    core_ms: float | None,
    broker: str | None,
    gbit: float,
    rate: float | None,
    waiting: int,
    trace_bytes: int,
    settings: Settings,
) -> None:
    """Print what fleets sustain: a JSON line each, or to a terminal a table.

    Redis' memory is that of the records kept for ledger.ttl_s, of the log by novelty.max_elements, and of what waits.
    The model adds up what the benchmarks measured on one machine; --core-ms makes it yours: 1,000 times a busy worker's cores,
    divided by its traces a second in `kp-scorer top`. Latencies are those of random arrivals; they are null where the rate is
    above the throughput.
    """
    threads, network = max(1, round(cores)), gbit * 1e9 / 8
    in_redis = broker == "redis" if broker else settings.broker.is_redis or not settings.broker.url
    costs = Costs(message_bytes=trace_bytes)
    if core_ms is not None:
        costs = replace(costs, embed_ms=0.0, embed_ms_a_token=core_ms / tokens)
    entries, kept_s = settings.novelty.max_elements + SLACK_ELEMENTS, settings.ledger.ttl_s
    fleets = (
        Fleet(
            count,
            cores * count,
            threads,
            tokens,
            log_entries=entries,
            kept_s=kept_s,
            queues_in_redis=in_redis,
            network_bytes_a_s=network,
            costs=costs,
        )
        for count in workers or _FLEETS
    )
    rows = (_row(fleet, rate or _PLANNED * fleet.throughput, waiting) for fleet in fleets)
    print_table(_HEADINGS, ((row, [_cell(row[name]) for name in _COLUMNS]) for row in rows))
    print_note(f"at {_PLANNED:.0%} of the throughput" if rate is None else f"at {rate:g} traces a second")


def _row(fleet: Fleet, rate: float, waiting: int) -> dict[str, Any]:
    p50_ms, p95_ms = (round(fleet.latency_ms(rate, share)) if rate < fleet.throughput else None for share in (0.5, 0.95))
    return {
        "workers": fleet.workers,
        "traces_per_s": round(fleet.throughput, 1),
        "bottleneck": fleet.bottleneck,
        "rate": round(rate, 1),
        "p50_ms": p50_ms,
        "p95_ms": p95_ms,
        "redis_core": round(rate / fleet.limits()["Redis' core"] * _FULL_REDIS, 3),
        "redis_out_mbit": round(rate * fleet.bytes_out * 8 / 1e6, 1),
        "redis_gb": round(fleet.redis_bytes(rate, waiting) / 1e9, 2),
    }


def _cell(value: str | float | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:,}"
