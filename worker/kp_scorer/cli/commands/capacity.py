"""``kp-scorer capacity``: what fleets sustain, and what limits them."""

import sys
from dataclasses import replace
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from kp_scorer.capacity import FULL_REDIS, Costs, Fleet
from kp_scorer.cli.output import print_note, print_row

_FLEETS: Final = (1, 10, 100, 1_000)
_PLANNED: Final = 0.7  # The share of its throughput to plan a fleet for: beyond it, random arrivals wait for long.
_COLUMNS: Final = ("workers", "traces_per_s", "bottleneck", "p50_ms", "p95_ms", "redis_core", "redis_out_mbit", "redis_gb")
_HEADINGS: Final = ("workers", "traces/s", "bottleneck", "p50 ms", "p95 ms", "core", "Mbit/s", "GB")


@click.command(epilog="Example: kp-scorer capacity --workers 4 --cores 2 --tokens 250")
@click.option("--workers", type=click.IntRange(1, 100_000), multiple=True, help="How many; repeatable. [default: 1 to 1,000]")
@click.option("--cores", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="For each worker.")
@click.option("--tokens", type=click.IntRange(1, 512), default=400, show_default=True, help="Of a trace, on average.")
@click.option("--core-ms", type=click.FloatRange(min=0.01), help="Milliseconds of one core to embed such a trace, as measured.")
@click.option("--broker", type=click.Choice(["redis", "rabbitmq"]), default="redis", show_default=True)
@click.option("--gbit", type=click.FloatRange(min=0.001), default=1.0, show_default=True, help="Of Redis' network.")
@click.option("--rate", type=click.FloatRange(min=0.001), help="Traces a second. [default: 70% of the throughput]")
@click.option("--waiting", type=click.IntRange(0), default=0, help="Traces that wait in an outage, for Redis' memory.")
def capacity(
    workers: tuple[int, ...],
    cores: float,
    tokens: int,
    core_ms: float | None,
    broker: str,
    gbit: float,
    rate: float | None,
    waiting: int,
) -> None:
    """Print what fleets sustain: a JSON line each, or to a terminal a table.

    The model adds up what the benchmarks measured on one machine; --core-ms makes it yours: 1,000 times a busy worker's cores,
    divided by its traces a second in `kp-scorer top`. Latencies are those of random arrivals; they are null where the rate is
    above the throughput.
    """
    threads, in_redis, network = max(1, round(cores)), broker == "redis", gbit * 1e9 / 8
    costs = Costs() if core_ms is None else replace(Costs(), embed_ms=0.0, embed_ms_a_token=core_ms / tokens)
    table = Table(*(Column(heading, justify="right") for heading in _HEADINGS), box=SIMPLE_HEAD, pad_edge=False)
    for count in workers or _FLEETS:
        fleet = Fleet(count, cores * count, threads, tokens, queues_in_redis=in_redis, network_bytes_a_s=network, costs=costs)
        row = _row(fleet, rate or _PLANNED * fleet.throughput, waiting)
        print_row(row, "")
        cells = (row[name] for name in _COLUMNS)
        table.add_row(*("" if value is None else value if isinstance(value, str) else f"{value:,}" for value in cells))
    if sys.stdout.isatty():
        Console().print(table)
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
        "redis_core": round(rate / fleet.limits()["Redis' core"] * FULL_REDIS, 3),
        "redis_out_mbit": round(rate * fleet.bytes_out * 8 / 1e6, 1),
        "redis_gb": round(fleet.redis_bytes(rate, waiting) / 1e9, 2),
    }
