"""One client for many threads: each gets its own answer, and one thread talks to the servers for all."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import pytest
from kp_scorer.client import Client
from kp_scorer.client.errands import Errands
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.processes import wait_until
from tests.support.traces import short_traces

THREADS: Final = 16

Found = TypeVar("Found")


def at_once(call: Callable[[int], Found]) -> list[Found]:
    """Call it in many threads that begin together; return what each got."""
    barrier = threading.Barrier(THREADS)

    def begin(number: int) -> Found:
        barrier.wait(10)
        return call(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(begin, range(THREADS)))


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
            found = [status.trace_id for status in client.look_up(wanted) if status]
            return [*one_by_one, *together] == wanted == found

        assert all(at_once(use))
        assert client_threads() == before + 1
    assert store.ledger.counts().pending == 40 * THREADS


def test_closing_a_client_that_others_use_leaves_none_of_them_waiting(settings: Settings) -> None:
    client = Client(settings)

    def use(number: int) -> bool:
        if number == 0:
            client.close()
            return True
        try:
            return client.look_up(["kp:trace:one"], timeout_s=10) == [None]
        except ServiceUnavailable as error:
            # Its connection was closed under its hands.
            return "no answer" not in str(error)

    assert all(at_once(use))
    client.close()


def test_errands_of_many_threads_run_once_each_in_one_thread() -> None:
    errands = Errands()
    ran: list[tuple[int, int]] = []

    def run(number: int) -> None:
        errands.begin(lambda: ran.append((number, threading.get_ident()))).result(10)

    at_once(run)
    errands.end()
    assert sorted(number for number, _ in ran) == list(range(THREADS))
    assert len({thread for _, thread in ran}) == 1


def test_an_errand_that_nobody_waits_for_any_more_is_never_begun() -> None:
    errands, go_on = Errands(), threading.Event()
    first = errands.begin(lambda: go_on.wait(10))
    second, third = errands.begin(lambda: pytest.fail("begun")), errands.begin(lambda: "third")
    assert second.cancel()
    go_on.set()
    assert (first.result(10), third.result(10)) == (True, "third")
    errands.end()


def test_errands_handed_over_before_the_end_are_run_and_later_ones_too() -> None:
    errands, go_on = Errands(), threading.Event()
    before = client_threads()
    begun = [errands.begin(lambda: go_on.wait(10)), errands.begin(lambda: True)]
    errands.end()
    begun.append(errands.begin(lambda: True))
    go_on.set()
    assert [future.result(10) for future in begun] == [True] * 3
    errands.end()
    errands.end()
    wait_until(lambda: client_threads() < before + 1)


def test_a_fork_while_another_thread_starts_a_client_leaves_the_child_able_to() -> None:
    from kp_scorer.client import errands as module

    with module._starting:
        child = os.fork()
        if not child:
            # Nothing of the tests may run on in it.
            os._exit(Errands().begin(lambda: 42).result(10) != 42)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
