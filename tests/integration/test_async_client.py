"""The client for asyncio gives the answers of the blocking one, does not block the event loop, and works in a web service."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.client import AsyncClient, Client
from kp_scorer.errors import DecisionTimeout, InvalidTrace, ServiceUnavailable, TraceConflict, TraceDead
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering

from tests.support.changed_settings import with_changed
from tests.support.processes import PATIENCE_S, at_work, slowness
from tests.support.proxy import Proxy
from tests.support.traces import fresh_samples, new_id, short_traces

TIMEOUT_S: Final = 1.0
TASKS: Final = 50


def with_client(settings: Settings, use: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Run a coroutine function with a client, in an event loop of its own."""

    async def run() -> None:
        async with AsyncClient(settings) as client:
            await use(client)

    asyncio.run(run())


@pytest.fixture
def network(settings: Settings) -> Iterator[tuple[Proxy, Settings]]:
    """A proxy between a client and its Redis, and the settings of a client behind it, which waits at most a second."""
    with Proxy(settings.redis.url) as proxy:
        yield proxy, with_changed(settings, redis__url=proxy.url, broker__timeout_s=TIMEOUT_S)
        proxy.deliver()


def test_each_method_returns_what_the_blocking_client_returns(settings: Settings, tmp_path: Path) -> None:
    first, second, *more = short_traces(150, seed=11)
    wanted = [trace["id"] for trace in more]

    async def use(client: AsyncClient) -> None:
        assert await client.submit(first) == first["id"]
        *ids, refused, last = await client.submit_many([*more, {}, second])
        assert (ids, type(refused), last) == (wanted, InvalidTrace, second["id"])
        statuses = [status async for status in client.as_completed([first["id"], *wanted], timeout_s=PATIENCE_S)]
        assert {status.trace_id for status in statuses if status.decision} == {first["id"], *wanted}
        decision = await client.wait(second["id"], timeout_s=PATIENCE_S)
        status, unknown = await client.look_up([second["id"], new_id()])
        assert status
        assert (status.decision, unknown) == (decision, None)
        with Client(settings) as for_threads:
            assert for_threads.wait(second["id"], timeout_s=5) == decision

    with at_work(settings, tmp_path):
        with_client(settings, use)


def test_each_method_raises_what_the_blocking_client_raises(settings: Settings, store: Store) -> None:
    (trace,) = fresh_samples(1)
    dead = new_id()
    store.dead_letters.dead_letter(b"{}", DeadLettering("invalid", "steps: expected some", trace_id=dead))

    async def use(client: AsyncClient) -> None:
        with pytest.raises(InvalidTrace, match="id: Field required"):
            await client.submit({})
        await client.submit(trace)
        with pytest.raises(TraceConflict, match=trace["id"]):
            await client.submit(trace | {"task": {"objective": "something else"}})
        # No worker consumes the queue of this database.
        with pytest.raises(DecisionTimeout, match="it is still pending"):
            await client.wait(trace["id"], timeout_s=0.05)
        with pytest.raises(DecisionTimeout, match="it is unknown"):
            await client.wait(new_id(), timeout_s=0.05)
        with pytest.raises(TraceDead, match="expected some"):
            await client.wait(dead, timeout_s=5)

    with_client(settings, use)


def test_the_loop_goes_on_while_a_server_is_silent_and_every_call_ends_in_time(network: tuple[Proxy, Settings]) -> None:
    proxy, behind = network
    traces = short_traces(TASKS, seed=13)

    async def use(client: AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        await client.submit(traces[0])
        proxy.hold()
        before, started = threading.active_count(), loop.time()
        calls = [asyncio.ensure_future(client.submit(trace)) for trace in traces]
        calls.append(asyncio.ensure_future(client.wait(traces[0]["id"], timeout_s=PATIENCE_S)))  # type: ignore[arg-type]
        turns, longest_s = 0, 0.0
        while not all(call.done() for call in calls):
            turn_s = loop.time()
            await asyncio.sleep(0.001)
            turns, longest_s = turns + 1, max(longest_s, loop.time() - turn_s)
        elapsed_s, slow = loop.time() - started, slowness()
        assert elapsed_s < slow * (TIMEOUT_S + 0.5)
        assert turns > 50 / slow
        assert longest_s < slow * TIMEOUT_S / 2
        assert threading.active_count() == before
        errors = [call.exception() for call in calls]
        assert {type(error) for error in errors} == {ServiceUnavailable}
        assert str(errors[0]) == "submit: no answer within 1 s; submit again, which is always safe"
        proxy.deliver()

        async def submits() -> bool:
            try:
                return bool(await client.submit(traces[1]))
            except ServiceUnavailable:
                return False

        async with asyncio.timeout(30):
            while not await submits():
                await asyncio.sleep(0.02)

    with_client(behind, use)


def test_a_call_cancelled_while_it_waits_for_another_never_begins(network: tuple[Proxy, Settings], store: Store) -> None:
    proxy, behind = network
    first, second = short_traces(2, seed=14)

    async def use(client: AsyncClient) -> None:
        await client.look_up([new_id()])
        proxy.hold()
        stuck = asyncio.ensure_future(client.submit(first, timeout_s=30))
        behind = asyncio.ensure_future(client.submit(second, timeout_s=30))
        await asyncio.sleep(0)
        behind.cancel()
        with pytest.raises(asyncio.CancelledError):
            await behind
        proxy.deliver()
        assert await stuck == first["id"]
        assert await client.look_up([second["id"]]) == [None]

    with_client(behind, use)
    assert store.ledger.counts().pending == 1


def test_a_client_serves_one_loop_after_another(settings: Settings) -> None:
    first, second = short_traces(2, seed=16)
    client = AsyncClient(settings)
    assert [asyncio.run(client.submit(trace)) for trace in (first, second)] == [first["id"], second["id"]]
    asyncio.run(client.close())
