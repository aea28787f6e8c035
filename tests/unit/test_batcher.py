"""The micro-batcher: which traces it batches, and which it retries alone after a failure. Numbers stand for traces."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import pytest
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.batcher import MicroBatcher

from tests.support.processes import wait_until

PATIENCE_S: Final = 10.0


class Item(NamedTuple):
    """A number, and where its result goes."""

    number: int
    future: "Future[int]"


class GatedWork:
    """Doubles numbers, one batch at a time, each only once its gate is open; records its batches.

    It does so in the first stage; the second returns the results.
    """

    def __init__(self, fail: Callable[[Sequence[int]], None] = lambda batch: None) -> None:
        self.batches: list[list[int]] = []
        self.is_at_work = threading.Lock()
        self.started = threading.Event()
        self.gate = threading.Event()
        self._fail = fail

    def prepare(self, items: Sequence[Item], *, alone: bool) -> list[int]:
        assert len(items) == 1 or not alone
        batch = [item.number for item in items]
        self.batches.append(batch)
        assert self.is_at_work.acquire(blocking=False), "two batches were prepared at once"
        try:
            self.started.set()
            assert self.gate.wait(PATIENCE_S)
            self._fail(batch)
            return [number * 2 for number in batch]
        finally:
            self.is_at_work.release()

    def finish(self, work: list[int]) -> list[int | None]:
        return list(work)

    def refresh(self) -> None:
        pass


class Batcher:
    """A batcher whose results come as futures."""

    def __init__(self, work: GatedWork, max_batch: int) -> None:
        stages: Any = work
        self._batcher: Any = MicroBatcher(stages, self._on_resolved, max_batch)
        self.stop = self._batcher.stop
        self.completed: list[list[int | Exception]] = []

    def submit(self, number: int) -> "Future[int]":
        item = Item(number, Future())
        self._batcher.submit(item)
        return item.future

    def _on_resolved(self, resolved: Sequence[tuple[Any, Any]]) -> None:
        self.completed.append([result for _, result in resolved])
        for item, result in resolved:
            if isinstance(result, Exception):
                item.future.set_exception(result)
            else:
                item.future.set_result(result)


Start = Callable[[GatedWork, int], Batcher]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts batchers, whose work must open its gate, and stops them in the end."""
    with ExitStack() as started:

        def start_batcher(work: GatedWork, max_batch: int) -> Batcher:
            batcher = Batcher(work, max_batch)
            started.callback(batcher.stop)
            return batcher

        yield start_batcher


def submit_behind_first(batcher: Batcher, work: GatedWork, items: Sequence[int]) -> list["Future[int]"]:
    """Submit the first item, wait until it is being worked on, submit the others behind it, then let work go on."""
    first = batcher.submit(items[0])
    assert work.started.wait(PATIENCE_S)
    futures = [first, *(batcher.submit(item) for item in items[1:])]
    work.gate.set()
    return futures


def results(futures: Sequence["Future[int]"]) -> list[int]:
    return [future.result(PATIENCE_S) for future in futures]


def failures(futures: Sequence["Future[int]"]) -> list[str | None]:
    return [str(error) if (error := future.exception(PATIENCE_S)) else None for future in futures]


def poisoned_by(poison: int) -> Callable[[Sequence[int]], None]:
    def fail(batch: Sequence[int]) -> None:
        if poison in batch:
            raise ValueError(f"poisoned by {poison}")

    return fail


@pytest.mark.parametrize(
    ("max_batch", "items", "batches"),
    [
        pytest.param(8, [1], [[1]], id="the first is not kept waiting"),
        pytest.param(8, [1, 2, 3, 4], [[1], [2, 3, 4]], id="all that wait become one batch"),
        pytest.param(3, list(range(9)), [[0], [1, 2, 3], [4, 5, 6], [7, 8]], id="a batch is bounded, and the others follow"),
        pytest.param(1, [1, 2, 3], [[1], [2], [3]], id="batches of one"),
    ],
)
def test_what_waits_is_batched_in_order(start: Start, max_batch: int, items: list[int], batches: list[list[int]]) -> None:
    work = GatedWork()
    batcher = start(work, max_batch)
    assert results(submit_behind_first(batcher, work, items)) == [item * 2 for item in items]
    assert work.batches == batches
    assert batcher.completed == [[item * 2 for item in batch] for batch in batches], "a batch's results come together"


def test_poisonous_item_fails_alone(start: Start) -> None:
    work = GatedWork(poisoned_by(3))
    futures = submit_behind_first(start(work, 8), work, [1, 2, 3, 4])
    assert failures(futures) == [None, None, "poisoned by 3", None]
    assert [results([future]) for future in (futures[0], futures[1], futures[3])] == [[2], [4], [8]]
    assert work.batches == [[1], [2, 3, 4], [2], [3], [4]]


