"""Submitting many traces in one call: as one by one, in fewer steps."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.errors import InvalidTrace, ServiceUnavailable, TraceConflict
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.builders import minimal_payload
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples, new_id, short_traces

BAD = {"@type": "ReasoningTrace"}


def kinds(answers: Sequence[object]) -> list[str]:
    """The type of each answer."""
    return [type(answer).__name__ for answer in answers]


def calls(redis_client: redis.Redis) -> int:
    """How often a script was called, as the ledger's are, or something put on a list."""
    stats: Any = redis_client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "lpush"))


def large(count: int) -> list[dict[str, Any]]:
    """So many traces of 900 kB each."""
    steps = [{"step_id": number, "type": "thought", "content": "x" * 90_000} for number in range(10)]
    return [minimal_payload(trace_id=new_id(), steps=steps) for _ in range(count)]


def test_each_trace_is_noted_and_sent_once_and_in_order(settings: Settings, store: Store, redis_client: redis.Redis) -> None:
    traces = short_traces(250, seed=1)
    with Client(settings) as client:
        assert client.submit_many(traces) == [trace["id"] for trace in traces]
    assert store.ledger.counts().pending == 250
    sent: Any = redis_client.lrange(settings.queues.traces, 0, -1)
    # Taken from the other end.
    assert [trace["id"].encode() in item for trace, item in zip(traces, reversed(sent), strict=True)] == [True] * 250


def test_a_hundred_take_one_call_of_the_ledger_and_one_of_the_broker(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    with Client(settings) as client:
        client.submit_many(short_traces(1, seed=2))
        before = calls(server)
        client.submit_many(short_traces(250, seed=3))
        assert calls(server) - before == 3 * 2


def test_large_ones_go_in_smaller_portions(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    with Client(settings) as client:
        client.submit_many(short_traces(1, seed=2))
        before = calls(server)
        client.submit_many(large(12))
        # Five are over 4 MiB.
        assert calls(server) - before == 3 * 2
    assert server.llen(settings.queues.traces) == 13


def test_nothing_to_submit_is_nothing_to_do(settings: Settings, redis_client: redis.Redis) -> None:
    with Client(settings) as client:
        assert client.submit_many([]) == []
        assert kinds(client.submit_many([BAD, BAD])) == ["InvalidTrace"] * 2
    assert redis_client.keys() == []


def test_what_is_wrong_with_one_keeps_no_other_back(settings: Settings, store: Store) -> None:
    one, two, three = fresh_samples(3)
    other = two | {"task": {"objective": "something else"}}
    with Client(settings) as client:
        client.submit(two)
        found = client.submit_many([BAD, one, 5, other, three])  # type: ignore[list-item]  # 5 is no trace
        assert kinds(found) == ["InvalidTrace", "str", "InvalidTrace", "TraceConflict", "str"]
        assert (found[1], found[4]) == (one["id"], three["id"])
        assert isinstance(found[0], InvalidTrace)
        assert "metadata: Field required" in str(found[0])
        assert isinstance(found[3], TraceConflict)
        assert found[3].trace_id == two["id"]
    assert store.ledger.counts().pending == 3


def test_it_is_as_if_each_were_submitted_by_itself(settings: Settings, redis_client: redis.Redis) -> None:
    one, two = fresh_samples(2)
    traces = [one, BAD, one, one | {"task": {"objective": "something else"}}, two, one, two | {"steps": []}, two]

    def alone(client: Client, trace: dict[str, Any]) -> object:
        try:
            return client.submit(trace)
        except (InvalidTrace, TraceConflict) as error:
            return error

    with Client(settings, "many") as many, Client(settings, "each") as each:
        together = many.submit_many(traces)
        sent = redis_client.llen(settings.queues.traces)
        by_itself = [alone(each, trace) for trace in traces]
    assert redis_client.llen(settings.queues.traces) == 2 * sent
    assert [str(answer).replace(":many:", ":each:") for answer in together] == [str(answer) for answer in by_itself]
    assert kinds(together) == kinds(by_itself)


def test_what_is_decided_is_not_sent_again(settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    traces = short_traces(120, seed=4)
    with Client(settings) as client:
        with start_worker(settings, tmp_path / "log", command=FAST_WORKER):
            trace_ids = client.submit_many(traces)
            settled = list(client.as_settled(map(str, trace_ids), timeout_s=60))
            assert {status.trace_id for status in settled if status.decision} == set(trace_ids)
        assert client.submit_many(traces) == trace_ids
    assert redis_client.llen(settings.queues.traces) == 0


class Watched(dict[str, Any]):
    """A trace that can be watched."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_traces_may_come_from_a_generator_and_few_are_held(settings: Settings) -> None:
    held: weakref.WeakSet[Watched] = weakref.WeakSet()
    most = 0

    def generated() -> Iterator[Watched]:
        nonlocal most
        for number, trace in enumerate(short_traces(700, seed=5)):
            # What is said of one that is wrong must not keep those around it.
            watched = Watched(trace if number % 50 else {**trace, "outcome": None})
            held.add(watched)
            most = max(most, len(held))
            yield watched

    with Client(settings) as client:
        assert len(client.submit_many(generated())) == 700
    assert most <= 200


def test_an_error_of_the_source_is_raised_and_what_came_before_is_submitted_or_not_begun(settings: Settings) -> None:
    traces = short_traces(150, seed=6)

    def failing() -> Iterator[dict[str, Any]]:
        yield from traces
        raise KeyError("the source")

    with Client(settings) as client:
        with pytest.raises(KeyError, match="the source"):
            client.submit_many(failing())
        assert len(client.submit_many(traces)) == 150


@pytest.mark.parametrize("silent", ["redis.url", "broker.url"])
@pytest.mark.parametrize("timeout_s", [None, 0.7])
def test_a_server_that_falls_silent_half_way_ends_the_call_and_all_may_be_submitted_again(
    settings: Settings, store: Store, silent: str, timeout_s: float | None
) -> None:
    traces = short_traces(350, seed=7)
    with ExitStack() as opened:
        network = opened.enter_context(Proxy(settings.redis.url))
        opened.callback(network.deliver)
        urls = {"redis.url": settings.redis.url, "broker.url": settings.broker.url, silent: network.url}
        client = opened.enter_context(Client(load_settings({**urls, "broker.submit_timeout_s": 1.0})))

        def interrupted() -> Iterator[dict[str, Any]]:
            yield from traces[:150]
            network.hold()
            yield from traces[150:]

        said = f"^submit: no answer within {timeout_s or 1:g} s; submit all of them again, which is always safe$"
        with pytest.raises(ServiceUnavailable, match=said):
            client.submit_many(interrupted(), timeout_s)
        assert store.ledger.counts().pending < 350
        network.deliver()

        def again() -> bool:
            try:
                return client.submit_many(traces) == [trace["id"] for trace in traces]
            except ServiceUnavailable:
                return False

        wait_until(again)
    assert store.ledger.counts().pending == 350


def test_one_deadline_is_for_all_hundreds_together(settings: Settings) -> None:
    with Client(settings) as client, pytest.raises(ServiceUnavailable, match=r"no answer within 0\.05 s"):
        client.submit_many(short_traces(2_000, seed=8), timeout_s=0.05)


def test_rabbitmq_takes_them_too(rabbitmq: RabbitMQ) -> None:
    traces = short_traces(250, seed=9)
    with Client(rabbitmq.settings()) as client:
        assert client.submit_many(traces) == [trace["id"] for trace in traces]
    wait_until(lambda: rabbitmq.waiting("traces") == 250)
