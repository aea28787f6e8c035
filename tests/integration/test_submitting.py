"""Submitting many traces in one call gives what submitting them one by one gives, in fewer steps."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace, SettingsError, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import LIMITS, decision_on, minimal_payload, store_decisions
from tests.support.traces import fresh_samples, new_id, short_traces


def test_namespaces_keep_the_ids_of_producers_apart(settings: Settings) -> None:
    with Client(settings, "billing") as billing, Client(settings, "search.2") as search:
        payload = minimal_payload(trace_id="kp:trace:1", objective="one")
        ids = billing.submit(payload), search.submit(minimal_payload(trace_id="kp:trace:1", objective="another"))
        assert ids == ("kp:trace:billing:1", "kp:trace:search.2:1")
        assert [status and status.state for status in billing.look_up([*ids, "kp:trace:1"])] == ["pending", "pending", None]
        assert payload["id"] == "kp:trace:1", "a caller's object stays as it is"
        # Submitting the trace again gives the same id, whether under its new name or as a trace that is already checked.
        assert billing.submit(payload | {"id": ids[0]}) == ids[0]
        assert billing.submit(decode_trace(payload, LIMITS)) == ids[0]


def test_namespace_counts_as_part_of_the_id(settings: Settings) -> None:
    with Client(settings, "n" * 64) as client:
        for unfit in ("kp:trace:" + "x" * 127, "trace:1"):
            with pytest.raises(InvalidTrace, match=r"^id: "):
                client.submit(minimal_payload(trace_id=unfit))
        assert client.submit(minimal_payload(trace_id="kp:trace:" + "x" * 126))


@pytest.mark.parametrize("namespace", ["a:b", "a b", "\u00e9", "n" * 65, "a\n"])
def test_namespace_of_other_characters_is_refused(settings: Settings, namespace: str) -> None:
    with pytest.raises(SettingsError, match=r"^namespace: expected"):
        Client(settings, namespace)


BAD = {"@type": "ReasoningTrace"}


def kinds(answers: Sequence[object]) -> list[str]:
    return [type(answer).__name__ for answer in answers]


def calls(redis_client: redis.Redis) -> int:
    """Return the number of script calls, as the ledger makes them, and of pushes onto a list."""
    stats: Any = redis_client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "lpush"))


def large(count: int) -> list[dict[str, Any]]:
    """Return ``count`` traces of 900 kB each."""
    steps = [{"step_id": number, "type": "thought", "content": "x" * 90_000} for number in range(10)]
    return [minimal_payload(trace_id=new_id(), steps=steps) for _ in range(count)]


def test_each_trace_is_recorded_and_sent_once_and_in_order(settings: Settings, store: Store, redis_client: redis.Redis) -> None:
    traces = short_traces(250, seed=1)
    with Client(settings) as client:
        assert client.submit_many(traces) == [trace["id"] for trace in traces]
    assert store.ledger.counts().pending == 250
    sent: Any = redis_client.lrange(settings.queues.first, 0, -1)
    # Consumers take messages from the other end of the list.
    assert [trace["id"].encode() in item for trace, item in zip(traces, reversed(sent), strict=True)] == [True] * 250


# A portion is a hundred of the short traces, but only four of the large ones, as five exceed 4 MiB.
@pytest.mark.parametrize("traces", [short_traces(250, seed=3), large(12)], ids=["short", "large"])
def test_a_portion_of_traces_costs_one_call_of_the_ledger_and_one_of_the_broker(
    alone: tuple[Settings, redis.Redis], traces: list[dict[str, Any]]
) -> None:
    settings, server = alone
    with Client(settings) as client:
        client.submit_many(short_traces(1, seed=2))
        before = calls(server)
        client.submit_many(traces)
        assert calls(server) - before == 3 * 2
    assert server.llen(settings.queues.first) == 1 + len(traces)


def test_submitting_no_valid_trace_writes_nothing(settings: Settings, redis_client: redis.Redis) -> None:
    with Client(settings) as client:
        assert client.submit_many([]) == []
        assert kinds(client.submit_many([BAD, BAD])) == ["InvalidTrace"] * 2
    assert redis_client.keys() == []


def test_submitting_many_returns_what_submitting_each_returns(settings: Settings, redis_client: redis.Redis) -> None:
    first, second = fresh_samples(2)
    traces = [
        first,
        BAD,
        first,
        first | {"task": {"objective": "something else"}},
        second,
        first,
        second | {"steps": []},
        second,
    ]

    def alone(client: Client, trace: dict[str, Any]) -> object:
        try:
            return client.submit(trace)
        except (InvalidTrace, TraceConflict) as error:
            return error

    with Client(settings, "many") as many, Client(settings, "each") as each:
        together = many.submit_many(traces)
        sent = redis_client.llen(settings.queues.first)
        by_itself = [alone(each, trace) for trace in traces]
    assert redis_client.llen(settings.queues.first) == 2 * sent
    assert [str(answer).replace(":many:", ":each:") for answer in together] == [str(answer) for answer in by_itself]
    assert kinds(together) == kinds(by_itself)


def test_decided_traces_are_not_sent_again(settings: Settings, store: Store, redis_client: redis.Redis) -> None:
    traces = short_traces(120, seed=4)
    for trace in traces:
        digest = decode_trace(trace, LIMITS).digest()
        store_decisions(store, {trace["id"]: decision_on(trace["id"])}, digest)
    with Client(settings) as client:
        assert client.submit_many(traces) == [trace["id"] for trace in traces]
    assert redis_client.llen(settings.queues.first) == 0


class Watched(dict[str, Any]):
    __hash__ = object.__hash__  # type: ignore[assignment]


def test_traces_may_come_from_a_generator_and_few_are_held(settings: Settings) -> None:
    in_memory: weakref.WeakSet[Watched] = weakref.WeakSet()
    most = 0

    def generated() -> Iterator[Watched]:
        nonlocal most
        for number, trace in enumerate(short_traces(700, seed=5)):
            # An invalid trace's error must not keep the traces around it in memory.
            watched = Watched(trace if number % 50 else {**trace, "outcome": None})
            in_memory.add(watched)
            most = max(most, len(in_memory))
            yield watched

    with Client(settings) as client:
        assert len(client.submit_many(generated())) == 700
    assert most <= 200


def test_an_error_of_the_source_is_raised_and_all_can_be_submitted_again(settings: Settings) -> None:
    traces = short_traces(150, seed=6)

    def failing() -> Iterator[dict[str, Any]]:
        yield from traces
        raise KeyError("the source")

    with Client(settings) as client:
        with pytest.raises(KeyError, match="the source"):
            client.submit_many(failing())
        assert len(client.submit_many(traces)) == 150
