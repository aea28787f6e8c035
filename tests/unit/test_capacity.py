"""What a fleet bears adds up, and the simulation of it agrees with what can be said without one."""

from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.capacity.costs import Costs
from kp_scorer.capacity.fleet import Fleet
from kp_scorer.capacity.simulation import at_random, latencies_s, percentile
from kp_scorer.cli.capacity import capacity

TOKENS = [400]
COSTS = Costs()


def fleet(workers: int = 1, **changed: object) -> Fleet:
    return replace(Fleet(workers, cores=2.0 * workers, tokens=400), **changed)  # type: ignore[arg-type]


@given(st.integers(1, 40))
def test_so_many_workers_bear_so_many_times_as_much_while_redis_bears_it(workers: int) -> None:
    assert fleet(workers).throughput == pytest.approx(workers * fleet().throughput)
    assert fleet(workers).gives_out == "workers' cores"


@given(st.integers(1, 8))
def test_workers_on_the_same_cores_bear_no_more(workers: int) -> None:
    assert fleet(workers, cores=2.0).throughput == fleet().throughput


@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_redis_bears_less_the_more_workers_read_what_the_others_write(one: int, other: int) -> None:
    few, many = sorted((one, other))
    for resource in ("Redis' core", "Redis' network"):
        assert fleet(many).limits()[resource] <= fleet(few).limits()[resource]


def test_a_trace_that_meets_nobody_takes_what_deciding_it_takes() -> None:
    alone_s = COSTS.core_ms(400) / 2 / COSTS.alone / 1_000 + COSTS.batch_wait_ms / 1_000
    found = latencies_s(fleet(), at_random(0.01, TOKENS, 200))
    assert percentile(found, 0.9) == pytest.approx(alone_s)


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_traces_wait_longer_the_more_come(workers: int) -> None:
    rates = [share * fleet(workers).throughput for share in (0.2, 0.5, 0.8, 0.95)]
    times = [percentile(latencies_s(fleet(workers), at_random(rate, TOKENS, 4_000)), 0.95) for rate in rates]
    assert times == sorted(times)


def test_workers_that_share_cores_are_in_each_others_way() -> None:
    shared = fleet(2, cores=2.0)
    apart = replace(shared, costs=replace(COSTS, crowded=1.0))
    arrivals = at_random(0.5 * shared.throughput, TOKENS, 4_000)
    times = [percentile(latencies_s(each, arrivals), 0.95) for each in (apart, shared)]
    assert times[1] > 1.1 * times[0]
    # With cores of their own they are not.
    assert latencies_s(fleet(2), arrivals) == latencies_s(replace(fleet(2), costs=apart.costs), arrivals)


def test_a_fleet_decides_what_it_bears_and_no_more() -> None:
    # In hand or not, traces that come faster wait, and go on to wait.
    kept_up = latencies_s(fleet(2), at_random(0.9 * fleet(2).throughput, TOKENS, 6_000))
    left_behind = latencies_s(fleet(2), at_random(1.5 * fleet(2).throughput, TOKENS, 6_000))
    first, last = left_behind[:1_000], left_behind[-1_000:]
    assert percentile(kept_up, 0.5) < 2
    assert percentile(last, 0.5) > 3 * percentile(first, 0.5)


def test_the_same_chance_gives_the_same_arrivals() -> None:
    assert at_random(20, [10, 500], 500) == at_random(20, [10, 500], 500)


def test_the_command_says_what_gives_out() -> None:
    result = CliRunner().invoke(capacity, ["--workers", "1", "--workers", "1000", "--rate", "20"])
    assert result.exit_code == 0
    assert [line.count('"gives_out":"workers\' cores"') for line in result.stdout.splitlines()] == [1, 0]
    assert "p95 ms" in result.stderr
    assert max(map(len, result.stderr.splitlines())) <= 80


@pytest.mark.parametrize("rate", [0.000_1, 0.003])
def test_traces_that_come_once_an_hour_are_decided_too(rate: float) -> None:
    assert len(latencies_s(fleet(1, cores=0.5), at_random(rate, TOKENS, 2_000))) == 2_000
