"""``kp-scorer capacity``: what a fleet bears, and what gives out first."""

from dataclasses import replace
from typing import Any, Final

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kp_scorer.capacity.costs import Costs
from kp_scorer.capacity.fleet import FULL_REDIS, Fleet
from kp_scorer.capacity.simulation import at_random, latencies_s, percentile
from kp_scorer.cli.output import console, print_json, say

_FLEETS: Final = (1, 10, 100, 1_000)
_PLANNED: Final = 0.7
"""Of what a fleet bears, what it should be given: beyond it traces that come at random wait for long."""
_SIMULATED: Final = 16
"""In larger fleets a trace waits as long: each worker has the same share of the traces."""
_SIMULATED_TRACES: Final = 5_000


@click.command(epilog="Example: kp-scorer capacity --workers 4 --cores 2 --tokens 250")
@click.option("--workers", type=click.IntRange(1, 100_000), multiple=True, help="How many; repeatable. [default: 1 to 1,000]")
@click.option("--cores", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="For each worker.")
@click.option("--tokens", type=click.IntRange(1, 512), default=400, show_default=True, help="Of a trace, on average.")
@click.option("--core-ms", type=click.FloatRange(min=0.01), help="Milliseconds of one core to embed such a trace, as measured.")
@click.option("--broker", type=click.Choice(["redis", "rabbitmq"]), default="redis", show_default=True)
@click.option("--gbit", type=click.FloatRange(min=0.001), default=1.0, show_default=True, help="Of Redis' network.")
@click.option("--rate", type=click.FloatRange(min=0.001), help="Traces a second. [default: 70% of what the fleet bears]")
def capacity(
    workers: tuple[int, ...], cores: float, tokens: int, core_ms: float | None, broker: str, gbit: float, rate: float | None
) -> None:
    """Say what fleets bear: a JSON line each, and a table.

    The model adds up what the benchmarks measured on one machine; --core-ms makes it yours: `python -m tests.benchmarks.engine`
    measures traces a second, and 1,000 times the number of its threads divided by that is the figure. Latencies are simulated,
    for traces that come at random; they are null where more come than the fleet bears.
    """
    costs = Costs() if core_ms is None else replace(Costs(), embed_ms=0.0, embed_ms_a_token=core_ms / tokens)
    rows = []
    for count in workers or _FLEETS:
        fleet = Fleet(
            count,
            cores * count,
            threads=max(1, round(cores)),
            tokens=tokens,
            queues_in_redis=broker == "redis",
            network_bytes_a_s=gbit * 1e9 / 8,
            costs=costs,
        )
        rows.append(_row(fleet, rate or _PLANNED * fleet.throughput))
        print_json(rows[-1])
    console().print(_table(rows))
    say(f"at {_PLANNED:.0%} of what a fleet bears" if rate is None else f"at {rate:g} traces a second")


def _row(fleet: Fleet, rate: float) -> dict[str, Any]:
    times_ms = _latencies_ms(fleet, rate)
    return {
        "workers": fleet.workers,
        "traces_per_s": round(fleet.throughput, 1),
        "gives_out": fleet.gives_out,
        "rate": round(rate, 1),
        "p50_ms": times_ms and round(percentile(times_ms, 0.5)),
        "p95_ms": times_ms and round(percentile(times_ms, 0.95)),
        "redis_core": round(rate / fleet.limits()["Redis' core"] * FULL_REDIS, 3),
        "redis_in_mbit": round(rate * fleet.bytes_in * 8 / 1e6, 1),
        "redis_out_mbit": round(rate * fleet.bytes_out * 8 / 1e6, 1),
        "redis_gb": round(fleet.redis_bytes(rate) / 1e9, 2),
        "workers_gb": round(fleet.workers_bytes / 1e9, 2),
    }


def _latencies_ms(fleet: Fleet, rate: float) -> list[float] | None:
    if rate >= fleet.throughput:
        return None
    share = min(1.0, _SIMULATED / fleet.workers)
    some = replace(fleet, workers=min(_SIMULATED, fleet.workers), cores=fleet.cores * share)
    arrivals = at_random(rate * share, [round(fleet.tokens)], _SIMULATED_TRACES)
    return [1_000 * seconds for seconds in latencies_s(some, arrivals)]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    headings = {
        "workers": "workers",
        "traces_per_s": "bears/s",
        "gives_out": "gives out",
        "p50_ms": "p50 ms",
        "p95_ms": "p95 ms",
        "redis_core": "core",
        "redis_out_mbit": "Mbit/s",
        "redis_gb": "GB",
    }
    for heading in headings.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(_shown(row[name]) for name in headings))
    return table


def _shown(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)
