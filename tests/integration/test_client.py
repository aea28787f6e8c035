"""One client serves many threads, and its calls end in time even while servers are silent."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, TypeVar

import pytest
from kp_scorer.client import Client, io_thread
from kp_scorer.client.io_thread import IoThread
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.processes import PATIENCE_S, ending_within, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import own_queues
from tests.support.traces import fresh_samples, short_traces

THREADS: Final = 16

Result = TypeVar("Result")


def at_once(call: Callable[[int], Result]) -> list[Result]:
    """Call a function in many threads at once; return the results."""
    barrier = threading.Barrier(THREADS)

    def run_one(number: int) -> Result:
        barrier.wait(PATIENCE_S)
        return call(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run_one, range(THREADS)))


def client_threads() -> int:
    return sum(thread.name == "kp-scorer-client" for thread in threading.enumerate())


def test_threads_share_a_client(settings: Settings, store: Store) -> None:
    traces = [short_traces(40, seed) for seed in range(THREADS)]
    before = client_threads()
    with Client(settings) as client:

        def use(number: int) -> bool:
            own = traces[number]
            wanted = [trace["id"] for trace in own]
            one_by_one = [client.submit(trace) for trace in own[:10]]
            together = client.submit_many(own[10:], timeout_s=30)
            looked_up = [status.trace_id for status in client.look_up(wanted) if status]
            return [*one_by_one, *together] == wanted == looked_up

        assert all(at_once(use))
        assert client_threads() == before + 1
    assert store.ledger.counts().pending == 40 * THREADS


def test_close_leaves_no_other_thread_waiting(settings: Settings) -> None:
    client = Client(settings)

    def use(number: int) -> bool:
        if number == 0:
            client.close()
            return True
        try:
            return client.look_up(["kp:trace:one"], timeout_s=10) == [None]
        except ServiceUnavailable as error:
            # Closing the client may have closed this thread's connection during the call.
            return "no answer" not in str(error)

    assert all(at_once(use))
    client.close()


def test_calls_run_before_and_after_stop() -> None:
    thread, go_on = IoThread(), threading.Event()
    before = client_threads()
    futures = [thread.submit(lambda: go_on.wait(PATIENCE_S)), thread.submit(lambda: True)]
    thread.stop()
    futures.append(thread.submit(lambda: True))
    go_on.set()
    assert [future.result(PATIENCE_S) for future in futures] == [True] * 3
    thread.stop()
    thread.stop()
    wait_until(lambda: client_threads() < before + 1)


def test_forked_child_can_start_a_thread_while_the_lock_was_held() -> None:
    with io_thread._starting:
        child = os.fork()
        if not child:
            # The child must run nothing else of the test suite.
            os._exit(IoThread().submit(lambda: 42).result(PATIENCE_S) != 42)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


TIMEOUT_S: Final = 1.0
LATE_BY_S: Final = 0.5
SAFE: Final = r"^submit: no answer within 1 s; submit again, which is always safe$|^ledger: TimeoutError"
"""A call to the client and its connection to Redis have the same timeout, so either may end first."""


class Scene(NamedTuple):
    """A client, and the network between it and the server that will be silent."""

    client: Client
    network: Proxy

    def submit(self, timeout_s: float | None = None) -> str:
        (trace,) = fresh_samples(1)
        return self.client.submit(trace, timeout_s)

    def submits(self) -> bool:
        try:
            return bool(self.submit())
        except ServiceUnavailable:
            return False


@pytest.fixture(params=["silent store", "silent Redis as broker", "silent RabbitMQ"])
def scene(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Scene]:
    """A client that reaches the store or the broker, whichever will be silent, through a proxy."""
    urls = {"redis.url": settings.redis.url, "broker.url": settings.broker.url}
    if request.param == "silent RabbitMQ":
        urls["broker.url"] = request.getfixturevalue("rabbitmq_url")
    silent = "redis.url" if request.param == "silent store" else "broker.url"
    with Proxy(urls[silent]) as network:
        behind = load_settings({**urls, **own_queues(), silent: network.url, "broker.timeout_s": TIMEOUT_S})
        with Client(behind) as client:
            yield Scene(client, network)
            # Closing the client would wait for the silent server.
            network.deliver()


with_silent_store = pytest.mark.parametrize("scene", ["silent store"], indirect=True)


def in_time(call: Callable[[], object], timeout_s: float, message: str) -> None:
    """Assert that a call ends in time, with an error that the service is unavailable."""
    with ending_within(timeout_s + LATE_BY_S), pytest.raises(ServiceUnavailable, match=message):
        call()


@pytest.mark.parametrize("connected", [True, False], ids=["on an open connection", "from the start"])
def test_a_submit_to_a_silent_server_ends_in_time_and_the_client_recovers(scene: Scene, connected: bool) -> None:
    if connected:
        wait_until(scene.submits)
    scene.network.hold()
    in_time(scene.submit, TIMEOUT_S, SAFE)
    # The first call still waits for the server.
    in_time(scene.submit, TIMEOUT_S, SAFE)
    in_time(lambda: scene.submit(0.2), 0.2, r"no answer within 0\.2 s")
    scene.network.deliver()
    wait_until(scene.submits)


@with_silent_store
def test_looking_up_waiting_and_closing_end_in_time_too(scene: Scene) -> None:
    client, trace_id = scene.client, scene.submit()
    scene.network.hold()
    in_time(lambda: client.look_up([trace_id]), TIMEOUT_S, "^look up: no answer within 1 s$|^ledger: TimeoutError")
    in_time(lambda: client.look_up([trace_id], 0.2), 0.2, "^look up: no answer within 0.2 s$")
    in_time(lambda: client.wait(trace_id, timeout_s=PATIENCE_S), TIMEOUT_S, "no answer|TimeoutError")
    in_time(lambda: client.wait(trace_id, timeout_s=0), TIMEOUT_S, "no answer")
    with ending_within(TIMEOUT_S + LATE_BY_S):
        client.close()


@with_silent_store
def test_a_client_that_waits_does_not_keep_its_process_alive(scene: Scene, settings: Settings) -> None:
    scene.network.hold()
    code = (
        "from kp_scorer import Client, ServiceUnavailable\n"
        f"client = Client.connect({settings.broker.url!r}, {scene.network.url!r})\n"
        "try:\n    client.look_up(['kp:trace:one'], 0.1)\n"
        "except ServiceUnavailable:\n    print('unavailable')\n"
    )
    with ending_within(10):
        child_process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
    assert child_process.stdout == "unavailable\n"