def test_item_that_fails_alone_is_not_retried_and_work_goes_on(start: Start) -> None:
    work = GatedWork(poisoned_by(1))
    batcher = start(work, 8)
    assert failures(submit_behind_first(batcher, work, [1])) == ["poisoned by 1"]
    assert results([batcher.submit(5)]) == [10]
    assert work.batches == [[1], [5]]


def test_outage_fails_a_batch_together_without_a_retry(start: Start) -> None:
    def fail(batch: Sequence[int]) -> None:
        if 2 in batch:
            raise ServiceUnavailable("the log does not answer")

    work = GatedWork(fail)
    futures = submit_behind_first(start(work, 3), work, [1, 2, 3, 4, 5])
    assert failures(futures) == [None, *["the log does not answer"] * 3, None]
    assert all(isinstance(future.exception(), ServiceUnavailable) for future in futures[1:4])
    assert work.batches == [[1], [2, 3, 4], [5]]


def test_outage_while_items_are_retried_one_by_one_fails_only_those_it_affects(start: Start) -> None:
    def fail(batch: Sequence[int]) -> None:
        if len(batch) > 1:
            raise ValueError("poisoned")
        if batch[0] == 3:
            raise ServiceUnavailable("out")

    work = GatedWork(fail)
    assert failures(submit_behind_first(start(work, 8), work, [1, 2, 3, 4])) == [None, None, "out", None]


@pytest.mark.parametrize("count", [0, 7])
def test_stop_finishes_submitted_items(count: int) -> None:
    work = GatedWork()
    batcher = Batcher(work, 2)
    futures = submit_behind_first(batcher, work, range(count)) if count else []
    batcher.stop()
    assert [future.done() for future in futures] == [True] * count
    assert results(futures) == [item * 2 for item in range(count)]


class TwoStages(GatedWork):
    """Doubles numbers in the second stage, behind a gate of its own, and wants some numbers alone."""

    def __init__(self, wants_alone: Sequence[int] = (), fails_late: int | None = None) -> None:
        super().__init__()
        self.gate.set()
        self.finished: list[list[int]] = []
        self.finishing = threading.Event()
        self.finish_gate = threading.Event()
        self.in_flight_when_alone: list[int] = []
        self._wants_alone = wants_alone
        self._fails_late = fails_late
        self._in_flight = 0

    def prepare(self, items: Sequence[Item], *, alone: bool) -> list[int]:
        batch = [item.number for item in items]
        self.batches.append(batch)
        if alone:
            self.in_flight_when_alone.append(self._in_flight)
        self._in_flight += 1
        return [number if alone or number not in self._wants_alone else -1 for number in batch]

    def finish(self, work: list[int]) -> list[int | None]:
        self.finishing.set()
        assert self.finish_gate.wait(PATIENCE_S)
        self.finished.append(work)
        self._in_flight -= 1
        if self._fails_late in work:
            raise ValueError(f"poisoned by {self._fails_late}")
        return [None if item < 0 else item * 2 for item in work]


def test_the_next_batch_is_prepared_while_one_is_finished(start: Start) -> None:
    work = TwoStages()
    batcher = start(work, 2)
    futures = [batcher.submit(1)]
    assert work.finishing.wait(PATIENCE_S)
    futures += [batcher.submit(item) for item in (2, 3)]
    wait_until(lambda: len(work.batches) == 2, PATIENCE_S)
    assert work.finished == []
    work.finish_gate.set()
    assert results(futures) == [2, 4, 6]


def test_an_item_to_be_retried_alone_is_prepared_when_nothing_is_in_flight(start: Start) -> None:
    work = TwoStages(wants_alone=[2, 5])
    batcher = start(work, 3)
    work.finish_gate.set()
    assert results([batcher.submit(item) for item in range(12)]) == [item * 2 for item in range(12)]
    assert [2] in work.batches
    assert [5] in work.batches
    assert work.in_flight_when_alone == [0, 0]


def test_a_batch_that_fails_in_the_second_stage_is_retried_one_by_one(start: Start) -> None:
    work = TwoStages(fails_late=3)
    batcher = start(work, 4)
    first = batcher.submit(0)
    assert work.finishing.wait(PATIENCE_S)
    futures = [first, *(batcher.submit(item) for item in (1, 2, 3, 4))]
    work.finish_gate.set()
    assert failures(futures) == [None, None, None, "poisoned by 3", None]


def test_stop_waits_for_items_to_be_retried_alone() -> None:
    work = TwoStages(wants_alone=[1, 2, 3])
    batcher = Batcher(work, 4)
    futures = [batcher.submit(item) for item in range(5)]
    work.finish_gate.set()
    batcher.stop()
    assert results(futures) == [0, 2, 4, 6, 8]
