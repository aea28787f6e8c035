"""What a fleet sustains adds up, and its latencies are those of a queue with several servers."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.commands.capacity import Costs, Fleet, capacity, erlang_c


def fleet(workers: int = 1, **changed: object) -> Fleet:
    return replace(Fleet(workers, cores=2.0 * workers, tokens=400), **changed)  # type: ignore[arg-type]


@given(st.integers(1, 40))
def test_throughput_grows_with_the_workers_until_redis_limits_it(workers: int) -> None:
    assert fleet(workers).throughput == pytest.approx(workers * fleet().throughput)
    assert fleet(workers).bottleneck == "workers' cores"


@given(st.integers(1, 8))
def test_workers_on_the_same_cores_sustain_no_more(workers: int) -> None:
    assert fleet(workers, cores=2.0).throughput == fleet().throughput


@given(st.integers(1, 5_000), st.integers(1, 5_000))
def test_redis_sustains_less_the_more_workers_read_the_log(fewer: int, more: int) -> None:
    few, many = sorted((fewer, more))
    for resource in ("Redis' core", "Redis' network"):
        assert fleet(many).limits()[resource] <= fleet(few).limits()[resource]


@pytest.mark.parametrize(
    ("servers", "load", "expected"),
    # A single server is busy as often as its load says; the others are from tables of Erlang's C formula.
    [(1, 0.6, 0.6), (2, 1.2, 0.45), (5, 4.0, 0.5541), (10, 8.0, 0.4092), (100, 90.0, 0.2169)],
)
def test_erlang_c_is_that_of_the_tables(servers: int, load: float, expected: float) -> None:
    assert erlang_c(servers, load) == pytest.approx(expected, abs=5e-4)


def test_a_single_trace_does_not_wait() -> None:
    costs = Costs()
    assert fleet().latency_ms(0.01, 0.95) == costs.core_ms(400) + costs.round_trips_ms
    # Half a core takes twice as long.
    assert fleet(cores=0.5).latency_ms(0.001, 0.5) == 2 * costs.core_ms(400) + costs.round_trips_ms


@pytest.mark.parametrize("workers", [1, 2, 8, 1_000])
def test_traces_wait_longer_the_more_arrive(workers: int) -> None:
    of_cores = fleet(workers).limits()["workers' cores"]
    latencies = [fleet(workers).latency_ms(share * of_cores, 0.95) for share in (0.2, 0.5, 0.8, 0.95, 0.999)]
    assert latencies == sorted(latencies)
    assert latencies[-1] > latencies[0]


def test_redis_holds_what_waits_once_more_where_it_has_the_queues() -> None:
    for queues_in_redis, copies in ((True, 2), (False, 1)):
        sized = fleet(queues_in_redis=queues_in_redis)
        one = copies * Costs().message_bytes + Costs().note_bytes
        assert sized.redis_bytes(0.0, 1_000) - sized.redis_bytes(0.0) == 1_000 * one


def test_the_command_names_the_bottleneck() -> None:
    result = CliRunner().invoke(capacity, ["--workers", "1", "--workers", "1000", "--rate", "20"])
    assert result.exit_code == 0
    assert [line.count('"bottleneck":"workers\' cores"') for line in result.stdout.splitlines()] == [1, 0]
    assert result.stderr == "at 20 traces a second\n"


def test_the_command_counts_the_window_the_records_and_the_traces_of_the_settings() -> None:
    def redis_gb(*options: str) -> float:
        result = CliRunner().invoke(capacity, ["--workers", "1", "--rate", "10", *options])
        assert result.exit_code == 0, result.output
        return float(json.loads(result.stdout)["redis_gb"])

    costs = Costs()
    assert redis_gb("--set", "novelty.max_elements=1001000") - redis_gb() == pytest.approx(costs.vector_bytes / 1e3, abs=0.01)
    assert redis_gb("--set", "ledger.ttl_s=172800") - redis_gb() == pytest.approx(costs.record_bytes * 864e3 / 1e9, abs=0.01)
    waiting = ("--waiting", "1000000", "--trace-bytes", "2200")
    for rabbitmq in (("--broker", "rabbitmq"), ("--set", "broker.url=amqp://host")):
        assert redis_gb(*waiting, *rabbitmq) - redis_gb() == pytest.approx(3.1, abs=0.01)
